"""The demo: a standard and a Dual-Flow model on the same tokens, small enough for a laptop."""

import dataclasses

from dualflow.data.config import DataConfig
from dualflow.spec import PRESETS, ModelConfig, ReadoutConfig
from dualflow.train.config import OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig

PRIMARY_LOSS_WEIGHT = 0.3
"""λ of the demo: it keeps p, and so ``--aux off``, as good as a standard model."""


def demo(variant: str, seed: int = 0) -> RunConfig:
    """``standard`` or ``dual``; equal seeds share data order and initial values."""
    model = PRESETS["demo"]
    if variant == "dual":
        model = as_dual(model)
    elif variant != "standard":
        raise ValueError(f"the demo compares 'standard' and 'dual'; found {variant!r}")
    return RunConfig(
        name=f"{variant}-seed{seed}",
        seed=seed,
        model=model,
        data=DataConfig(source="python-stdlib", tokenizer="bpe:1024", sequence_length=256),
        optimizer=OptimizerConfig(
            lr=0.048, muon_lr=0.015, muon_lr_adjust="match_rms_adamw", weight_decay=0.0
        ),
        schedule=ScheduleConfig(warmup_steps=30, decay_fraction=0.4, min_lr_ratio=0.0),
        train=TrainConfig(steps=1000, batch_size=16, eval_every=200, log_every=20, threads=1),
    )


def as_dual(model: ModelConfig, primary_loss_weight: float = PRIMARY_LOSS_WEIGHT) -> ModelConfig:
    """``model`` with one auxiliary flow and everything of the paper's design, trained with λ."""
    readout = ReadoutConfig(primary_loss_weight=primary_loss_weight)
    return dataclasses.replace(model, variant="dual", readout=readout)
