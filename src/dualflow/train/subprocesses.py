"""A run in a Python process of its own: the OpenMP runtime takes its thread count from the
environment, once.

Several runs share a machine this way, each on its own threads, without slowing each other by more
threads than cores.
"""

import json
import os
import signal
import subprocess
import sys
import threading
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


class TrainingProcess:
    """A run that goes on in a process of its own, with ``train.threads`` threads.

    apart: whether a terminal's Ctrl-C does not reach it; whoever started it then passes signals on.
    The other arguments are those of ``dualflow.train.train``.
    """

    def __init__(
        self,
        config: RunConfig,
        runs_folder: str | Path = "runs",
        *,
        resume: "Resume" = False,
        overwrite: bool = False,
        progress: "Style" = "plain",
        apart: bool = False,
    ) -> None:
        task = {
            "config": configuration.to_dict(config),
            "runs_folder": str(runs_folder),
            "resume": resume,
            "overwrite": overwrite,
            "progress": progress,
        }
        self._name = config.name
        self._output: str | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(config.train.threads),
            text=True,
            start_new_session=apart,
        )
        assert self._process.stdin is not None
        # The pipe stays open: its end tells the run that whoever started it is gone.
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def send_signal(self, number: int) -> None:
        """Pass a signal on; SIGINT and SIGTERM make the run save and stop."""
        if self.running:
            self._process.send_signal(number)

    def result(self) -> dict[str, Any]:
        """Wait for its end; returns or raises what ``train`` does: ``TrainingInterrupted``, and
        ``ValueError`` for every failure.
        """
        output = self._output
        if output is None:
            assert self._process.stdout is not None
            with self._process, self._process.stdout as pipe:
                output = self._output = pipe.read()
        answer, code = _answer(output), self._process.wait()
        if "result" in answer:
            return answer["result"]
        ended = f"the training process of {self._name} ended with exit code {code}"
        message = answer.get("error", ended)
        if code in (130, 143):
            raise TrainingInterrupted(message, code - 128)
        raise ValueError(message)


def train_in_subprocess(
    config: RunConfig,
    runs_folder: str | Path = "runs",
    *,
    resume: "Resume" = False,
    overwrite: bool = False,
    progress: "Style" = "plain",
) -> dict[str, Any]:
    """As ``dualflow.train.train``, in a fresh process; waits for its end.

    It may be called from several threads at a time. Ctrl-C in a terminal reaches the process too,
    which saves and stops.
    """
    settings: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "progress": progress}
    return TrainingProcess(config, runs_folder, **settings).result()


def _environment(threads: int | None) -> dict[str, str]:
    limits = {} if threads is None else dict.fromkeys(_THREAD_VARIABLES, str(threads))
    return {**os.environ, **limits}


def _answer(output: str) -> dict[str, Any]:
    lines = output.strip().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}


def _stop_with_parent() -> None:
    """Save and stop once the process that started this one is gone, however it ended."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _main() -> int:
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_stop_with_parent, daemon=True).start()
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
