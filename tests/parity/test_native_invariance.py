"""In the kernel library a text's numbers depend on the text alone, bit by bit: not on what else is
in its steps, how its prompt is cut, which threads there are, or what its pages held before.
"""

from typing import Any

import pytest
import torch

from dualflow.engine.executor import SequenceRows, StepRows
from dualflow.engine.native_executor import NativeExecutor
from dualflow.model import CausalLM
from dualflow.spec import AuxConfig
from tests.parity.native_steps import (
    LENGTHS,
    PAGE,
    Texts,
    Way,
    assert_same_bits,
    calm_model,
    config_of,
    distributions,
    each_isa,
    native,
    need_kernels,
)

pytestmark = need_kernels

each_format = pytest.mark.parametrize(
    ("weights", "kv_dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8"), ("int4", "bfloat16")],
)
TWO_FLOWS = config_of(vocab_size=700, aux=AuxConfig(num_flows=2))
POISON = 149
"""An id whose embedding is not a number."""


@each_isa
@each_format
def test_neither_neighbours_nor_chunks_change_a_bit(
    isa: str, weights: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = native(calm_model(TWO_FLOWS, weights), monkeypatch, isa, kv_dtype)
    whole = distributions(executor, Way())
    assert len(whole) == sum(LENGTHS)
    for way in (
        Way(together=False), Way(chunk=37), Way(chunk=6, together=False, only=(1, 2)),
        Way(chunk=1, only=(1, 2, 3)), Way(chunk=101, only=(0, 2)),
    ):  # fmt: skip
        assert_same_bits(whole, distributions(executor, way))


@each_isa
@each_format
def test_later_auxiliary_rows_equal_grouped_ones_bit_by_bit(
    isa: str, weights: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = native(calm_model(TWO_FLOWS, weights), monkeypatch, isa, kv_dtype)
    whole = distributions(executor, Way(chunk=90))
    assert_same_bits(whole, distributions(executor, Way(chunk=90, lazy=True)))
    assert_same_bits(whole, distributions(executor, Way(chunk=5, lazy=True, only=(1, 2))))


@each_format
def test_the_number_of_threads_changes_no_bit(weights: str, kv_dtype: str) -> None:
    model = calm_model(TWO_FLOWS, weights)
    whole = distributions(native(model, kv_dtype=kv_dtype), Way())
    for threads in (2, 3):
        executor = native(model, kv_dtype=kv_dtype, threads=threads)
        assert_same_bits(whole, distributions(executor, Way(chunk=120)))
        # Few enough for the context to be shared out in pieces.
        assert_same_bits(whole, distributions(executor, Way(chunk=290, only=(0,))))


def advance(executor: NativeExecutor, texts: Texts, text: int, count: int) -> torch.Tensor:
    """log r after each of the next ``count`` tokens, one step for each."""
    return torch.cat([executor.step(texts.rows({text: 1})).r.clone() for _ in range(count)])


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_a_full_hit_reads_a_shared_page_and_writes_nothing_into_it(kv_dtype: str) -> None:
    """The one that hits even has another last token: what it would write would show."""
    model = calm_model(config_of())
    logs = []
    for visited in (False, True):
        texts, executor = Texts(), native(model, kv_dtype=kv_dtype)
        text = texts.add(2 * PAGE + 8)
        before = executor.step(texts.rows({text: 2 * PAGE}, read=1)).r.clone()
        if visited:
            for token in (texts.tokens[text][2 * PAGE - 1], 3):
                hit = SequenceRows(2 * PAGE - 1, 1, texts.pages[text][:2], 2 * PAGE)
                again = executor.step(StepRows([token], [hit], [0], [0])).r
                assert torch.equal(again, before) == (token != 3)
        logs.append(advance(executor, texts, text, 8))
    assert torch.equal(*logs)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_a_copied_page_is_the_page(kv_dtype: str) -> None:
    """Two go on from one partial page in their own ways, each as if it had been alone."""
    model = calm_model(config_of())
    executor = native(model, kv_dtype=kv_dtype)
    texts = Texts()
    text = texts.add(3 * PAGE)
    executor.step(texts.rows({text: PAGE + 5}, read=0))
    other = texts.add(3 * PAGE)
    texts.done[other] = texts.done[text]
    texts.tokens[other][PAGE + 6 :] = reversed(texts.tokens[text][PAGE + 6 :])
    executor.copy_pages([(texts.pages[text][1], texts.pages[other][1])])
    texts.pages[other][0] = texts.pages[text][0]
    logs = [advance(executor, texts, name, 20) for name in (text, other)]
    for name, log in zip((text, other), logs, strict=True):
        alone, fresh = Texts(), native(model, kv_dtype=kv_dtype)
        again = alone.add(3 * PAGE)
        alone.tokens[again] = texts.tokens[name]
        fresh.step(alone.rows({again: PAGE + 5}, read=0))
        assert torch.equal(advance(fresh, alone, again, 20), log)


@torch.no_grad()
def poisoned_model(weights: str = "float32") -> CausalLM:
    model = calm_model(config_of(), weights)
    for table in (model.model.embed_tokens, model.model.aux[0].embed_tokens):
        table.weight[POISON] = torch.nan  # type: ignore[index]
    return model


@each_isa
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_what_a_page_held_before_does_not_reach_its_next_owner(
    isa: str, weights: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = poisoned_model(weights)
    logs = []
    for poisoned in (False, True):
        executor = native(model, monkeypatch, isa, kv_dtype, num_pages=6)
        texts = Texts(num_pages=6)
        first = texts.add(6 * PAGE)
        texts.tokens[first] = [POISON] * (6 * PAGE)
        if poisoned:
            executor.step(texts.rows({first: 6 * PAGE}, read=1))
        text = texts.add(3 * PAGE + 5, pages=texts.pages[first])
        log = executor.step(texts.rows({text: PAGE + 3}, read=4)).r.clone()
        logs.append(torch.cat([log, advance(executor, texts, text, 30)]))
    assert logs[0].isfinite().all()
    assert torch.equal(*logs)


@each_isa
@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_neighbour_that_is_not_a_number_does_no_harm(
    isa: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = native(poisoned_model(weights), monkeypatch, isa)
    logs: list[Any] = []
    for together in (False, True):
        texts = Texts()
        text, bad = texts.add(40), texts.add(20)
        texts.tokens[bad][7] = POISON
        rows = texts.rows({text: 40, bad: 20} if together else {text: 40}, read=2)
        r = executor.step(rows).r
        logs.append(r[:2].clone())
        assert not together or r[2:].isnan().all()
    assert torch.equal(*logs)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_what_is_not_a_number_stays_visible(weights: str, kv_dtype: str) -> None:
    """In its own row and, through the cache, in all that come after it."""
    executor, texts = native(poisoned_model(weights), kv_dtype=kv_dtype), Texts()
    text = texts.add(20)
    texts.tokens[text][7] = POISON
    assert executor.step(texts.rows({text: 12})).r[7:].isnan().all()
    assert executor.step(texts.rows({text: 1})).r.isnan().all()
