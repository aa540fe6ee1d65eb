"""The tiny models cover every switch, and none of their parameters is idle."""

import dataclasses
import typing
from typing import Any, Literal

import pytest
import torch

from dualflow.spec import AuxConfig, ModelConfig, MoEConfig, ReadoutConfig
from dualflow.testing import FAMILIES, FLOWS, family_config, flow_config, tiny_config
from dualflow.testing.configs import MIXTURES, mixture_config
from dualflow.testing.steps import EVERY_KIND
from dualflow.testing.tensors import random_tokens, tiny_model


def options(cls: type) -> dict[str, set[object]]:
    """The fields that are a ``Literal``, a tuple of one or a bool, and the values each can take."""
    found: dict[str, set[object]] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if typing.get_origin(hint) is tuple:
            hint = typing.get_args(hint)[0]
        if typing.get_origin(hint) is Literal:
            found[name] = set(typing.get_args(hint))
        elif hint is bool:
            found[name] = {True, False}
    return found


def values(configs: list[Any], name: str) -> set[object]:
    seen: set[object] = set()
    for config in configs:
        value = getattr(config, name)
        seen |= set(value) if isinstance(value, tuple) else {value}
    return seen


def test_every_switch_is_turned_by_some_tiny_model() -> None:
    families = [family_config(name) for name in FAMILIES]
    flows = [flow_config(name) for name in FLOWS]
    flows += [config for config in EVERY_KIND.values() if config.moe and config.flows]
    for name, wanted in options(MoEConfig).items():
        assert values([mixture_config(mixture).moe for mixture in MIXTURES], name) == wanted, name
    for name, wanted in options(ModelConfig).items():
        if name != "variant":
            assert values(families, name) == wanted, name
    for name, wanted in options(AuxConfig).items():
        assert values([flow.flows for flow in flows], name) == wanted, name
    for name, wanted in options(ReadoutConfig).items():
        assert values([flow.readout for flow in flows], name) == wanted, name


def test_changes_go_on_top() -> None:
    assert tiny_config("dual", num_layers=3).num_layers == 3
    assert family_config("gpt2", mlp="relu2").mlp == "relu2"
    assert flow_config("lora", vocab_size=64).vocab_size == 64


@pytest.mark.parametrize("flow", FLOWS)
def test_every_parameter_of_a_tiny_model_moves_the_loss(flow: str) -> None:
    """So that a test on a tiny model notices a parameter that is left out."""
    config = dataclasses.replace(flow_config(flow), qk_norm=True)
    model = tiny_model(config)
    tokens = random_tokens(config, 2, 9)
    model.loss(tokens[:, :-1], tokens[:, 1:]).total.backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # With r = p the auxiliary flow is not trained at all.
    assert [n for n in idle if config.readout.kind != "primary_only" or ".aux." not in n] == []


def test_inputs_and_models_depend_on_the_seed_alone() -> None:
    config = tiny_config("dual", vocab_size=64, real_vocab_size=53)
    assert torch.equal(random_tokens(config, 4, 50), random_tokens(config, 4, 50))
    assert not torch.equal(random_tokens(config, 4, 50), random_tokens(config, 4, 50, seed=1))
    assert random_tokens(config, 100, 50).max() == 52
    first, second = tiny_model(config).state_dict(), tiny_model(config).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
