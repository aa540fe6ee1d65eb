"""The ablation ladder at matched tokens: from the standard transformer to the full Dual-Flow."""

import dataclasses
from typing import Any

from dualflow.plan.costs import train_flops_per_token
from dualflow.recipes.demo import demo
from dualflow.spec import AuxConfig, ModelConfig, ReadoutConfig
from dualflow.train.config import RunConfig

_AUX_ONLY = ReadoutConfig(kind="aux_only")

LADDER: dict[str, dict[str, Any]] = {
    "standard": {},
    "minimal": {"variant": "dual", "aux": AuxConfig(couplings=()), "readout": _AUX_ONLY},
    "coupling": {"variant": "dual", "readout": _AUX_ONLY},
    "full": {"variant": "dual"},
    "full-lambda0.3": {"variant": "dual", "readout": ReadoutConfig(primary_loss_weight=0.3)},
    "phd2": {"variant": "phd2"},
    "two-softmax": {"variant": "two_softmax"},
}
"""What each rung changes in the standard model; docs/dual_flow.md explains the ladder."""

EQUAL_FLOPS = "standard-equal-flops"
"""The standard model on as many tokens as the full model's training FLOPs would pay for."""

SEEDS = (0, 1, 2)


def matched_tokens(rung: str, seed: int = 0) -> RunConfig:
    """One rung of the ladder, or ``EQUAL_FLOPS``; all but the model (the steps) is the same."""
    base = demo("standard", seed)
    train = base.train
    if rung == EQUAL_FLOPS:
        context = base.data.sequence_length
        full = dataclasses.replace(base.model, **LADDER["full"])
        ratio = train_flops_per_token(full, context) / train_flops_per_token(base.model, context)
        train = dataclasses.replace(train, steps=round(train.steps * ratio))
    changes = {} if rung == EQUAL_FLOPS else LADDER[rung]
    model: ModelConfig = dataclasses.replace(base.model, **changes)
    return dataclasses.replace(base, name=f"{rung}-seed{seed}", model=model, train=train)
