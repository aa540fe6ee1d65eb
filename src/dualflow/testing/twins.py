"""One model in two libraries: ours, and the transformers integration with the same tensors."""

from typing import Any

import torch
from torch import Tensor

from dualflow import config as configuration
from dualflow.integrations.transformers import DualFlowConfig, DualFlowForCausalLM
from dualflow.model import CausalLM


def twin_of(native: CausalLM, attention: str = "sdpa") -> Any:
    """A ``DualFlowForCausalLM`` with copies of the tensors of ``native``, in eval mode."""
    config = DualFlowConfig(config=configuration.to_dict(native.config))
    config._attn_implementation = attention
    twin: Any = DualFlowForCausalLM(config)
    twin.to(native.dtype)
    twin.load_state_dict(native.state_dict(), strict=True)
    twin.tie_weights()
    return twin.eval()


@torch.inference_mode()
def log_r_of(native: CausalLM, tokens_BS: Tensor) -> Tensor:
    """[B, S, V]: log r at every position of every row, each row by itself."""
    rows = []
    for tokens_S in tokens_BS:
        positions_S = torch.arange(len(tokens_S))
        cache = native.new_cache(len(tokens_S))
        out = native.step(tokens_S, positions_S, cache.writers(), positions_S)
        rows.append(native.log_probs(out.primary_TD, out.aux_FAD).r)
    return torch.stack(rows)
