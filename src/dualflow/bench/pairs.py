"""The models that are measured: a standard transformer and the Dual-Flow model made of it."""

from dataclasses import dataclass

import torch

from dualflow.model import CausalLM, build_model
from dualflow.recipes.demo import as_dual
from dualflow.spec import ModelConfig

PRECISIONS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Number formats of the weights, by the name the rows give them."""


@dataclass(frozen=True)
class ModelPair:
    """Both models, with equal values in all that they share (random: times do not depend on
    them).
    """

    name: str
    standard: CausalLM
    dual: CausalLM

    def cast(self, precision: str) -> "ModelPair":
        """The same pair with its weights in ``precision``, in place."""
        for model in (self.standard, self.dual):
            model.to(PRECISIONS[precision])
        return self


def build_pair(name: str, config: ModelConfig) -> ModelPair:
    """``config``, a standard model, and its Dual-Flow counterpart, in float32."""
    return ModelPair(name, build_model(config), build_model(as_dual(config)))


def made_up_tokens(config: ModelConfig, *shape: int) -> torch.Tensor:
    """int64 ids of ``shape`` that ``config`` knows, the same every time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.num_real_tokens, shape, generator=generator)
