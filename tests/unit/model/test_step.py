"""The one step function: every phase must give what the whole-sequence forward gives."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from dualflow.model import AuxRows, BatchKV, CausalLM, build_model
from dualflow.model.kv import BatchReader, _CacheReader
from dualflow.spec import AuxConfig, ModelConfig
from dualflow.testing import tiny_config
from dualflow.testing.steps import EVERY_KIND, whole_sequence
from dualflow.testing.tensors import random_tokens, tiny_model

LENGTH = 70


def assert_equal(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-9)


def tokens_of(config: ModelConfig) -> Tensor:
    return random_tokens(config, LENGTH)


@pytest.fixture(params=EVERY_KIND.values(), ids=list(EVERY_KIND))
def model(request: pytest.FixtureRequest) -> CausalLM:
    return tiny_model(request.param)


@pytest.mark.parametrize("prompt", [1, 2, 17, 64])
@torch.no_grad()
def test_prefill_and_decode_give_the_training_forward(model: CausalLM, prompt: int) -> None:
    tokens = tokens_of(model.config)
    want = whole_sequence(model, tokens)
    assert want.aux_FAD is not None
    expected = model.log_probs(want.primary_TD, want.aux_FAD)

    cache = model.new_cache(LENGTH)
    chunks = [tokens[:prompt], *tokens[prompt:].split(1)]
    for chunk in chunks:
        start = cache.length
        positions = torch.arange(start, start + len(chunk))
        out = model.step(chunk, positions, cache.writers(), torch.tensor([len(chunk) - 1]))
        assert_equal(out.primary_TD, want.primary_TD[start : cache.length])
        got = model.log_probs(out.primary_TD[-1:], out.aux_FAD)
        for name in ("r", "p", "q"):
            mine, theirs = getattr(got, name), getattr(expected, name)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert_equal(mine[0], theirs[cache.length - 1])


@pytest.mark.parametrize("pins", [[], [0], [69], [3, 4, 40], [50, 2, 50], list(range(70))])
@torch.no_grad()
def test_any_subset_of_auxiliary_rows(model: CausalLM, pins: list[int]) -> None:
    tokens = tokens_of(model.config)
    want = whole_sequence(model, tokens)
    pins_A = torch.tensor(pins, dtype=torch.long)
    positions = torch.arange(LENGTH)
    for kv in ([BatchKV(1, LENGTH)] * model.config.num_layers, model.new_cache(LENGTH).writers()):
        out = model.step(tokens, positions, kv, pins_A)
        assert_equal(out.primary_TD, want.primary_TD)
        assert out.aux_FAD is not None and want.aux_FAD is not None
        assert_equal(out.aux_FAD, want.aux_FAD[:, pins_A])


@torch.no_grad()
def test_chunked_prefill_with_draft_verification_rows(model: CausalLM) -> None:
    """Chunks of several primary rows, each with auxiliary rows of its own choice, as a verifier
    of drafts asks for.
    """
    tokens = tokens_of(model.config)
    want = whole_sequence(model, tokens)
    assert want.aux_FAD is not None
    cache = model.new_cache(LENGTH)
    for chunk, pins in ((range(0, 20), []), (range(20, 27), [0, 3, 6]), (range(27, 70), [42])):
        positions, pins_A = torch.tensor(chunk), torch.tensor(pins, dtype=torch.long)
        out = model.step(tokens[positions], positions, cache.writers(), pins_A)
        assert out.aux_FAD is not None
        assert_equal(out.aux_FAD, want.aux_FAD[:, positions[pins_A]])


@pytest.mark.parametrize("name", [name for name, c in EVERY_KIND.items() if c.variant == "dual"])
@torch.no_grad()
def test_auxiliary_rows_run_later_on_their_own(name: str) -> None:
    """Lazy execution: T = 0, the primary's kept intermediates and its keys from an earlier step."""
    model = tiny_model(EVERY_KIND[name])
    tokens, positions = tokens_of(model.config), torch.arange(LENGTH)
    want = whole_sequence(model, tokens)
    readers = _finished_readers(model, tokens)
    first = model.step(tokens, positions, [BatchKV(1, LENGTH)] * model.config.num_layers, keep=True)
    assert first.kept is not None and first.aux_FAD is None
    pins = torch.tensor([5, 33, 69])
    kept = [layer.at(pins) for layer in first.kept]
    none = tokens[:0]
    out = model.step(none, none, readers, aux=AuxRows(tokens[pins], pins, pins, kept))
    assert out.aux_FAD is not None and want.aux_FAD is not None
    assert_equal(out.aux_FAD, want.aux_FAD[:, pins])
    with pytest.raises(ValueError, match="no primary rows"):
        model.step(tokens, positions, readers)


@pytest.mark.parametrize("num_primary", [0, 1, 2])
@torch.no_grad()
def test_a_late_auxiliary_row_beside_new_primary_rows_sees_no_later_key(num_primary: int) -> None:
    model = tiny_model(tiny_config("dual"))
    tokens, positions = tokens_of(model.config), torch.arange(LENGTH)
    want = whole_sequence(model, tokens)
    cache, start = model.new_cache(LENGTH), 20
    first = model.step(tokens[:start], positions[:start], cache.writers(), keep=True)
    assert first.kept is not None
    late = torch.tensor([5])
    aux = AuxRows(tokens[late], late, None, [layer.at(late) for layer in first.kept])
    new = slice(start, start + num_primary)
    out = model.step(tokens[new], positions[new], cache.writers(), aux=aux)
    assert out.aux_FAD is not None and want.aux_FAD is not None
    assert_equal(out.aux_FAD, want.aux_FAD[:, late])
    assert_equal(out.primary_TD, want.primary_TD[new])


def _finished_readers(model: CausalLM, tokens: Tensor) -> list[BatchReader]:
    """The readers that a step over the whole sequence hands out, layer by layer."""
    caught: list[BatchReader] = []

    class Catch(BatchKV):
        def append(self, k_TKH: Tensor, v_TKH: Tensor) -> BatchReader:
            caught.append(super().append(k_TKH, v_TKH))
            return caught[-1]

    model.step(tokens, torch.arange(len(tokens)), [Catch(1, len(tokens))] * model.config.num_layers)
    return caught


@torch.no_grad()
def test_primary_and_cache_do_not_feel_the_auxiliary(model: CausalLM) -> None:
    tokens, positions = tokens_of(model.config), torch.arange(LENGTH)
    on, off = model.new_cache(LENGTH), model.new_cache(LENGTH)
    with_aux = model.step(tokens, positions, on.writers(), positions)
    without = model.step(tokens, positions, off.writers())
    assert_equal(with_aux.primary_TD, without.primary_TD)
    for stored, expected in zip(on.tensors(), off.tensors(), strict=True):
        assert_equal(torch.cat(stored), torch.cat(expected))
    assert on.nbytes == off.nbytes and on.length == off.length == LENGTH


def test_what_the_auxiliary_attends_through_cannot_write() -> None:
    faces = {name for name, _ in inspect.getmembers(_CacheReader) if not name.startswith("_")}
    assert faces == {"attend"}


@torch.no_grad()
def test_cache_is_as_large_as_the_standard_twins() -> None:
    sizes = {
        tiny_config(v).variant: build_model(tiny_config(v)).new_cache(33).nbytes
        for v in ("standard", "dual")
    }
    assert sizes["standard"] == sizes["dual"]


@torch.no_grad()
def test_an_auxiliary_equal_to_the_primary_reads_the_same_distribution() -> None:
    """E2 = E1 and zero couplings: q = p, so r = p (the state of a retrofit at birth)."""
    config = tiny_config("dual", aux=AuxConfig(num_flows=2))
    model: Any = build_model(config, dtype=torch.float64)
    for flow in model.model.aux:
        flow.embed_tokens.weight.copy_(model.model.embed_tokens.weight)
    out = whole_sequence(model, tokens_of(model.config))
    read = model.log_probs(out.primary_TD, out.aux_FAD)
    assert read.p is not None
    torch.testing.assert_close(read.r, read.p, rtol=0.0, atol=1e-12)


def test_the_cache_refuses_more_than_it_holds() -> None:
    model = build_model(tiny_config("dual"))
    tokens = random_tokens(model.config, 6)
    with pytest.raises(ValueError, match="holds 5 tokens; 6 do not fit"):
        model.step(tokens, torch.arange(6), model.new_cache(5).writers())


def test_auxiliary_off_is_refused_where_there_is_no_primary_readout() -> None:
    model = build_model(tiny_config("phd2"))
    with pytest.raises(ValueError, match="auxiliary rows only"):
        model.log_probs(torch.zeros(1, model.config.hidden_size), None)


@torch.no_grad()
def test_padded_vocabulary_ids_have_no_probability() -> None:
    config = tiny_config("dual", real_vocab_size=40)
    model = build_model(config)
    out = whole_sequence(model, tokens_of(config))
    r = model.log_probs(out.primary_TD, out.aux_FAD).r
    assert torch.isinf(r[:, 40:]).all()
    torch.testing.assert_close(r[:, :40].exp().sum(-1), torch.ones(LENGTH))
