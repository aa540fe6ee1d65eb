"""Consoles for the verbs: results go to standard output, progress and remarks to standard error."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def output() -> "Console":
    """For results, such as tables; plain text and no line-wrapping where it is not a terminal."""
    return _console(stderr=False)


def remarks() -> "Console":
    """For progress and notes, so that the results can be piped on their own."""
    return _console(stderr=True)


def _console(stderr: bool) -> "Console":
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    # Piped into a file or a pager, a table must not be folded to an assumed 80 columns.
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=160)
