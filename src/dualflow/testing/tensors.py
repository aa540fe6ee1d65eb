"""Seeded inputs and models whose every parameter counts."""

import hashlib

import torch
from torch import Tensor

from dualflow.model import CausalLM, build_model
from dualflow.spec import ModelConfig


def seeded(*parts: object) -> torch.Generator:
    """A CPU generator that depends on ``parts`` alone, such as a seed and a name."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def random_tokens(config: ModelConfig, *shape: int, seed: int = 0) -> Tensor:
    """int64 ids of ``shape`` that ``config`` can sample (no padding rows)."""
    return torch.randint(config.num_real_tokens, shape, generator=seeded(seed, "tokens"))


def tiny_model(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> CausalLM:
    """A model on the CPU whose zeros and ones (couplings, biases, gains, LoRA) are random too.

    A fresh model has couplings of 0 and gains of 1, under which many a mistake makes no difference.
    float64 by default, so that two ways to compute the same thing agree to rounding.
    """
    model = build_model(config, seed=seed, dtype=dtype)
    perturb(model, seed)
    return model


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are equal bit by bit, or neither is there."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


@torch.no_grad()
def perturb(model: torch.nn.Module, seed: int = 0, std: float = 0.3) -> None:
    """Add seeded noise of ``std`` to every vector, and to every matrix that is all zeros (LoRA's
    second).
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or not parameter.any():
            noise = torch.randn(
                parameter.shape, generator=seeded(seed, "perturb", name), dtype=torch.float64
            )
            parameter.add_(noise.to(parameter) * std)
