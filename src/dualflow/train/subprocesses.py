"""A run in a Python process of its own: the OpenMP runtime takes its thread count from the
environment, once.

Several runs share a machine this way, each on its own threads, without slowing each other by more
threads than cores.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualflow import config as configuration
from dualflow.train import train
from dualflow.train.config import RunConfig
from dualflow.train.interrupt import TrainingInterrupted

if TYPE_CHECKING:
    from dualflow.train.display import Style
    from dualflow.train.run_folder import Resume

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def train_in_subprocess(
    config: RunConfig,
    runs_folder: str | Path = "runs",
    *,
    resume: "Resume" = False,
    overwrite: bool = False,
    progress: "Style" = "plain",
) -> dict[str, Any]:
    """As ``dualflow.train.train``, in a fresh process with ``train.threads`` threads; waits for its
    end.

    It may be called from several threads at a time. Ctrl-C in a terminal reaches the process too,
    which saves and stops. Raises what ``train`` raises: ``TrainingInterrupted``, and ``ValueError``
    for every failure.
    """
    task = {
        "config": configuration.to_dict(config),
        "runs_folder": str(runs_folder),
        "resume": resume,
        "overwrite": overwrite,
        "progress": progress,
    }
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(task),
        stdout=subprocess.PIPE,
        env=_environment(config.train.threads),
        text=True,
        check=False,
    )
    answer = _answer(done.stdout)
    if "result" in answer:
        return answer["result"]
    message = answer.get(
        "error", f"the training process of {config.name} ended with exit code {done.returncode}"
    )
    if done.returncode in (130, 143):
        raise TrainingInterrupted(message, done.returncode - 128)
    raise ValueError(message)


def _environment(threads: int | None) -> dict[str, str]:
    limits = {} if threads is None else dict.fromkeys(_THREAD_VARIABLES, str(threads))
    return {**os.environ, **limits}


def _answer(output: str) -> dict[str, Any]:
    lines = output.strip().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}


def _main() -> int:
    task = json.load(sys.stdin)
    config = configuration.from_dict(RunConfig, task.pop("config"))
    try:
        answer, code = {"result": train(config, task.pop("runs_folder"), **task)}, 0
    except TrainingInterrupted as stop:
        answer, code = {"error": str(stop)}, stop.exit_code
    except (ValueError, OSError, ImportError) as error:
        answer, code = {"error": str(error)}, 2
    print(json.dumps(answer), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(_main())
