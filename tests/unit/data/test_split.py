import numpy as np
import pytest

from dualflow.data.documents import Document
from dualflow.data.split import SplitRule, choose_split, sample_limit, survey


class Memory:
    """A source of documents in memory."""

    name = "memory"

    def __init__(self, *documents):
        self._documents = documents

    def documents(self):
        return iter(self._documents)

    def identity(self):
        return "memory"


def texts(count, size=10):
    return Memory(*(Document.plain(f"{i:0{size}d}") for i in range(count)))


def splits(source, fraction):
    rule = choose_split(survey(source), fraction)
    held = list(rule.apply(source.documents()))
    return [d for d, split in held if split == "train"], [
        d for d, split in held if split == "validation"
    ]


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.5])
def test_the_share_held_out_is_near_the_one_asked_for(fraction):
    train, validation = splits(texts(1000), fraction)
    assert len(train) + len(validation) == 1000
    assert len(validation) == round(1000 * fraction)


def test_the_split_of_a_document_does_not_depend_on_the_order():
    source = texts(100)
    reverse = Memory(*reversed(list(source.documents())))
    assert set(splits(source, 0.1)[1]) == set(splits(reverse, 0.1)[1])


@pytest.mark.parametrize("count", [2, 3, 5])
def test_few_documents_still_leave_something_on_both_sides(count):
    train, validation = splits(texts(count), 0.01)
    assert len(validation) == 1
    assert len(train) == count - 1
    assert splits(texts(count), 0.99)[0]


def test_equal_rows_never_stand_on_both_sides():
    rows = Memory(*(Document.plain(f"row {i % 7}") for i in range(100)))
    train, validation = splits(rows, 0.2)
    assert train
    assert validation
    assert not set(train) & set(validation)


def test_a_single_text_is_cut_at_a_line_and_nothing_is_lost():
    text = "".join(f"line {i}\n" for i in range(1000))
    ([train], [validation]) = splits(Memory(Document.plain(text)), 0.1)
    assert train.segments[0].text + validation.segments[0].text == text
    assert train.segments[0].text.endswith("\n")
    assert validation.num_characters == pytest.approx(len(text) * 0.1, rel=0.05)


def test_a_single_text_without_lines_is_cut_where_it_stands():
    ([train], [validation]) = splits(Memory(Document.plain("x" * 100)), 0.25)
    assert (train.num_characters, validation.num_characters) == (75, 25)


@pytest.mark.parametrize(
    "source", [Memory(), texts(1, size=1), Memory(*[Document.plain("same")] * 3)]
)
def test_what_cannot_be_split_is_left_to_training(source):
    assert splits(source, 0.05)[1] == []
    assert splits(texts(10), 0.0)[1] == []


def test_the_sample_for_a_tokenizer_is_of_the_training_split_and_of_the_size_asked_for():
    seen = survey(texts(1000))
    rule = choose_split(seen, 0.1)
    limit = sample_limit(seen, rule, 2000)
    hashes = seen.hashes
    assert ((hashes > np.uint64(rule.last_hash)) & (hashes <= np.uint64(limit))).sum() == 200
    assert sample_limit(seen, rule, 10**9) == int(hashes.max())
    assert sample_limit(seen, SplitRule(), 10) == int(hashes.min())
