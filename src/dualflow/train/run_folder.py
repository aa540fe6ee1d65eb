"""The folder of a run: what lies where, who may write into it, and its records of configuration and
machine.
"""

import json
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

import dualflow
from dualflow import config as configuration
from dualflow.checkpoint.atomic import write_atomic
from dualflow.checkpoint.locate import read_json
from dualflow.train.config import RunConfig, read_run_config

Resume = bool | Literal["auto"]


class RunFolder:
    """``runs/NAME`` and the paths in it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.result = self.path / "result.json"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"

    def read_config(self) -> RunConfig:
        """The run's configuration. Raises ``ConfigError`` where there is none."""
        return read_run_config(self.config)

    def read_result(self) -> dict[str, Any] | None:
        """What the finished run wrote; None for an unfinished one. Raises ``ValueError`` naming the
        file where it is damaged.
        """
        if not self.result.exists():
            return None
        result = read_json(self.result)
        for name in ("steps", "tokens", "train_seconds", "val_loss", "val_loss_p", "val_loss_q"):
            value = result.get(name, "missing")
            if not isinstance(value, int | float | None):
                raise ValueError(f"{self.result}: {name} is {value!r}; expected a number")
        return result

    def is_run(self) -> bool:
        """Whether a run was begun here."""
        return self.config.is_file()

    def is_taken(self) -> bool:
        """Whether anything at all lies here."""
        return self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))


def claim(folder: RunFolder, *, resume: Resume, overwrite: bool) -> bool:
    """Decide what happens to ``folder`` before a run; returns whether the run that is there is to
    be continued.

    A new run never lands on an old one: it needs an empty place, or ``overwrite``, which removes
    the old run (and nothing that is not a run). ``resume="auto"`` continues what is there and
    starts anew where nothing is. Nothing is changed yet: ``write_records`` does that once the run
    is known to be able to start.
    Raises ``ValueError`` with what to do instead.
    """
    if resume and overwrite:
        raise ValueError(
            "resume and overwrite exclude each other: continue the run, or start it anew"
        )
    if folder.is_taken() and not folder.is_run():
        raise ValueError(
            f"{folder.path} exists and is not a run (no config.json); choose another name or folder"
        )
    if resume and folder.is_run():
        return True
    if resume is True:
        raise ValueError(f"there is no run in {folder.path} to resume")
    if folder.is_run() and not overwrite:
        raise ValueError(_what_to_do(folder))
    return False


@contextmanager
def held(folder: RunFolder) -> Iterator[None]:
    """Keep other processes from training the same run meanwhile; a killed process lets go by
    itself.

    Raises ``ValueError`` where another holds it. Without file locks (Windows) it does nothing.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    runs = folder.path.parent
    if runs.exists() and not runs.is_dir():
        raise ValueError(f"{runs} is a file; expected the folder that runs go into")
    is_new = not runs.exists()
    runs.mkdir(parents=True, exist_ok=True)
    path = runs / f".{folder.path.name}.lock"
    try:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(f"{folder.path} is being trained by another process") from error
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
    finally:
        if is_new and not any(runs.iterdir()):  # the run could not even begin
            runs.rmdir()


def _what_to_do(folder: RunFolder) -> str:
    if folder.result.exists():
        return (
            f"{folder.path} holds a finished run; give this one another name (--set name=...), "
            "or replace the old one with --overwrite"
        )
    return (
        f"{folder.path} holds an unfinished run; continue it with "
        f"`dualflow train --resume {folder.path}`, or start it anew with --overwrite"
    )


def write_records(
    folder: RunFolder, config: RunConfig, device: torch.device, ranks: int, *, resumed: bool
) -> None:
    """Write config.json and environment.json; a new run clears what ``claim`` allowed it to
    replace, a resumed one adds its own entry to the environment.
    """
    if folder.is_run() and not resumed:
        shutil.rmtree(folder.path)
    folder.path.mkdir(parents=True, exist_ok=True)
    write_json(folder.config, configuration.to_dict(config))
    now = environment(device, ranks)
    if resumed and folder.environment.exists():
        first = read_json(folder.environment)
        earlier = first.get("resumed", [])
        if not isinstance(earlier, list):
            raise ValueError(f"{folder.environment}: resumed is {earlier!r}; expected a list")
        now = {**first, "resumed": [*earlier, now]}
    write_json(folder.environment, now)


def environment(device: torch.device, ranks: int) -> dict[str, Any]:
    """What the run runs on and since when; no names of people or hosts and no paths."""
    return {
        "dualflow": dualflow.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "ranks": ranks,
        "commit": _commit(),
        "started": timestamp(),
    }


def timestamp() -> str:
    """Now, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def truncate_metrics(path: Path, step: int) -> None:
    """Drop what was logged after ``step``, and a last line that was cut short: a resumed run writes
    them again.
    """
    if path.exists():
        kept = "".join(
            json.dumps(record) + "\n" for record in read_metrics(path) if record["step"] <= step
        )
        write_atomic(path, lambda temporary: temporary.write_text(kept, encoding="utf-8"))


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of metrics.jsonl; what is no record, such as a line cut short, is passed over."""
    with path.open("rb") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and type(record.get("step")) is int:
                yield record


def write_json(path: Path, value: Any) -> None:
    """Write JSON for people and machines, atomically; there is no NaN in it."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the source this package runs from, "-dirty" where it was changed; None for an
    installed one.
    """
    package = Path(dualflow.__file__).resolve().parent
    root = package.parent.parent
    if package.parent.name != "src" or not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + (
        "-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else ""
    )


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
