"""Where metrics go: JSON lines always, TensorBoard where it is installed, Weights & Biases where it
is asked for.

A record is ``{"kind": "train" | "validation", "step": ..., "tokens": ..., ...}``; numbers or None.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dualflow.config import to_dict
from dualflow.extras import find_extra, require_extra
from dualflow.train.config import RunConfig
from dualflow.train.run_folder import RunFolder

Record = Mapping[str, Any]


class Sink(Protocol):
    """Takes the records of a run in order."""

    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """Appends each record as a line to a file, flushed, so that a killed process loses at most the
    line in hand.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files for TensorBoard: ``train/loss``, ``validation/loss_p`` and so on, over optimizer
    steps.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        module = _tensorboard()
        # Events from here on were written by the interrupted part of a resumed run and are written
        # again.
        self._writer = module.SummaryWriter(str(folder), purge_step=first_step)

    def write(self, record: Record) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project in Weights & Biases; resuming a run continues it there under the same
    id.
    """

    def __init__(self, project: str, config: RunConfig, folder: Path) -> None:
        wandb = _wandb()
        identifier = f"{config.name}-{config.fingerprint()[:8]}"
        self._run = wandb.init(
            project=project,
            name=config.name,
            id=identifier,
            resume="allow",
            config=to_dict(config),
            dir=str(folder),
        )

    def write(self, record: Record) -> None:
        self._run.log(numbers(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


def numbers(record: Record) -> dict[str, float]:
    """The measured values of a record as ``{"train/loss": 2.5, ...}``, those that are None left
    out.
    """
    kind = record["kind"]
    skip = ("kind", "step")
    return {
        f"{kind}/{key}": value
        for key, value in record.items()
        if key not in skip and value is not None
    }


def open_sinks(config: RunConfig, folder: RunFolder, step: int) -> list[Sink]:
    """The sinks ``config`` asks for (``check_sinks``); ``step``: optimizer steps already done."""
    sinks: list[Sink] = [JsonLines(folder.metrics)]
    wanted = config.train.tensorboard
    if wanted == "on" or (wanted == "auto" and _has_tensorboard()):
        sinks.append(TensorBoard(folder.path / "tensorboard", step + 1))
    if config.train.wandb_project is not None:
        sinks.append(WeightsAndBiases(config.train.wandb_project, config, folder.path))
    return sinks


def check_sinks(config: RunConfig) -> None:
    """Raise ``MissingExtraError`` where a sink is asked for that is not installed."""
    if config.train.tensorboard == "on":
        _tensorboard()
    if config.train.wandb_project is not None:
        _wandb()


def _tensorboard() -> Any:
    return require_extra("torch.utils.tensorboard", "train", "TensorBoard logs")


def _wandb() -> Any:
    return require_extra("wandb", "wandb", "logging to Weights & Biases (train.wandb_project)")


def _has_tensorboard() -> bool:
    # TensorBoard loads all of TensorFlow where it finds it, which takes seconds and prints
    # warnings.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return find_extra("torch.utils.tensorboard") is not None
