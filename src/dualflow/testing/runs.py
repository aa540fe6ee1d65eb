"""Tiny training runs: a fraction of a second on one thread, for tests of whatever needs a run."""

import random
from pathlib import Path
from typing import Any

from dualflow.config import merge
from dualflow.data.config import DataConfig
from dualflow.spec import Variant
from dualflow.testing.configs import tiny_config
from dualflow.train.config import OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig

BYTE_VOCABULARY = 259
"""Ids of the tokenizer ``bytes``: 256 bytes and three control tokens."""


def write_tiny_text(folder: Path) -> Path:
    """A file of some 9,000 characters of made-up sentences, the same every time; returns its
    path.
    """
    words = [
        "the",
        "cat",
        "sat",
        "on",
        "a",
        "mat",
        "and",
        "saw",
        "how",
        "old",
        "rain",
        "ran",
        "over",
    ]
    draw = random.Random(0)
    sentences = [" ".join(draw.choices(words, k=8)) for _ in range(300)]
    path = folder / "tiny.txt"
    path.write_text(".\n".join(sentences), encoding="utf-8")
    return path


def tiny_run_config(
    text: Path, name: str = "tiny", variant: Variant = "dual", **tables: dict[str, Any]
) -> RunConfig:
    """A run of twelve steps of four sequences of 16 bytes of ``text``, eager, on one thread.

    tables: changes to its parts, such as ``train={"steps": 5}``.
    """
    model = tiny_config(variant, vocab_size=BYTE_VOCABULARY, init_std=0.02)
    config = RunConfig(
        name=name,
        model=model,
        data=DataConfig(source=str(text), tokenizer="bytes", sequence_length=16),
        optimizer=OptimizerConfig(lr=1e-2),
        schedule=ScheduleConfig(warmup_steps=3),
        train=TrainConfig(
            steps=12,
            batch_size=4,
            eval_every=5,
            eval_batches=3,
            checkpoint_every=4,
            log_every=1,
            threads=1,
            compile="off",
            tensorboard="off",
        ),
    )
    return merge(config, tables)
