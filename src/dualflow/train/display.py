"""What a person sees of a run: a live line in a terminal, plain lines elsewhere, or nothing. All on
stderr.
"""

import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

Style = Literal["auto", "live", "plain", "none"]
Record = Mapping[str, Any]

_PLAIN_SECONDS = 2.0
"""Plain lines of training come no faster than this; every validation is shown."""


class Display(Protocol):
    """Shows a run: ``note`` at any time, ``alert`` from a signal handler, ``begin`` before the
    first step, ``update`` with every record.
    """

    def note(self, text: str) -> None: ...
    def alert(self, text: str) -> None: ...
    def begin(self, step: int, total_steps: int) -> None: ...
    def update(self, record: Record) -> None: ...
    def close(self) -> None: ...


def open_display(style: Style, name: str) -> Display:
    """The display for the run ``name``; ``auto`` is live in a terminal and plain elsewhere."""
    if style == "none":
        return Silent()
    if style == "live" or (style == "auto" and sys.stderr.isatty()):
        return Live(name)
    return Plain(name)


class Silent:
    """Shows nothing."""

    def note(self, text: str) -> None:
        pass

    def alert(self, text: str) -> None:
        pass

    def begin(self, step: int, total_steps: int) -> None:
        pass

    def update(self, record: Record) -> None:
        pass

    def close(self) -> None:
        pass


class Plain:
    """A line per record, for logs and pipes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._remaining: Remaining | None = None
        self._last = float("-inf")

    def note(self, text: str) -> None:
        for line in text.splitlines():
            print(f"{self._name}: {line}", file=sys.stderr, flush=True)

    def alert(self, text: str) -> None:
        _write_at_once(text)

    def begin(self, step: int, total_steps: int) -> None:
        self._remaining = Remaining(step, total_steps)

    def update(self, record: Record) -> None:
        assert self._remaining is not None
        step, total, now = record["step"], self._remaining.total_steps, time.monotonic()
        if record["kind"] == "train" and now - self._last < _PLAIN_SECONDS and step != total:
            return
        self._last = now
        left = self._remaining.text(step) if record["kind"] == "train" else ""
        self.note(f"step {step}/{total}: {describe(record)}{', ' if left else ''}{left}")

    def close(self) -> None:
        pass


class Live:
    """One line that is redrawn: a bar, loss, validation loss, learning rate, tokens per second,
    time left.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._remaining: Remaining | None = None
        self._figures: dict[str, str] = {}
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
        self._progress = Progress(
            *columns, TextColumn("{task.fields[figures]}"), console=Console(stderr=True)
        )
        self._task: TaskID | None = None

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def alert(self, text: str) -> None:
        _write_at_once(text)

    def begin(self, step: int, total_steps: int) -> None:
        self._remaining = Remaining(step, total_steps)
        self._task = self._progress.add_task(
            self._name, total=total_steps, completed=step, figures=""
        )
        self._progress.start()

    def update(self, record: Record) -> None:
        assert self._remaining is not None and self._task is not None
        self._figures[record["kind"]] = describe(record)
        self._figures["left"] = self._remaining.text(record["step"])
        shown = [
            self._figures[key] for key in ("train", "validation", "left") if self._figures.get(key)
        ]
        self._progress.update(self._task, completed=record["step"], figures=" · ".join(shown))

    def close(self) -> None:
        self._progress.stop()


class Remaining:
    """The time left, judged by the steps of this process, validation and saving included."""

    def __init__(self, step: int, total_steps: int) -> None:
        self.total_steps = total_steps
        self._first_step = step
        self._begun = time.monotonic()

    def text(self, step: int) -> str:
        """Such as ``0:04:31 left``; empty before the first step and at the end."""
        done, left = step - self._first_step, self.total_steps - step
        if done < 1 or left < 1:
            return ""
        seconds = (time.monotonic() - self._begun) / done * left
        return f"{timedelta(seconds=round(seconds))} left"


def describe(record: Record) -> str:
    """The figures of a record for people: ``loss 2.5013, lr factor ...``."""
    if record["kind"] == "validation":
        parts = [f"validation loss {_number(record['loss'])}"]
        parts += [
            f"{name} {_number(record[f'loss_{name}'])}"
            for name in "pq"
            if record.get(f"loss_{name}") is not None
        ]
        return ", ".join(parts)
    rate = f"{record['tokens_per_second']:,.0f} tokens/s"
    return f"loss {_number(record['loss'])}, lr {record['lr']:.2e}, {rate}"


def _write_at_once(text: str) -> None:
    """To stderr past Python's buffers, which a signal may have interrupted in the middle of a
    write.
    """
    os.write(2, f"\n{text}\n".encode())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
