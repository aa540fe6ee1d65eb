"""The kernel library gives what the torch executor gives, in every number format it has.

The reference is always float32 over the weights as they are rounded, so what is left is how the
kernels round what they multiply them with: see ``native_steps.allowed``.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dualflow.engine import AuxPolicy, Engine, EngineConfig, RequestParams, build_engine
from dualflow.model import CausalLM
from dualflow.spec import AuxConfig, ModelConfig, ReadoutConfig
from dualflow.testing.engines import run_all
from tests.parity.native_steps import (
    PAGE,
    WORDS,
    Texts,
    calm_model,
    check,
    config_of,
    each_isa,
    native,
    need_kernels,
    reference,
)

pytestmark = need_kernels

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
    "lora, learned readout": config_of(
        aux=AuxConfig(owns=("q_proj", "mlp"), lora_rank=4), readout=ReadoutConfig(kind="learned")
    ),
    "no coupling, heads of 32": config_of(
        aux=AuxConfig(couplings=()), head_dim=32, num_heads=3, num_kv_heads=1
    ),
}  # fmt: skip


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
@pytest.mark.parametrize(
    "name", ["standard", "dual", "two flows", "relu2, padded vocabulary", "lora, learned readout"]
)
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
