"""Initial values. Each parameter is drawn from a generator of its own, seeded by the run's seed and
the parameter's name.

So every parameter that two variants share starts with the same values in both, whatever else they
have.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from dualflow.spec import ModelConfig

RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
ZEROS = ("bias", "_coupling", "lora_B.weight", "aux_readout.weight")


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill every parameter in place: normal(0, init_std); matrices that write to the residual
    stream are scaled by 1/sqrt(2 L) (GPT-2); gains 1; biases, couplings, LoRA's second matrices and
    the learned α's numbers 0.
    """
    unit = 0.0 if config.norm_offset else 1.0
    for name, parameter in model.named_parameters():
        if name.endswith(ZEROS):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(unit)
        else:
            std = config.init_std
            if name.endswith(RESIDUAL_OUTPUTS):
                std /= math.sqrt(2 * config.num_layers)
            parameter.copy_(drawn(name, parameter.shape, std, seed))


def drawn(name: str, shape: torch.Size, std: float, seed: int) -> Tensor:
    """normal(0, std) in float32, the same for the same name and seed."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(shape, generator=generator, dtype=torch.float32) * std
