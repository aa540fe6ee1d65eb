"""Files and folders that are either whole or not there, whenever the process or the machine stops.

One writer per target at a time; readers need no lock.
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_STALE_SECONDS = 3600.0
"""Temporary folders older than this were left over by a killed process, and are removed."""


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file, then put it in ``path``'s place in one step."""
    temporary = _temporary_beside(path)
    try:
        write(temporary)
        _sync(temporary)
        temporary.replace(path)
    except OSError as error:
        if error.strerror and error.filename in (None, str(temporary)):
            error.filename = str(path)  # the one that people know
        raise
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


@contextmanager
def atomic_folder(folder: str | Path, *, replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield an empty temporary folder that takes the place of ``folder`` when the block ends well.

    Where the block raises (Ctrl-C included), ``folder`` stays as it was. An existing ``folder`` is
    replaced only if it is empty or ``replaceable(folder)``; it is moved aside to
    ``previous(folder)`` for the moment between two renames, where readers and the next writer find
    it should the process die just then.

    Raises ``ValueError`` where ``folder`` is a file, or a folder that must not be replaced.
    """
    target = Path(folder).resolve()
    if target.exists() and not target.is_dir():
        raise ValueError(f"{folder} is a file; a model folder cannot be written in its place")
    target.parent.mkdir(parents=True, exist_ok=True)
    _recover(target)
    if target.is_dir() and any(target.iterdir()) and not replaceable(target):
        raise ValueError(
            f"{folder} exists and holds something else than a dualflow model; "
            "choose another folder or remove it first"
        )
    _remove_stale(target)
    temporary = _temporary_beside(target)
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        _swap_in(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def previous(folder: Path) -> Path:
    """Where the old contents of ``folder`` lie while new ones are being moved in."""
    return folder.parent / f".{folder.name}.previous"


def _swap_in(temporary: Path, target: Path) -> None:
    old = previous(target)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _recover(target: Path) -> None:
    old = previous(target)
    if old.is_dir():
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)


def _remove_stale(target: Path) -> None:
    for left_over in target.parent.glob(f".{target.name}.tmp-*"):
        if time.time() - left_over.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left_over, ignore_errors=True)


def _temporary_beside(path: Path) -> Path:
    return path.parent / f".{path.name}.tmp-{secrets.token_hex(4)}"


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    """Flush a file or folder to disk; systems that cannot open a folder for it (Windows) are left
    to themselves.
    """
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
