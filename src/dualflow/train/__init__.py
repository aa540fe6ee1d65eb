"""Training: one explicit loop over plain configuration. Importing this package does not import
torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dualflow.train.config import (
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    read_run_config,
)

if TYPE_CHECKING:
    from dualflow.train.display import Style

__all__ = [
    "OptimizerConfig",
    "RunConfig",
    "ScheduleConfig",
    "TrainConfig",
    "read_run_config",
    "train",
]


def train(
    config: RunConfig,
    runs_folder: str | Path = "runs",
    *,
    resume: bool | Literal["auto"] = False,
    overwrite: bool = False,
    progress: "Style" = "auto",
) -> dict[str, Any]:
    """Run ``config`` in ``runs_folder/config.name`` to its end; returns what result.json holds.

    resume:     continue the run that is there, bit for bit (a finished one just returns its
                result); ``"auto"``: or begin it where there is none.
    overwrite:  replace a run of that name.
    progress:   ``live``, ``plain``, ``none``, or ``auto``: live in a terminal, plain lines
                elsewhere; on stderr.

    Started by torchrun, it trains on all ranks; rank 0 writes. Sets this process's thread count
    where the configuration names one. SIGINT and SIGTERM finish the step, save, and raise
    ``TrainingInterrupted`` (a ``KeyboardInterrupt``). Raises ``ValueError`` in one line where
    anything does not fit, or the loss is no longer finite.
    """
    from dualflow.train.loop import run_training

    return run_training(config, runs_folder, resume=resume, overwrite=overwrite, progress=progress)
