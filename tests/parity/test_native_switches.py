"""Switches of the families, and what flows own: the kernel library against the torch executor."""

from typing import Any

import pytest
import torch

from dualflow.model.quantise import quantise_model
from dualflow.spec import AuxConfig, ModelConfig, ReadoutConfig, RopeScaling
from tests.parity.native_steps import (
    Way,
    assert_same_bits,
    calm_model,
    check,
    config_of,
    distributions,
    each_isa,
    native,
    need_kernels,
)

pytestmark = need_kernels
EVERYTHING: Any = ("q_proj", "o_proj", "mlp", "lm_head")

OWNERS: dict[str, ModelConfig] = {
    "lora": config_of(aux=AuxConfig(owns=EVERYTHING, lora_rank=5)),
    "lora of queries": config_of(aux=AuxConfig(owns=("q_proj",), lora_rank=16)),
    "lora, two flows": config_of(
        aux=AuxConfig(num_flows=2, owns=EVERYTHING, lora_rank=20, flow_norms="separate"),
        tie_embeddings=True, mlp="relu2", vocab_size=1100,
    ),
    "whole": config_of(aux=AuxConfig(owns=EVERYTHING)),
    "whole, two flows with biases": config_of(
        aux=AuxConfig(num_flows=2, owns=EVERYTHING, couplings=("query",)), vocab_size=1100,
        norm="layernorm", position="learned", mlp="gelu", attention_bias=True,
        attention_output_bias=True, mlp_bias=True, tie_embeddings=True,
    ),
    "whole output": config_of(aux=AuxConfig(owns=("o_proj",))),
}  # fmt: skip
LEARNED = ReadoutConfig(kind="learned")
SWITCHES: dict[str, ModelConfig] = {
    "offset norms": config_of(norm_offset=True, qk_norm=True),
    "norms behind": config_of(norm_placement="post", qk_norm=True, qk_norm_span="row"),
    "norms on both sides": config_of(
        norm_placement="both", aux=AuxConfig(num_flows=2, flow_norms="separate")
    ),
    "layernorms behind": config_of(norm="layernorm", norm_placement="post", mlp="gelu"),
    "rows of heads, norms of its own": config_of(
        qk_norm=True, qk_norm_span="row", aux=AuxConfig(flow_norms="separate")
    ),
    "linear turns": config_of(rope_scaling=RopeScaling(kind="linear", factor=4)),
    "llama 3 turns": config_of(
        rope_scaling=RopeScaling(kind="llama3", factor=8, original_max_position=64)
    ),
    "yarn turns": config_of(
        rope_scaling=RopeScaling(kind="yarn", factor=4, original_max_position=64)
    ),
    "scaled scores": config_of(attention_scale=0.4),
    "capped scores": config_of(attention_softcap=0.8, attention_scale=0.9),
    "capped logits": config_of(final_softcap=1.5, aux=AuxConfig(owns=("lm_head",))),
    "scaled embeddings": config_of(hidden_size=64, scale_embeddings=True, mlp="geglu"),
    "a short window": config_of(sliding_window=5),
    "a window over chunks": config_of(sliding_window=270, sliding_layers=(0, 2)),
    "turns of the window": config_of(
        sliding_window=40, sliding_layers=(1,), local_rope_theta=100.0,
        rope_scaling=RopeScaling(kind="linear", factor=2),
    ),
    "learned": config_of(readout=LEARNED),
    "learned, two flows": config_of(
        readout=LEARNED, vocab_size=2300, real_vocab_size=139, aux=AuxConfig(num_flows=2)
    ),
    "all of Gemma": config_of(
        hidden_size=64, norm_offset=True, norm_placement="both", scale_embeddings=True,
        attention_scale=0.3, attention_softcap=2.0, final_softcap=2.0, sliding_window=33,
        sliding_layers=(0, 2), local_rope_theta=50.0, qk_norm=True, mlp="geglu",
        tie_embeddings=True, readout=LEARNED, aux=AuxConfig(owns=EVERYTHING, lora_rank=4),
    ),
}  # fmt: skip
KINDS = OWNERS | SWITCHES
MIXED = ("whole, two flows with biases", "lora, two flows", "norms behind", "all of Gemma")

FORMATS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8"), ("int4", "bfloat16")]
each_format = pytest.mark.parametrize(("weights", "kv_dtype"), FORMATS)


@pytest.mark.parametrize("name", KINDS)
def test_every_switch_in_float32(name: str) -> None:
    model = calm_model(KINDS[name])
    check(model, native(model), "float32", "float32")


@pytest.mark.parametrize("name", [name for name in SWITCHES if "learned" not in name])
def test_every_switch_changes_what_comes_out(name: str) -> None:
    """So that the comparisons above compare something."""
    plain = config_of(
        **{field: getattr(KINDS[name], field) for field in ("hidden_size", "mlp", "norm", "aux")}
    )
    switched, without = calm_model(KINDS[name]), calm_model(plain)
    way = Way(only=(0,))
    one, other = (distributions(native(m), way)[0, 299][0] for m in (switched, without))
    assert (one - other).abs().max() > 0.01


@each_format
@pytest.mark.parametrize("name", ["whole", "lora, two flows", "all of Gemma"])
def test_switches_in_every_number_format(name: str, weights: str, kv_dtype: str) -> None:
    model = calm_model(KINDS[name], weights)
    check(model, native(model, kv_dtype=kv_dtype), kv_dtype, weights)


@each_isa
@each_format
def test_switches_on_every_instruction_set(
    isa: str, weights: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = calm_model(KINDS["all of Gemma"], weights)
    check(model, native(model, monkeypatch, isa, kv_dtype), kv_dtype, weights)


@each_isa
@pytest.mark.parametrize(
    ("name", "weights", "kv_dtype"),
    [(name, *formats) for name, formats in zip(MIXED, FORMATS, strict=True)],
)
def test_with_every_switch_a_texts_numbers_depend_on_the_text_alone(
    isa: str, name: str, weights: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = calm_model(KINDS[name], weights)
    executor = native(model, monkeypatch, isa, kv_dtype)
    whole = distributions(executor, Way(chunk=90))
    for way in (
        Way(chunk=300, together=False), Way(chunk=90, lazy=True), Way(chunk=5, only=(1, 2)),
        Way(chunk=1, lazy=True, only=(1, 3)),
    ):  # fmt: skip
        assert_same_bits(whole, distributions(executor, way))
    three = native(model, monkeypatch, isa, kv_dtype, threads=3)
    for way in (Way(chunk=290, only=(0,)), Way(chunk=2, only=(1,))):
        assert_same_bits(whole, distributions(three, way))


@each_isa
def test_low_rank_matrices_in_bfloat16_beside_quantised_ones(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a model that was quantised from bfloat16: the rows are not rounded for them."""
    model, twin = (quantise_model(calm_model(KINDS["lora"], "bfloat16"), "int8") for _ in range(2))
    assert model.get_parameter("model.layers.0.aux.0.q_proj.lora_A.weight").dtype == torch.bfloat16
    check(twin.float(), native(model, monkeypatch, isa), "float32", "int8")
