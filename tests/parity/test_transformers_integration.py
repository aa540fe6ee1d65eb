"""The self-contained transformers model against ours, with the same tensors: distributions of whole
sequences and of cached steps.
"""

import pytest
import torch
from torch import Tensor

from dualflow.spec import ModelConfig
from dualflow.testing.configs import FAMILIES, FLOWS, family_config, flow_config
from dualflow.testing.tensors import random_tokens, tiny_model

pytest.importorskip("transformers")

from dualflow.integrations.transformers import DualFlowForCausalLM
from dualflow.integrations.transformers.backbone_dualflow import CACHE
from dualflow.testing.twins import log_r_of, twin_of

CASES: dict[str, ModelConfig] = {
    **{f"{family}_standard": family_config(family) for family in FAMILIES},
    **{f"{family}_dual": family_config(family, "dual") for family in FAMILIES},
    **{flow: flow_config(flow) for flow in FLOWS},
}


def assert_same(got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal, with −∞ in the same places."""
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


@torch.inference_mode()
def step_by_step(model: DualFlowForCausalLM, tokens: Tensor, prompt: int) -> Tensor:
    """log r from the last prompt token on: one prefill, then a token at a time."""
    out = model(tokens[:, :prompt], use_cache=True, logits_to_keep=1)
    steps = [out.logits]
    for position in range(prompt, tokens.shape[1]):
        token = tokens[:, position : position + 1]
        out = model(token, past_key_values=out[CACHE], use_cache=True, logits_to_keep=1)
        steps.append(out.logits)
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("case", CASES)
def test_whole_sequences_and_cached_steps_give_our_distribution(case: str) -> None:
    native = tiny_model(CASES[case]).eval()
    tokens = random_tokens(native.config, 2, 40)  # past the original positions of scaled rotations
    expected = log_r_of(native, tokens)
    twin = twin_of(native)
    with torch.inference_mode():
        assert_same(twin(tokens).logits, expected, 1e-10)
    assert_same(step_by_step(twin, tokens, prompt=34), expected[:, 33:], 1e-10)


@pytest.mark.parametrize("case", ["llama_dual", "gemma2_dual", "three_flows"])
def test_both_implementations_of_attention_agree(case: str) -> None:
    native = tiny_model(CASES[case]).eval()
    tokens = random_tokens(native.config, 2, 40)
    expected, twin = log_r_of(native, tokens), twin_of(native, "eager")
    with torch.inference_mode():
        assert_same(twin(tokens).logits, expected, 1e-10)
    assert_same(step_by_step(twin, tokens, prompt=3), expected[:, 2:], 1e-10)


@pytest.mark.parametrize("case", ["llama_dual", "gpt2_dual", "gemma2_dual", "olmo2_dual", "lora"])
def test_float32_agrees(case: str) -> None:
    native = tiny_model(CASES[case], dtype=torch.float32).eval()
    tokens = random_tokens(native.config, 2, 50)
    with torch.inference_mode():
        assert_same(twin_of(native)(tokens).logits, log_r_of(native, tokens), 1e-5)
