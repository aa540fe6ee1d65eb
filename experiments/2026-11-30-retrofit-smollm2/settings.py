"""How every cell is trained and measured. README.md says how these were found."""

from dualflow.train.config import OptimizerConfig, ScheduleConfig

TOKENS = 8192
"""Training tokens of a cell unless ``--tokens`` says otherwise."""
LENGTH = 256
BATCH = 1
"""Windows of a step: so few tokens want many steps."""
HELD_OUT_TOKENS = 20_480
HELD_OUT_BATCH = 4
FIT_BATCHES = 8
"""Batches that a learned α is fitted to where it was not trained."""


def optimizer_config(rank: int) -> OptimizerConfig:
    """AdamW without decay; the same for the auxiliary and the control. A LoRA moves the further
    the higher its rank, as nothing divides by it: its rate falls with the root of the rank.
    """
    return OptimizerConfig(
        kind="adamw",
        lr=6e-3 * (8 / max(rank, 8)) ** 0.5,
        embedding_lr=1e-3,
        vector_lr=1e-2,
        weight_decay=0.0,
        grad_clip=1.0,
    )


def schedule_config(steps: int) -> ScheduleConfig:
    """A tenth of warm-up, then half a cosine."""
    return ScheduleConfig(kind="cosine", warmup_steps=max(2, steps // 10), min_lr_ratio=0.05)
