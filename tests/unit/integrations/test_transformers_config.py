"""The transformers configuration says what ours says, field by field."""

import importlib
import sys
from typing import Any

import pytest

from dualflow import config as configuration
from dualflow.extras import MissingExtraError
from dualflow.spec import AuxConfig, ModelConfig, ReadoutConfig, RopeScaling
from dualflow.testing.configs import FAMILIES, FLOWS, family_config, flow_config, tiny_config

pytest.importorskip("transformers")

from dualflow.integrations.transformers import DualFlowConfig
from dualflow.integrations.transformers.configuration_dualflow import (
    AUX_DEFAULTS,
    DEFAULTS,
    READOUT_DEFAULTS,
    ROPE_DEFAULTS,
    SIZES,
)

SIZED: dict[str, Any] = dict.fromkeys(SIZES, 8) | {"num_heads": 2}


def test_defaults_are_ours() -> None:
    assert configuration.to_dict(ModelConfig(**SIZED)) == SIZED | DEFAULTS
    assert configuration.to_dict(AuxConfig()) == AUX_DEFAULTS
    assert configuration.to_dict(ReadoutConfig()) == READOUT_DEFAULTS
    scaling = configuration.to_dict(RopeScaling(kind="linear", factor=2.0))
    assert scaling == {"kind": "linear", "factor": 2.0} | ROPE_DEFAULTS


@pytest.mark.parametrize(
    "config",
    [*(family_config(name, "dual") for name in FAMILIES), *(flow_config(name) for name in FLOWS)],
    ids=[*FAMILIES, *FLOWS],
)
def test_what_transformers_asks_for_is_derived(config: ModelConfig) -> None:
    table = configuration.to_dict(config)
    theirs = DualFlowConfig(config=table)
    assert theirs.config == table
    assert theirs.flows == configuration.to_dict(config.flows)
    assert theirs.num_key_value_heads == config.kv_heads
    assert theirs.head_dim == config.head_size
    assert theirs.tie_word_embeddings == config.tie_embeddings
    assert theirs.num_flows == config.num_flows
    assert theirs.has_primary_readout == config.has_primary_readout
    windows = [config.window_of(layer) for layer in range(config.num_layers)]
    assert [theirs.window_of(layer) for layer in range(config.num_layers)] == windows
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    assert theirs.layer_types == kinds


def test_a_configuration_is_the_same_after_a_round_trip() -> None:
    config = family_config("gemma3", "dual")
    one = DualFlowConfig(
        config=configuration.to_dict(config), primary_config={"eos_token_id": [3, 4], "x": {"y": 1}}
    )
    other = DualFlowConfig.from_dict(one.to_dict())
    assert other.to_dict() == one.to_dict()
    assert other.eos_token_id == [3, 4]
    assert configuration.from_dict(ModelConfig, other.config) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": {"vocab_size": 8}}, "config lacks hidden_size, num_layers, num_heads"),
        ({"config": SIZED | {"moa": 3}}, "config has moa, which this version does not know"),
        ({"config": SIZED | {"moe": {"num_experts": 3}}}, "mixtures of experts .moe., which"),
        ({"config": SIZED | {"variant": "dual", "aux": {"x": 1}}}, r"config\.aux has x"),
        ({"config": SIZED | {"aux": {}}}, r"config\.aux is set, but variant is 'standard'"),
        ({"config": SIZED | {"readout": {"kid": "p"}}}, r"config\.readout has kid"),
        ({"config": SIZED | {"variant": "phd2"}}, "variant is 'phd2'"),
        ({"config": SIZED | {"variant": "two_softmax"}}, "variant is 'two_softmax'"),
        ({"format_version": 2}, "format_version is 2; expected 1"),
        ({"weights": {"format": "int8", "group": 32}}, "holds int8 weights"),
    ],
)
def test_what_it_cannot_run_is_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DualFlowConfig(**given)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    room = "dualflow.integrations.transformers"
    for name in [name for name in sys.modules if name.startswith(room)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dualflow\[transformers\]'"):
        importlib.import_module(room)


def test_without_arguments_it_is_a_small_standard_model() -> None:
    assert DualFlowConfig().config["variant"] == tiny_config().variant
