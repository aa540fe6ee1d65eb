"""Losses and gradients of the self-contained transformers model against ours, tensor by tensor."""

import pytest
import torch
from torch import Tensor

from dualflow.model import CausalLM
from dualflow.spec import ModelConfig, ReadoutConfig
from dualflow.testing.configs import FAMILIES, FLOWS, family_config, flow_config
from dualflow.testing.tensors import random_tokens, tiny_model

pytest.importorskip("transformers")

from dualflow.integrations.transformers import DualFlowForCausalLM
from dualflow.testing.twins import twin_of

CASES: dict[str, ModelConfig] = {
    "standard": family_config("llama"),
    **{f"{family}_dual": family_config(family, "dual") for family in FAMILIES},
    **{flow: flow_config(flow) for flow in FLOWS},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_ours(case: str) -> None:
    native = tiny_model(CASES[case]).train()
    twin = twin_of(native).train()
    tokens = random_tokens(native.config, 2, 21)
    compare_gradients(native, twin, tokens)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_survive_freezing_and_checkpointing(frozen: bool, reentrant: bool) -> None:
    readout = ReadoutConfig(kind="learned", primary_loss_weight=0.3)
    native = tiny_model(flow_config("three_flows", readout=readout)).train()
    twin = twin_of(native).train()
    twin.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if frozen:
        native.freeze_primary()
        twin.freeze_primary()
    compare_gradients(native, twin, random_tokens(native.config, 2, 21))


def compare_gradients(native: CausalLM, twin: DualFlowForCausalLM, tokens: Tensor) -> None:
    sums = native.loss(tokens[:, :-1], tokens[:, 1:])
    expected = sums.total / sums.count
    expected.backward()
    loss = twin(tokens, labels=tokens).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    theirs = dict(twin.named_parameters())
    for name, parameter in native.named_parameters():
        got = theirs[name].grad
        if parameter.grad is None or got is None:
            assert not _any(parameter.grad) and not _any(got), name
        else:
            torch.testing.assert_close(got, parameter.grad, rtol=1e-7, atol=1e-10, msg=name)


def _any(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())
