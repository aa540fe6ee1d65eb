import pytest

from dualflow.engine.drafts import NgramIndex, propose_ngram


def by_index(tokens, num_drafts, **limits):
    index = NgramIndex(**limits)
    index.extend(tokens)
    assert len(index) == len(tokens)
    return index.propose(num_drafts)


@pytest.fixture(params=[propose_ngram, by_index], ids=["scan", "index"])
def propose(request):
    return request.param


def test_what_followed_the_ending_before_is_guessed(propose):
    assert propose([1, 2, 3, 4, 5, 9, 1, 2, 3], 2) == (4, 5)


def test_the_longest_ending_decides(propose):
    assert propose([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 1) == (7,)


def test_the_latest_of_several_occurrences_decides(propose):
    assert propose([2, 3, 7, 2, 3, 8, 4, 2, 3], 1) == (8,)


def test_a_repeating_text_goes_on_repeating(propose):
    assert propose([5, 5, 5], 4) == (5, 5, 5, 5)
    assert propose([1, 2, 1, 2, 1], 5) == (2, 1, 2, 1, 2)


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 3, 4], [1, 2, 1]])
def test_nothing_is_guessed_where_no_ending_occurred_before(propose, tokens):
    assert propose(tokens, 3) == ()


def test_the_limits_of_an_ending_can_be_chosen(propose):
    assert propose([1, 2, 1], 1, min_n=1) == (2,)
    assert propose([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 1, max_n=2) == (8,)


def test_the_index_grows_with_the_text():
    index = NgramIndex()
    index.extend([1, 2, 3])
    assert index.propose(2) == ()
    index.extend([1, 2])
    assert index.propose(2) == (3, 1)
    index.extend([9])
    assert index.propose(2) == ()
