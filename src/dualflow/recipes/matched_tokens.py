"""The ablation ladder at matched tokens: from the standard transformer to the full Dual-Flow."""

import dataclasses

from dualflow.recipes.demo import demo
from dualflow.spec import AuxConfig, ModelConfig, ReadoutConfig
from dualflow.train.config import RunConfig

_AUX_ONLY = ReadoutConfig(kind="aux_only")

LADDER: dict[str, dict] = {
    "standard": {},
    "minimal": {"variant": "dual", "aux": AuxConfig(couplings=()), "readout": _AUX_ONLY},
    "coupling": {"variant": "dual", "readout": _AUX_ONLY},
    "full": {"variant": "dual"},
    "full-lambda0.3": {"variant": "dual", "readout": ReadoutConfig(primary_loss_weight=0.3)},
    "phd2": {"variant": "phd2"},
    "two-softmax": {"variant": "two_softmax"},
}
"""What each rung changes in the standard model; docs/dual_flow.md explains the ladder."""

SEEDS = (0, 1, 2)


def matched_tokens(rung: str, seed: int = 0) -> RunConfig:
    """One rung of the ladder; everything but the model is the same for all of them."""
    base = demo("standard", seed)
    model: ModelConfig = dataclasses.replace(base.model, **LADDER[rung])
    return dataclasses.replace(base, name=f"{rung}-seed{seed}", model=model)
