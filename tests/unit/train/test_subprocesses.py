from collections.abc import Callable
from pathlib import Path

import pytest

from dualflow.train import RunConfig, train
from dualflow.train.run_folder import RunFolder, read_metrics
from dualflow.train.subprocesses import train_in_subprocess

TinyRun = Callable[..., RunConfig]


def test_a_run_in_a_process_of_its_own_is_the_same_run(tmp_path: Path, tiny_run: TinyRun) -> None:
    result = train_in_subprocess(tiny_run("there"), tmp_path, progress="none")
    here = train(tiny_run("here"), tmp_path, progress="none")
    for changing in ("name", "train_seconds", "finished"):
        del result[changing], here[changing]
    assert result == here
    losses = [
        [record["loss"] for record in read_metrics(RunFolder(tmp_path / name).metrics)]
        for name in ("there", "here")
    ]
    assert losses[0] == losses[1]


def test_what_goes_wrong_there_is_raised_here(tmp_path: Path, tiny_run: TinyRun) -> None:
    with pytest.raises(ValueError, match="259 ids, but the model has room for 100"):
        train_in_subprocess(tiny_run(model={"vocab_size": 100}), tmp_path, progress="none")
