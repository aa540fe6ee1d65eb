"""Text and runs shared by the tests of training."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dualflow.checkpoint.retrofit import add_aux
from dualflow.checkpoint.store import read_config
from dualflow.testing.runs import tiny_run_config, write_tiny_text
from dualflow.train.config import INITIAL_MODEL, RunConfig
from tests.unit.train.initial_models import LORA, standard_model, write_initial


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def tiny_run(text: Path) -> Callable[..., RunConfig]:
    """``tiny_run_config`` on the shared text."""
    return lambda *args, **tables: tiny_run_config(text, *args, **tables)


@pytest.fixture(autouse=True)
def threads_kept() -> Iterator[None]:
    """A run sets the process's thread count; put it back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A retrofitted model, whose auxiliary has a LoRA too."""
    return write_initial(tmp_path / "source", add_aux(standard_model(), LORA))


@pytest.fixture
def begin(tiny_run: Callable[..., RunConfig], source: Path) -> Callable[..., RunConfig]:
    """A tiny run that begins from ``source`` and trains its auxiliary alone."""

    def make(name: str = "tiny", folder: Path = source, **tables: Any) -> RunConfig:
        train = {
            "trainable": "aux", "steps": 6, "eval_every": 3, "eval_batches": 1,
            "checkpoint_every": 2,
        }  # fmt: skip
        base = tiny_run(name, train=train | tables.pop("train", {}), **tables)
        data = dataclasses.replace(base.data, tokenizer=INITIAL_MODEL)
        return dataclasses.replace(
            base, initial_model=str(folder), model=read_config(folder), data=data
        )

    return make
