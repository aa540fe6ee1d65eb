"""Progress of long work on standard error, a bar per stage."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """While entered, what it yields shows how far a stage is: called with its name, how much is
    done, and of how much (0: not known). Nothing is shown where that is not a terminal.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from dualflow.cli.console import remarks

    console = remarks()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    tasks: dict[str, Any] = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            for finished in tasks.values():
                bars.stop_task(finished)
            tasks[stage] = bars.add_task(stage, total=None)
        bars.update(tasks[stage], completed=done, total=total or None)

    with bars:
        yield show
