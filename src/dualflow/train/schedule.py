"""Learning-rate schedules: pure functions of the optimizer step, never of micro-batches or of what
came before.

A schedule gives a factor within [0, 1] by which every group's peak rate is multiplied. Steps count
from 0; of a run of n steps the last is n − 1. Being pure, a schedule has no state to save: a
resumed run has the rates of a straight one.
"""

import math

from dualflow.train.config import ScheduleConfig


def learning_rate_factor(step: int, total_steps: int, config: ScheduleConfig) -> float:
    """The factor of optimizer step ``step`` (0 .. total_steps − 1) of a run of ``total_steps``.

    It rises as (step + 1) / (warm-up + 1), so the first step already moves the weights, is exactly
    1 at step ``effective_warmup``, and is ``min_lr_ratio`` at the last step. A run of one step has
    factor 1.
    """
    if not 0 <= step < total_steps:
        raise ValueError(
            f"step {step} is outside a run of {total_steps} steps (0 .. {total_steps - 1})"
        )
    warmup = effective_warmup(total_steps, config)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    decay = (
        total_steps - 1 - warmup if config.kind == "cosine" else _decay_steps(total_steps, config)
    )
    since = step - (total_steps - 1 - decay)
    if since <= 0 or decay == 0:
        return 1.0
    progress = since / decay
    falling = 0.5 * (1 + math.cos(math.pi * progress)) if config.kind == "cosine" else 1 - progress
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * falling


def effective_warmup(total_steps: int, config: ScheduleConfig) -> int:
    """The step of the peak: ``warmup_steps``, shortened where the run is too short to hold warm-up
    and decay.
    """
    decay = _decay_steps(total_steps, config) if config.kind == "wsd" else min(1, total_steps - 1)
    return min(config.warmup_steps, total_steps - 1 - decay)


def _decay_steps(total_steps: int, config: ScheduleConfig) -> int:
    """Steps the decay of ``wsd`` takes, the last one included: at least one if there is any decay
    and room for it.
    """
    if config.decay_fraction == 0:
        return 0
    return min(total_steps - 1, max(1, round(config.decay_fraction * total_steps)))
