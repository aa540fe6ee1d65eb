"""Text and runs shared by the tests of training."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dualflow.testing.runs import tiny_run_config, write_tiny_text
from dualflow.train.config import RunConfig


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
