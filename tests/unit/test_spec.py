"""The model specification: what it refuses, what it derives, and that its counts are those of the
built model.
"""

import dataclasses
from typing import Any

import pytest

from dualflow.config import ConfigError, from_dict, override, to_dict
from dualflow.model import build_model
from dualflow.model.flows import is_aux
from dualflow.spec import (
    PRESETS,
    AuxConfig,
    ModelConfig,
    ReadoutConfig,
    parameter_counts,
    preset,
    standard_twin,
)
from dualflow.testing import FAMILIES, FLOWS, family_config, flow_config, tiny_config

EVERY_CONFIG = {
    **{f"standard-{family}": family_config(family) for family in FAMILIES},
    **{f"dual-{family}": family_config(family, "dual") for family in FAMILIES},
    **{f"dual-{flow}": flow_config(flow) for flow in FLOWS},
    **{f"phd2-{family}": family_config(family, "phd2") for family in FAMILIES},
    **{f"two_softmax-{family}": family_config(family, "two_softmax") for family in FAMILIES},
    "gpt2-owns": family_config(
        "gpt2",
        "dual",
        aux=AuxConfig(owns=("q_proj", "o_proj", "mlp", "lm_head"), flow_norms="separate"),
    ),
    "gpt2-lora": family_config(
        "gpt2", "dual", aux=AuxConfig(owns=("q_proj", "o_proj", "mlp", "lm_head"), lora_rank=3)
    ),
    "qwen3-separate-norms": family_config(
        "qwen3", "dual", aux=AuxConfig(num_flows=2, flow_norms="separate")
    ),
}


@pytest.mark.parametrize("name", EVERY_CONFIG)
def test_counted_parameters_are_those_of_the_built_model(name: str) -> None:
    config = EVERY_CONFIG[name]
    model = build_model(config, device="meta")
    aux = sum(p.numel() for key, p in model.named_parameters() if is_aux(key))
    total = sum(p.numel() for p in model.parameters())
    counts = parameter_counts(config)
    assert (counts.primary, counts.aux, counts.total) == (total - aux, aux, total)


@pytest.mark.parametrize("name", EVERY_CONFIG)
def test_every_configuration_survives_json(name: str) -> None:
    config = EVERY_CONFIG[name]
    assert from_dict(ModelConfig, to_dict(config)) == config


@pytest.mark.parametrize("name", EVERY_CONFIG)
def test_the_standard_twin_has_the_primary_and_nothing_else(name: str) -> None:
    config = EVERY_CONFIG[name]
    twin = standard_twin(config)
    assert (twin.variant, twin.num_flows, twin.flows) == ("standard", 0, None)
    assert parameter_counts(twin).total == parameter_counts(config).primary
    assert standard_twin(twin) == twin


def test_a_dual_flow_adds_an_embedding_and_three_vectors_a_layer() -> None:
    """V·D + L·(NH + F + D), with the numbers of ``tiny_config`` written out."""
    counts = parameter_counts(tiny_config("dual"))
    assert counts.aux == 53 * 32 + 2 * (8 * 4 + 44 + 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0; expected at least 1"),
        ({"num_layers": -1}, "num_layers is -1; expected at least 1"),
        ({"hidden_size": 30}, "hidden_size 30 is not a multiple of num_heads 8; set head_dim"),
        ({"num_kv_heads": 3}, "num_heads 8 is not a multiple of num_kv_heads 3"),
        ({"num_kv_heads": 0}, "num_heads 8 is not a multiple of num_kv_heads 0"),
        ({"num_kv_heads": 16}, "num_heads 8 is not a multiple of num_kv_heads 16"),
        ({"head_dim": 5}, "head_dim 5 is odd; rotary positions turn pairs"),
        ({"head_dim": 0}, "head_dim is 0; expected at least 1"),
        ({"head_dim": -2}, "head_dim is -2; expected at least 1"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0; expected more than 0"),
        ({"norm_eps": -1e-6}, "norm_eps is -1e-06; expected 0 or more"),
        ({"init_std": -0.02}, "init_std is -0.02; expected 0 or more"),
        ({"real_vocab_size": 54}, "real_vocab_size.*54.*53"),
        ({"real_vocab_size": 0}, "real_vocab_size.*0.*53"),
        ({"aux": AuxConfig()}, "aux is set, but variant is 'standard'"),
        ({"readout": ReadoutConfig(kind="aux_only")}, "readout is set, but variant 'standard'"),
        (
            {"variant": "phd2", "readout": ReadoutConfig(primary_loss_weight=0.3)},
            "readout is set, but variant 'phd2'",
        ),
    ],
)
def test_impossible_models_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny_config(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_flows": 0}, "num_flows is 0; expected at least 1"),
        ({"num_flows": 10**11}, "num_flows is 100000000000; expected 1024 at most"),
        ({"lora_rank": -1, "owns": ("mlp",)}, "lora_rank is -1; expected 0"),
        ({"lora_rank": 4}, "lora_rank is set but owns is empty"),
        ({"owns": ("mlp", "mlp")}, "owns names something twice"),
        ({"couplings": ("query", "query")}, "couplings names something twice"),
    ],
)
def test_impossible_flows_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AuxConfig(**changes)


def test_a_rank_beyond_the_models_width_is_refused() -> None:
    aux = AuxConfig(owns=("mlp",), lora_rank=33)
    with pytest.raises(ValueError, match=r"aux\.lora_rank is 33; expected hidden_size 32 at most"):
        dataclasses.replace(tiny_config("dual"), aux=aux, hidden_size=32)


def test_a_negative_primary_loss_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"primary_loss_weight is -0\.1; expected 0 or more"):
        ReadoutConfig(primary_loss_weight=-0.1)


def test_learned_positions_allow_an_odd_head_size() -> None:
    assert tiny_config(position="learned", head_dim=5).head_size == 5


def test_errors_read_from_a_file_name_the_table() -> None:
    data = to_dict(tiny_config("dual", aux=AuxConfig()))
    data["aux"]["num_flows"] = 0
    with pytest.raises(ConfigError, match=r"^aux: num_flows is 0; expected at least 1$"):
        from_dict(ModelConfig, data)


def test_overrides_may_change_variant_and_flows_in_any_order() -> None:
    settings = ["aux.num_flows=2", "variant=dual", "readout.primary_loss_weight=0.3"]
    config = override(tiny_config(), settings)
    assert (config.variant, config.num_flows, config.readout.primary_loss_weight) == (
        "dual",
        2,
        0.3,
    )
    assert override(tiny_config(), reversed(settings)) == config


def test_derived_sizes() -> None:
    config = tiny_config("dual", num_kv_heads=None, real_vocab_size=50)
    assert (config.kv_heads, config.head_size, config.num_real_tokens) == (8, 4, 50)
    assert config.flows == AuxConfig()
    assert [tiny_config(v).num_flows for v in ("standard", "dual", "phd2", "two_softmax")] == [
        0, 1, 1, 0,
    ]  # fmt: skip
    assert [tiny_config(mlp=m).gated for m in ("swiglu", "geglu", "gelu", "relu2")] == [
        True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_built_with_an_auxiliary_flow(name: str) -> None:
    dual = dataclasses.replace(preset(name), variant="dual")
    built = sum(p.numel() for p in build_model(dual, device="meta").parameters())
    assert built == parameter_counts(dual).total


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("m")])
def test_presets_have_about_the_size_their_name_says(name: str) -> None:
    millions = float(name.rpartition("-")[2].removesuffix("m"))
    assert parameter_counts(preset(name)).total / 1e6 == pytest.approx(millions, rel=0.1)


def test_the_smollm2_preset_has_the_published_number_of_parameters() -> None:
    assert parameter_counts(preset("smollm2-135m")).total == 134_515_008


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown preset 'gpt5'; known: demo, nanogpt-124m"):
        preset("gpt5")
