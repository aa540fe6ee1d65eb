"""Generation step by step is the model applied to the whole text, whatever the variant."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from dualflow.data.detokenize import StreamDetokenizer, TokenTexts
from dualflow.data.tokenizers import Tokenizer, bytes_tokenizer
from dualflow.model import AuxRows, BatchKV, CausalLM, ReadoutLogProbs, build_model
from dualflow.model.generate import (
    FinishEvent,
    GenerationParams,
    TokenEvent,
    aux_off_warning,
    generate,
)
from dualflow.model.sampling import Sampler, SamplingParams
from dualflow.spec import AuxConfig, ModelConfig, ReadoutConfig

BASE = ModelConfig(
    vocab_size=300, real_vocab_size=259, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
    intermediate_size=48, max_position=64,
)  # fmt: skip
CONFIGS: dict[str, ModelConfig] = {
    "standard": BASE,
    "gpt2_like": dataclasses.replace(
        BASE, norm="layernorm", position="learned", mlp="gelu", attention_bias=True, qk_norm=True,
        tie_embeddings=True,
    ),
    "dual": dataclasses.replace(BASE, variant="dual"),
    "dual_aux_only": dataclasses.replace(
        BASE, variant="dual", readout=ReadoutConfig(kind="aux_only")
    ),
    "dual_primary_only": dataclasses.replace(
        BASE, variant="dual", readout=ReadoutConfig(kind="primary_only")
    ),
    "dual_two_flows": dataclasses.replace(
        BASE, variant="dual",
        aux=AuxConfig(num_flows=2, flow_norms="separate", owns=("mlp", "lm_head")),
    ),
    "dual_lora": dataclasses.replace(
        BASE, variant="dual", aux=AuxConfig(owns=("q_proj",), lora_rank=2)
    ),
    "phd2": dataclasses.replace(BASE, variant="phd2"),
    "two_softmax": dataclasses.replace(BASE, variant="two_softmax"),
}  # fmt: skip
PROMPT = [10, 200, 31, 5, 77]
WITHOUT_P = ("dual_aux_only", "phd2")
MODES = [(name, "on") for name in CONFIGS] + [(n, "off") for n in CONFIGS if n not in WITHOUT_P]


def build(name: str, dtype: torch.dtype = torch.float64) -> CausalLM:
    model = build_model(CONFIGS[name], seed=0, dtype=dtype)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            noise = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64
            )
            parameter.add_(0.3 * noise)
    return model


def run(model: CausalLM, prompt: list[int] | None = None, detokenizer: Any = None, **fields: Any):
    """Token events and the finish event."""
    fields.setdefault("sampling", SamplingParams(temperature=0))
    *tokens, end = generate(
        model, PROMPT if prompt is None else prompt, GenerationParams(**fields), detokenizer
    )
    assert isinstance(end, FinishEvent)
    assert all(isinstance(token, TokenEvent) for token in tokens)
    return [token for token in tokens if isinstance(token, TokenEvent)], end


@torch.no_grad()
def from_scratch(model: CausalLM, ids: list[int], aux: str) -> ReadoutLogProbs:
    """The distributions after ``ids`` from one training-style forward: all rows, no cache."""
    tokens_T, positions_T = torch.tensor(ids), torch.arange(len(ids))
    kv = [BatchKV(1, len(ids)) for _ in range(model.config.num_layers)]
    out = model.step(
        tokens_T, positions_T, kv, aux=AuxRows(tokens_T, positions_T) if aux == "on" else None
    )
    return model.log_probs(
        out.primary_TD[-1:], None if out.aux_FAD is None else out.aux_FAD[:, -1:]
    )


@pytest.mark.parametrize(("name", "aux"), MODES)
@pytest.mark.parametrize("length", [1, 5, 17])
def test_tokens_are_those_of_recomputing_the_whole_text_at_each_step(name, aux, length):
    model = build(name)
    prompt = [(i * 37 + 11) % 259 for i in range(length)]
    tokens, _ = run(model, prompt, max_tokens=20, aux=aux)
    ids = list(prompt)
    for token in tokens:
        whole = from_scratch(model, ids, aux)
        assert token.token_id == int(whole.r[0].argmax())
        for ours, theirs in zip((token.log_r, token.log_p, token.log_q), whole, strict=True):
            expected = None if theirs is None else float(theirs[0, token.token_id])
            assert ours == (None if expected is None else pytest.approx(expected, abs=1e-9))
        ids.append(token.token_id)
    assert len(tokens) == 20
    assert len({token.token_id for token in tokens}) > 1


def test_alpha_is_the_weight_of_p_in_r():
    for name in ("dual", "dual_two_flows", "two_softmax"):
        for token in run(build(name), max_tokens=8)[0]:
            assert token.alpha is not None and token.log_p is not None and token.log_q is not None
            p, q, r = (
                torch.tensor(x, dtype=torch.float64).exp()
                for x in (token.log_p, token.log_q, token.log_r)
            )
            # r was scaled up by the padding's share, which is the same for every token of a step.
            assert 0.5 <= token.alpha <= 1.0
            assert float(token.alpha * p + (1 - token.alpha) * q) <= float(r) + 1e-12
    assert all(token.alpha is None for token in run(build("standard"), max_tokens=3)[0])


def test_the_auxiliary_changes_what_is_said_but_not_the_cache(monkeypatch):
    model = build("dual")
    caches = []
    original = CausalLM.new_cache

    def keep(self: CausalLM, max_length: int):
        caches.append(original(self, max_length))
        return caches[-1]

    monkeypatch.setattr(CausalLM, "new_cache", keep)
    on, _ = run(model, max_tokens=1)
    off, _ = run(model, max_tokens=1, aux="off")
    assert on[0].log_r != off[0].log_r
    log_p = from_scratch(model, PROMPT, "off").p
    assert log_p is not None
    assert on[0].log_p == pytest.approx(float(log_p[0, on[0].token_id]), abs=1e-9)
    for one, other in zip(caches[0].tensors(), caches[1].tensors(), strict=True):
        for ours, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", WITHOUT_P)
def test_the_auxiliary_cannot_be_off_where_there_is_no_trained_p(name):
    with pytest.raises(ValueError, match="no trained p"):
        generate(build(name), PROMPT, GenerationParams(aux="off"))


def test_prefill_runs_the_auxiliary_at_the_last_prompt_position_alone(monkeypatch):
    model = build("dual")
    steps: list[tuple[int, list[int] | None]] = []
    original = CausalLM.step

    def record(self: CausalLM, tokens_T, positions_T, kv, aux_pins_A=None, **rest):
        steps.append((len(tokens_T), None if aux_pins_A is None else aux_pins_A.tolist()))
        return original(self, tokens_T, positions_T, kv, aux_pins_A, **rest)

    monkeypatch.setattr(CausalLM, "step", record)
    _, end = run(model, max_tokens=4)
    assert steps == [(5, [4]), (1, [0]), (1, [0]), (1, [0])]
    assert end.figures.aux_positions == 4
    steps.clear()
    _, end = run(model, max_tokens=2, aux="off")
    assert steps == [(5, None), (1, None)]
    assert end.figures.aux_positions == 0


def test_figures(monkeypatch):
    ticks = itertools.count(0.0, 0.5)
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    _, end = run(build("dual"), max_tokens=9)
    f = end.figures
    assert (f.prompt_tokens, f.new_tokens, end.reason) == (5, 9, "length")
    assert (f.prefill_seconds, f.decode_seconds) == (0.5, 4.0)
    assert (f.prefill_tokens_per_second, f.decode_tokens_per_second) == (10.0, 2.0)
    # Two layers, keys and values, two kv heads of eight float64 elements; the last token is never
    # stored.
    assert f.cache_bytes == (5 + 8) * 2 * 2 * 2 * 8 * 8
    assert f.cache_bytes_allocated == f.cache_bytes
    _, end = run(build("dual"), max_tokens=1)
    assert end.figures.decode_tokens_per_second is None


def test_the_same_seed_gives_the_same_tokens_whatever_else_runs():
    model = build("dual", torch.float32)
    sampled = {"max_tokens": 30, "sampling": SamplingParams(temperature=1.3, top_k=50, seed=11)}
    alone = [token.token_id for token in run(model, **sampled)[0]]
    one = generate(model, PROMPT, GenerationParams(**sampled))  # type: ignore[arg-type]
    other = generate(
        model, PROMPT[:2], GenerationParams(max_tokens=30, sampling=SamplingParams(seed=12))
    )
    mixed = [a.token_id for a, _ in zip(one, other, strict=True) if isinstance(a, TokenEvent)]
    assert mixed == alone
    different = run(
        model, max_tokens=30, sampling=SamplingParams(temperature=1.3, top_k=50, seed=12)
    )[0]
    assert [token.token_id for token in different] != alone


def test_padding_ids_are_never_generated():
    model = build("standard", torch.float32)
    with torch.no_grad():
        model.lm_head.weight[259:] = 100 * model.lm_head.weight[:41].sign()
    tokens, _ = run(model, max_tokens=60, sampling=SamplingParams(temperature=50.0, seed=0))
    assert max(token.token_id for token in tokens) < 259


@pytest.mark.parametrize("name", ["standard", "dual", "gpt2_like"])
def test_the_models_positions_are_used_to_the_last(name):
    model = build(name)
    for length in (1, 63, 64):
        tokens, end = run(model, [1] * length, max_tokens=500)
        assert (len(tokens), end.reason) == (64 - length + 1, "context")
    assert len(run(model, [1] * 60)[0]) == 5
    assert run(model, [1] * 60, max_tokens=5)[1].reason == "length"


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="65 tokens, but the model has 64 positions"):
        generate(build("dual"), [1] * 65)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "no tokens; start an empty text"),
        ([1, 259], "id 259.*ends at 258"),
        ([-1], "token id -1"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused_at_the_call(prompt, message):
    with pytest.raises(ValueError, match=message):
        generate(build("dual"), prompt)


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 1.5}, {"aux": "maybe"}],
    ids=str,
)
def test_parameters_out_of_range_are_refused_by_name(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        GenerationParams(**fields)


class Replay:
    """A sampler that says what a test wants said."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = iter(ids)

    def __call__(self, log_probs_V: torch.Tensor) -> int:
        return next(self.ids)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return bytes_tokenizer()


def say(monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> None:
    monkeypatch.setattr("dualflow.model.generate.Sampler", lambda _: Replay(ids))


def test_text_streams_in_whole_characters(monkeypatch, tokenizer):
    ids = tokenizer.encode(" Café 🌶日本語")
    say(monkeypatch, ids)
    tokens, end = run(
        build("dual"), detokenizer=StreamDetokenizer(TokenTexts(tokenizer)), max_tokens=len(ids) - 1
    )
    text = "".join(event.text for event in (*tokens, end))
    assert text == tokenizer.decode(ids[:-1]) == " Café 🌶日本\ufffd"
    assert end.text == "\ufffd"
    assert "\ufffd" not in "".join(token.text for token in tokens)


@pytest.mark.parametrize("max_tokens", [6, 40])
def test_a_stop_string_ends_the_text_even_at_the_last_token(monkeypatch, tokenizer, max_tokens):
    say(monkeypatch, tokenizer.encode("ab END, and more"))
    detokenizer = StreamDetokenizer(TokenTexts(tokenizer), ["END"])
    tokens, end = run(build("dual"), detokenizer=detokenizer, max_tokens=max_tokens)
    assert "".join(event.text for event in (*tokens, end)) == "ab "
    assert (len(tokens), end.reason) == (6, "stop")


def test_a_stop_id_ends_the_text_and_shows_nothing(monkeypatch, tokenizer):
    say(monkeypatch, [*tokenizer.encode("hi"), tokenizer.eos_id, 65])
    params = {
        "detokenizer": StreamDetokenizer(TokenTexts(tokenizer)),
        "stop_ids": frozenset({tokenizer.eos_id}),
    }
    tokens, end = run(build("dual"), max_tokens=9, **params)
    assert [token.text for token in tokens] == ["h", "i", ""]
    assert (tokens[-1].token_id, end.reason) == (tokenizer.eos_id, "stop")


def test_an_interruption_leaves_model_and_process_usable(monkeypatch):
    model = build("dual", torch.float32)
    expected = [token.token_id for token in run(model, max_tokens=6)[0]]
    calls = itertools.count()
    original = Sampler.__call__

    def interrupt(self: Sampler, log_probs_V: torch.Tensor) -> int:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return original(self, log_probs_V)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Sampler, "__call__", interrupt)
        run(model, max_tokens=6)
    abandoned = generate(model, PROMPT)
    next(abandoned)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    del abandoned
    assert [token.token_id for token in run(model, max_tokens=6)[0]] == expected
    model.loss(torch.tensor([PROMPT]), torch.tensor([PROMPT])).total.backward()


def test_training_mode_and_gradients_are_left_as_they_are():
    model = build("dual", torch.float32).train()
    run(model, max_tokens=3)
    assert model.training
    assert all(
        parameter.grad is None and parameter.requires_grad for parameter in model.parameters()
    )


@pytest.mark.parametrize(
    ("metrics", "warns"),
    [
        ({"val_loss": 2.5, "val_loss_p": 3.2}, True),
        ({"val_loss": 2.5, "val_loss_p": 2.4}, False),
        ({"val_loss": 2.5, "val_loss_p": None}, False),
        ({}, False),
    ],
)
def test_the_price_of_switching_the_auxiliary_off_is_told(metrics, warns):
    warning = aux_off_warning(metrics)
    assert (warning is not None) == warns
    if warning:
        assert "3.2000" in warning and "2.5000" in warning


def test_an_optimiser_step_between_two_tokens_is_not_corrupted_by_inference_mode():
    """Events are consumed outside of inference mode: what a consumer computes can be
    differentiated.
    """
    model = build("standard", torch.float32)
    for event in generate(model, PROMPT, GenerationParams(max_tokens=2)):
        assert torch.ones(1, requires_grad=True).mul(2).requires_grad, event


def test_half_precision_generates():
    tokens, end = run(build("dual", torch.bfloat16), max_tokens=5)
    assert len(tokens) == 5
    assert end.figures.cache_bytes == (5 + 4) * 2 * 2 * 2 * 8 * 2
