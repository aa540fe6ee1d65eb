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
        data=DataConfig(source="python-stdlib", sequence_length=512),
        # E2 starts where it is good already, so its rate is well below that of a new model's.
        optimizer=OptimizerConfig(
            kind="adamw", lr=1e-3, embedding_lr=1e-3, vector_lr=3e-3, weight_decay=0.0
        ),
        schedule=ScheduleConfig(warmup_steps=20, decay_fraction=0.5, min_lr_ratio=0.0),
        train=TrainConfig(
            trainable="aux",
            steps=500,
            batch_size=16,
            micro_batch_size=4,
            eval_every=100,
            eval_batches=8,
            checkpoint_every=100,
        ),
    )
