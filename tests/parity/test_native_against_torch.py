"""The kernel library gives what the torch executor gives, in every number format it has.

The reference is always float32 over the weights as they are rounded, so what is left is how the
kernels round what they multiply them with: see ``allowed``.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dualflow.engine import AuxPolicy, Engine, EngineConfig, RequestParams, build_engine
from dualflow.engine.native_executor import NativeExecutor
from dualflow.engine.torch_executor import TorchExecutor
from dualflow.model import CausalLM
from dualflow.spec import AuxConfig, ModelConfig, ReadoutConfig
from dualflow.testing.engines import run_all
from tests.parity.native_steps import (
    PAGE,
    WORDS,
    Texts,
    calm_model,
    config_of,
    differences,
    each_isa,
    native,
    need_kernels,
    story,
)

pytestmark = need_kernels
NUM_PAGES = 96

KINDS: dict[str, ModelConfig] = {
    "standard": config_of("standard"),
    "dual": config_of(),
    "two flows": config_of(
        vocab_size=700, aux=AuxConfig(num_flows=2, flow_norms="separate")
    ),
    "qwen3 with biases": config_of(
        qk_norm=True, attention_bias=True, attention_output_bias=True, mlp_bias=True
    ),
    "gpt2": config_of(
        norm="layernorm", position="learned", mlp="gelu", attention_bias=True,
        attention_output_bias=True, mlp_bias=True, tie_embeddings=True, num_kv_heads=6,
    ),
    "geglu, norms of its own": config_of(mlp="geglu", aux=AuxConfig(flow_norms="separate")),
    "relu2, padded vocabulary": config_of(mlp="relu2", real_vocab_size=WORDS),
    "aux only, one coupling": config_of(
        aux=AuxConfig(couplings=("output",)), readout=ReadoutConfig(kind="aux_only")
    ),
    "primary only, tied": config_of(
        aux=AuxConfig(embedding="tied"), readout=ReadoutConfig(kind="primary_only")
    ),
    "no coupling, heads of 32": config_of(
        aux=AuxConfig(couplings=()), head_dim=32, num_heads=3, num_kv_heads=1
    ),
}  # fmt: skip

UNITS = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "int8": 2.5 * 2.0**-16, "int4": 5 * 2.0**-16}
"""The largest relative error of one rounding of what a matrix in each format is multiplied with.

For int8 and int4 that are 16-bit codes, relative to the largest of 32 inputs, which is some 2.5
times as large as the usual one; and codes of int4 count from the group's minimum, which makes them
twice as large as the weights.
"""


def allowed(config: ModelConfig, weights: str, kv_dtype: str, isa: str) -> tuple[float, float]:
    """(worst, root mean square) of the differences of log-probabilities.

    A value passes some five products a layer, each of which rounds its input; errors of many
    inputs add up like random ones, so the result's is at most about unit · sqrt(5 L + 1) times the
    spread of the logits, which is near 1 in a calm model. The worst of some ten thousand is five
    times as far out. Sums in float32 are many roundings, hence sixteen units.
    """
    unit = 16 * UNITS["float32"]
    if weights in ("int8", "int4"):
        unit = UNITS[weights]
    if kv_dtype != "float32":  # both round alike, but for values that lie between two
        unit = max(unit, UNITS["bfloat16"] / 8)
    if isa == "avx512bf16" and (weights == "bfloat16" or kv_dtype != "float32"):
        unit = UNITS["bfloat16"]
    mean = unit * (5 * config.num_layers + 1) ** 0.5
    return 5 * mean, mean


def reference(model: CausalLM, kv_dtype: Any) -> TorchExecutor:
    """The torch executor in float32 over the same, rounded weights."""
    return TorchExecutor(model, NUM_PAGES, PAGE, kv_dtype=kv_dtype)


def run_story(mine: NativeExecutor, theirs: TorchExecutor) -> torch.Tensor:
    """All differences over the whole story, later auxiliary rows and a copied page included."""
    texts, found = Texts(NUM_PAGES), []
    for number, rows in enumerate(story(texts, mine.config.num_flows)):
        want, got = theirs.step(rows), mine.step(rows)
        found.append(differences(want, got))
        later = [i for i, place in enumerate(got.q_index) if place < 0][::2]
        if later and rows.keep and mine.config.num_flows:
            want, got = theirs.add_aux(rows, want, later), mine.add_aux(rows, got, later)
            found.append(differences(want, got))
        if number == 2:
            target = texts.free.pop()
            for executor in (mine, theirs):
                executor.copy_pages([(texts.pages[0][-5], target)])
            texts.pages[0][-5] = target
    return torch.cat(found)


def check(model: CausalLM, mine: NativeExecutor, kv_dtype: str, weights: str) -> None:
    isa = mine._kernels.df_isa().decode()
    found = run_story(mine, reference(as_float(model), kv_dtype))
    worst, mean = allowed(model.config, weights, kv_dtype, isa)
    assert found.max() < worst
    assert found.square().mean().sqrt() < mean


def as_float(model: CausalLM) -> CausalLM:
    """The same rounded weights, computed with in float32."""
    if model.lm_head.weight.dtype != torch.bfloat16:
        return model
    twin = calm_model(model.config)
    twin.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    return twin


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_in_float32(name: str) -> None:
    model = calm_model(KINDS[name])
    check(model, native(model), "float32", "float32")


@pytest.mark.parametrize("threads", [2, 3])
def test_several_threads(threads: int) -> None:
    model = calm_model(KINDS["two flows"])
    check(model, native(model, threads=threads), "float32", "float32")


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["dual", "gpt2", "two flows"])
def test_every_number_format(name: str, weights: str, kv_dtype: str) -> None:
    model = calm_model(KINDS[name], weights)
    check(model, native(model, kv_dtype=kv_dtype), kv_dtype, weights)


@each_isa
@pytest.mark.parametrize(
    ("weights", "kv_dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8"), ("int4", "bfloat16")],
)
def test_every_instruction_set(
    isa: str, weights: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = calm_model(KINDS["dual"], weights)
    check(model, native(model, monkeypatch, isa, kv_dtype), kv_dtype, weights)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_the_cache_takes_the_bytes_of_the_torch_cache_and_of_the_standard_twin(
    kv_dtype: Any,
) -> None:
    sizes = set()
    for name in ("standard", "dual", "two flows"):
        model = calm_model(KINDS[name])
        sizes.add(native(model, kv_dtype=kv_dtype).cache_bytes)
        sizes.add(reference(model, kv_dtype).cache_bytes)
    assert len(sizes) == 1


def test_later_auxiliary_rows_need_a_step_that_was_kept() -> None:
    texts, executor = Texts(), native(calm_model(KINDS["dual"]))
    text = texts.add(9)
    rows = texts.rows({text: 4}, read=2, aux=0)
    with pytest.raises(ValueError, match="set keep"):
        executor.add_aux(rows, executor.step(rows), [0])
    kept = texts.rows({text: 2}, read=2, aux=0, keep=True)
    readout = executor.add_aux(kept, executor.step(kept), [1])
    with pytest.raises(ValueError, match="auxiliary rows already"):
        executor.add_aux(kept, readout, [1])
    executor.step(texts.rows({text: 2}, read=1, aux=0))
    with pytest.raises(ValueError, match="set keep"):
        executor.add_aux(kept, readout, [0])


PROMPTS = (40, 7, 65, 33, 18, 90)


def engine_of(model: CausalLM, backend: Any) -> Engine:
    config = EngineConfig(
        backend=backend, page_size=PAGE, num_pages=60, max_step_tokens=48, threads=1
    )
    return build_engine(model, None, config)


@pytest.mark.parametrize("policy", ["on", "exact", "off"])
@pytest.mark.parametrize("name", ["standard", "dual", "two flows", "relu2, padded vocabulary"])
def test_engines_of_both_backends_write_the_same_tokens(name: str, policy: Any) -> None:
    """Greedy; where the two most probable tokens are within 1e-3, both may go on as they like."""
    threads = torch.get_num_threads()
    try:
        model, texts = calm_model(KINDS[name]), Texts()
        prompts = [texts.tokens[texts.add(length, pages=[0])] for length in PROMPTS]
        prompts += [prompts[2][:32], prompts[2]]  # what is cached as whole pages
        params = RequestParams(
            temperature=0, max_tokens=12, aux=AuxPolicy(policy), drafts="ngram", num_drafts=2
        )
        if policy == "on":
            params = replace(params, logprobs=2)
        outputs = []
        for backend in ("torch", "native"):
            engine = engine_of(model, backend)
            assert engine.config.backend == backend
            ids = [engine.add(p, params) for p in prompts]
            done = run_all(engine, ids)
            outputs.append([done[i].outputs[0] for i in ids])
    finally:
        torch.set_num_threads(threads)
    same = 0
    for one, other in zip(*outputs, strict=True):
        same += one.token_ids == other.token_ids
        for mine, theirs in zip(one.choices, other.choices, strict=True):
            if mine.token_id != theirs.token_id:
                if policy == "on":
                    assert mine.top[0][1] - mine.top[1][1] < 1e-3
                break
            if policy == "on":
                assert mine.log_r == pytest.approx(theirs.log_r, abs=1e-4)
    assert same >= len(prompts) - 1
