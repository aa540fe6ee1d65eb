"""The results of a batch: a JSON object a line, appended as they come, in the order they end.

    {"id": "a", "line": 1, "input_hash": "...", "outputs": [{"text": ..., "token_ids": ...,
     "finish_reason": ...}], "usage": {...}}
    {"id": null, "line": 2, "input_hash": "...", "error": "..."}

A line is whole once it ends with a line break; a last one that does not was cut short, and is
dropped when the file is opened again.
"""

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dualflow.cli.batch_input import BatchRequest, key_of

Record = dict[str, Any]

_BEGINNING = b'{"id": '
"""Of every line: what begins otherwise was not cut short by us."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a results file holds of the requests that were asked for.

    lines:    lines of the input whose results stand.
    failed:   how many of those are errors.
    retried:  errors that do not stand, because they were to be tried again.
    dropped:  results of something else than what is asked for now.
    """

    lines: frozenset[int] = frozenset()
    failed: int = 0
    retried: int = 0
    dropped: int = 0


def check_output(path: Path, source: Path) -> None:
    """Raise ``ValueError`` where results cannot go to ``path``."""
    if path.is_dir():
        raise ValueError(f"--output is {path}, a folder; expected a file")
    if path.exists() and source.exists() and path.samefile(source):
        raise ValueError(f"--output is {path}, the input itself; name another file")


class ResultsFile:
    """The results in ``path``, to which more are added.

    requests:      what is asked for now. Results of anything else are removed.
    retry_failed:  errors are no results.
    overwrite:     nothing that is there is.

    Each line is the operating system's when ``write`` returns, whatever happens to this process.
    Raises ``ValueError`` where the file holds something else than results, or results of other
    requests alone (what others need must not be replaced by mistake), and where another process
    writes to it.
    """

    def __init__(
        self,
        path: Path,
        requests: Sequence[BatchRequest],
        *,
        retry_failed: bool = False,
        overwrite: bool = False,
    ) -> None:
        self._wanted = {request.key: request for request in requests}
        self._retry_failed = retry_failed
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open(path)
        try:
            if overwrite:
                self._file.truncate(0)
            self.held = self._survey(path)
            if self.held.retried or self.held.dropped:
                self._replace(path)
            else:
                self._file.truncate(sum(len(line) for line in _whole_lines(path)))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "ResultsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, request: BatchRequest, content: Record) -> None:
        """Add the result of ``request``: ``outputs`` and ``usage``, or ``error``."""
        record = {"id": request.id, "line": request.line, "input_hash": request.input_hash}
        text = json.dumps({**record, **content}, ensure_ascii=False, allow_nan=False)
        # What generates text may leave half a surrogate pair in it, which UTF-8 has no bytes for.
        view = memoryview(text.encode("utf-8", "backslashreplace") + b"\n")
        while len(view):
            view = view[self._file.write(view) or 0 :]

    def _survey(self, path: Path) -> Held:
        lines: set[int] = set()
        failed = retried = dropped = 0
        for record, line in self._judged(path):
            if line is None or line in lines:
                dropped += 1
            elif self._retry_failed and "error" in record:
                retried += 1
            else:
                lines.add(line)
                failed += "error" in record
        if dropped and not lines and not retried:
            raise ValueError(
                f"{path} holds {dropped:,} results, none of them of these prompts with this model "
                "and these options; name another file, or start anew with --overwrite"
            )
        return Held(lines=frozenset(lines), failed=failed, retried=retried, dropped=dropped)

    def _judged(self, path: Path) -> Iterator[tuple[Record, int | None]]:
        """Every result and the line of the input that it is of, None where it is of none."""
        for record in _records(path):
            request = self._wanted.get(key_of(record["id"], record["line"]))
            fits = request is not None and request.input_hash == record["input_hash"]
            yield record, request.line if request is not None and fits else None

    def _replace(self, path: Path) -> None:
        """Put a file in ``path``'s place that holds what stands, and nothing else."""
        from dualflow.checkpoint.atomic import write_atomic

        def write(temporary: Path) -> None:
            left = set(self.held.lines)
            with temporary.open("wb") as file:
                for (record, line), raw in zip(self._judged(path), _whole_lines(path), strict=True):
                    if line in left and not (self._retry_failed and "error" in record):
                        left.discard(line)
                        file.write(raw)

        write_atomic(path, write)
        self._file.close()  # and with it the lock on the file that is no more
        self._file = _open(path)


def _open(path: Path) -> io.FileIO:
    """``path`` to append to, locked until it is closed. Without file locks (Windows) it is not."""
    file = io.FileIO(path, "ab")
    try:
        import fcntl
    except ImportError:
        return file
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ValueError(f"{path} is being written by another process") from error
    return file


def _records(path: Path) -> Iterator[Record]:
    number = 0
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if (
            not isinstance(record, dict)
            or type(record.get("line")) is not int
            or not isinstance(record.get("input_hash"), str)
            or not isinstance(record.setdefault("id", None), str | int | None)
            or not ("outputs" in record or "error" in record)
        ):
            raise _not_ours(path, number)
        yield record
    tail = _tail(path)
    if not tail.startswith(_BEGINNING[: len(tail)]):
        raise _not_ours(path, number + 1)


def _not_ours(path: Path, number: int) -> ValueError:
    return ValueError(
        f"{path} exists, and its line {number} is no result of a batch; name another file, or "
        "start anew with --overwrite"
    )


def _tail(path: Path) -> bytes:
    """How a last line that is not whole begins; empty where there is none."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return line[: len(_BEGINNING)]
    return b""


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line
