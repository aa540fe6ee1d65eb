"""The torch executor's steps over a paged cache give what the training forward gives, for every
kind of model.
"""

import pytest
import torch

from dualflow.engine.executor import Readout
from dualflow.engine.torch_executor import TorchExecutor
from dualflow.model import CausalLM
from dualflow.testing.configs import FAMILIES, FLOWS, family_config, flow_config
from dualflow.testing.steps import EVERY_KIND
from dualflow.testing.tensors import random_tokens, tiny_model
from tests.unit.engine.steps import PAGE_SIZE, assert_close, expected, rows_of, shuffled_pages

LENGTHS = (5, 37, 21, 70)
"""Of four sequences; with pages of four tokens none of them fills its last."""


@pytest.fixture(params=EVERY_KIND.values(), ids=list(EVERY_KIND))
def model(request: pytest.FixtureRequest) -> CausalLM:
    return tiny_model(request.param)


def check(model: CausalLM, readout: Readout, row: int, ids: list[int], position: int) -> None:
    """Row ``row`` is the distribution after ``ids[: position + 1]``."""
    has_aux = readout.q_index[row] >= 0
    want = expected(model, ids, aux=has_aux)
    assert_close(readout.r[row], want.r[position])
    if want.p is None:
        assert readout.p is None
    else:
        assert readout.p is not None
        assert_close(readout.p[row], want.p[position])
        if readout.alpha is not None:
            alpha = float(want.p[position].exp().square().sum().clamp(0.5, 1))
            assert readout.alpha[row] == pytest.approx(alpha, abs=1e-9)
    if has_aux and want.q is not None:
        assert readout.q is not None
        assert_close(readout.q[readout.q_index[row]], want.q[position])
    assert readout.best[row] == int(want.r[position].argmax())


@pytest.mark.parametrize("chunk", [1, 3, 17, 100])
def test_chunks_of_prompts_and_decodes_in_one_batch(model: CausalLM, chunk: int) -> None:
    """Every sequence advances by chunks of its own size, the first by single tokens, so that steps
    mix short and long, early and late.
    """
    texts = [random_tokens(model.config, n, seed=n).tolist() for n in LENGTHS]
    pages = shuffled_pages(len(texts), 18)
    executor = TorchExecutor(model, 4 * 18, PAGE_SIZE)
    done, turn = [0] * len(texts), 0
    while any(d < len(t) for d, t in zip(done, texts, strict=True)):
        parts, whose = [], []
        for i, text in enumerate(texts):
            count = min(1 if i == 0 else chunk + i, len(text) - done[i])
            if count:
                # The last row, and now and then the first: as drafts would be read.
                reads = [0, count - 1] if turn % 2 and count > 1 else [count - 1]
                parts.append((text[done[i] : done[i] + count], done[i], pages[i], reads, reads))
                whose += [(i, done[i] + row) for row in reads]
                done[i] += count
        readout = executor.step(rows_of(parts))
        if turn % 3 == 0 or not any(d < len(t) for d, t in zip(done, texts, strict=True)):
            for row, (i, position) in enumerate(whose):
                check(model, readout, row, texts[i], position)
        turn += 1


@pytest.mark.parametrize("grouped", [[], [1], [0, 3, 4]])
def test_auxiliary_rows_added_later_give_the_grouped_readout(
    model: CausalLM, grouped: list[int]
) -> None:
    texts = [random_tokens(model.config, n, seed=n).tolist() for n in (6, 19, 30)]
    pages = shuffled_pages(3, 8)
    reads = ([5], [0, 3, 18], [29])
    parts = [(t, 0, p, r, r) for t, p, r in zip(texts, pages, reads, strict=True)]
    whole = TorchExecutor(model, 24, PAGE_SIZE).step(rows_of(parts))

    executor = TorchExecutor(model, 24, PAGE_SIZE)
    rows = rows_of(parts, keep=True)
    object.__setattr__(rows, "aux", grouped)
    first = executor.step(rows)
    assert [i for i, place in enumerate(first.q_index) if place >= 0] == grouped
    later = [i for i in range(5) if i not in grouped]
    readout = executor.add_aux(rows, first, later[:2])
    readout = executor.add_aux(rows, readout, later[2:])
    assert_close(readout.r, whole.r)
    assert_close(readout.p, whole.p)
    assert readout.best == whole.best
    assert readout.alpha == (None if whole.alpha is None else pytest.approx(whole.alpha, abs=1e-9))
    assert (readout.q is None) == (whole.q is None)
    if readout.q is not None and whole.q is not None:
        for mine, theirs in zip(readout.q_index, whole.q_index, strict=True):
            assert_close(readout.q[mine], whole.q[theirs])


OTHERS = {name: family_config(name, "dual") for name in FAMILIES if name != "llama"}
OTHERS |= {name: flow_config(name) for name in FLOWS if name != "full"}


@pytest.mark.parametrize("name", OTHERS)
def test_every_family_and_every_switch_of_the_auxiliary(name: str) -> None:
    model = tiny_model(OTHERS[name])
    ids = random_tokens(model.config, 12).tolist()
    executor = TorchExecutor(model, 3, PAGE_SIZE)
    readout = executor.step(rows_of([(ids[:7], 0, [2, 0, 1], [6], [0])], keep=True))
    readout = executor.step(rows_of([(ids[7:10], 7, [2, 0, 1], [1, 2], [1])]))
    if model.has_primary_readout:
        check(model, readout, 1, ids, 9)
    check(model, readout, 0, ids, 8)
    rows = rows_of([(ids[10:], 10, [2, 0, 1], [0, 1], [])], keep=True)
    readout = executor.add_aux(rows, executor.step(rows), [0, 1])
    for row, position in enumerate((10, 11)):
        check(model, readout, row, ids, position)


def test_keys_below_write_from_are_left_alone() -> None:
    """A hit on the whole prompt computes its last position again and writes nothing."""
    model = tiny_model(EVERY_KIND["dual"])
    ids = random_tokens(model.config, 10).tolist()
    executor = TorchExecutor(model, 3, PAGE_SIZE)
    executor.step(rows_of([(ids, 0, [0, 2, 1], [9], [9])]))
    before = [x.clone() for layer in executor.cache.tensors() for x in layer]
    rows = rows_of([(ids[9:], 9, [0, 2, 1], [0], [0])])
    object.__setattr__(rows.sequences[0], "write_from", 10)
    check(model, executor.step(rows), 0, ids, 9)
    after = [x for layer in executor.cache.tensors() for x in layer]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_copied_page_serves_another_sequence() -> None:
    model = tiny_model(EVERY_KIND["dual"])
    ids = random_tokens(model.config, 12).tolist()
    executor = TorchExecutor(model, 6, PAGE_SIZE)
    executor.step(rows_of([(ids[:10], 0, [0, 1, 2], [9], [9])]))
    executor.copy_pages([(2, 5)])
    # Both go on in their own way in what was one page.
    parts = [([ids[10]], 10, [0, 1, 2], [0], [0]), ([ids[11]], 10, [0, 1, 5], [0], [0])]
    readout = executor.step(rows_of(parts))
    check(model, readout, 0, [*ids[:10], ids[10]], 10)
    check(model, readout, 1, [*ids[:10], ids[11]], 10)
