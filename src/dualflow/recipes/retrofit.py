"""The auxiliary of a model that was there before, trained beside its frozen primary.

``dualflow retrofit SRC models/NAME``, then
``dualflow train --recipe retrofit --set initial_model=models/NAME --set data.source=TEXTS``.
"""

import dataclasses

from dualflow.data.config import DataConfig
from dualflow.spec import PRESETS
from dualflow.train.config import OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig


def retrofit() -> RunConfig:
    """Needs ``initial_model``, whose model and tokenizer it then has; until one is named it shows
    the sizes of SmolLM2-135M.
    """
    return RunConfig(
        name="retrofit",
        model=dataclasses.replace(PRESETS["smollm2-135m"], variant="dual"),
        data=DataConfig(source="python-stdlib", sequence_length=256),
        # Rates as in experiments/2026-11-30-retrofit-smollm2, that of a LoRA of rank 8 halved for
        # the longer run: E2 starts where it is good already, couplings and LoRA at zero.
        optimizer=OptimizerConfig(
            kind="adamw", lr=3e-3, embedding_lr=1e-3, vector_lr=1e-2, weight_decay=0.0
        ),
        schedule=ScheduleConfig(kind="cosine", warmup_steps=10, min_lr_ratio=0.05),
        train=TrainConfig(
            trainable="aux",
            steps=200,
            batch_size=4,
            precision="bf16",
            eval_every=50,
            eval_batches=20,
            checkpoint_every=50,
        ),
    )
