"""Read finished run folders strictly: what a comparison needs and nothing else. No torch here.

A run folder holds ``config.json`` (the resolved configuration), ``metrics.jsonl`` (one object a
line; those of kind ``validation`` make the curve) and ``result.json`` (written when it has ended).
"""

import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The figures a run ends with; further keys of ``result.json`` are left alone.

    val_loss, val_loss_p, val_loss_q: mean of −log r, −log p, −log q in nats per token, None where
    the variant has no such distribution.
    """

    name: str
    variant: str
    seed: int
    tokens: int
    val_loss: float
    val_loss_p: float | None
    val_loss_q: float | None
    params: int
    prefill_flops_per_token: float
    decode_flops_per_token: float
    train_flops_per_token: float
    kv_bytes_per_token: float


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One validation: losses in nats per token after ``tokens`` training tokens."""

    tokens: int
    loss: float
    loss_p: float | None
    loss_q: float | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run.

    curve: validations in order of tokens; the last point is always the final result.
    """

    folder: Path
    config: Mapping[str, Any]
    result: RunResult
    curve: tuple[CurvePoint, ...]


class RunError(ValueError):
    """A run folder that cannot be read; the message names the file and says what is wrong."""


def read_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Read every run that ``paths`` name: run folders, or folders that hold run folders.

    A folder named twice is read once; the folder of an earlier comparison is passed over, so that
    ``runs/*`` can be given. Raises ``RunError`` where anything is missing or malformed.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        for folder in _run_folders(Path(path)):
            folders.setdefault(folder.resolve(), folder)
    if not folders:
        raise RunError("no run to read; give at least one run folder, such as runs/NAME")
    return [read_run(folder) for folder in folders.values()]


def read_run(folder: str | Path) -> Run:
    """Read one finished run. Raises ``RunError``, one line that names the file and the fault."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"{folder}: no such run folder")
    config = _read_object(folder / "config.json")
    if not (folder / "result.json").exists():
        raise RunError(
            f"{folder}: result.json is missing, so this run has not ended; "
            "continue it to its end or leave it out"
        )
    where = str(folder / "result.json")
    result = _record(RunResult, _read_object(folder / "result.json"), where)
    _require_positive(result, where)
    return Run(
        folder=folder, config=config, result=result, curve=_curve(folder / "metrics.jsonl", result)
    )


def _run_folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise RunError(f"{path}: no such run folder")
    if _is_run(path):
        return [path]
    inside = [folder for folder in sorted(path.iterdir()) if _is_run(folder)]
    if not inside and not (path / "compare.json").is_file():
        raise RunError(
            f"{path}: neither a run folder (it has no config.json and no result.json) "
            "nor a folder of run folders"
        )
    return inside


def _is_run(path: Path) -> bool:
    return (path / "config.json").is_file() or (path / "result.json").is_file()


def _read_object(path: Path) -> dict[str, Any]:
    return parse_object(_read_text(path), str(path))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RunError(f"{path}: is not UTF-8 text: {error.reason}") from error


def parse_object(text: str, where: str) -> dict[str, Any]:
    """One JSON object. Raises ``RunError`` that begins with ``where``."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{where}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RunError(f"{where}: holds a JSON {type(value).__name__}; expected an object")
    return typing.cast(dict[str, Any], value)


def _curve(path: Path, result: RunResult) -> tuple[CurvePoint, ...]:
    points: list[CurvePoint] = []
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        entry = parse_object(line, where)
        if entry.get("kind") != "validation":
            continue
        point = _record(CurvePoint, entry, where)
        if points and point.tokens <= points[-1].tokens:
            raise RunError(
                f"{where}: a validation at {point.tokens} tokens follows one at "
                f"{points[-1].tokens}; expected more tokens each time"
            )
        if point.tokens > result.tokens:
            raise RunError(
                f"{where}: a validation at {point.tokens} tokens, but result.json says that the "
                f"run ended at {result.tokens}"
            )
        points.append(point)
    final = CurvePoint(
        tokens=result.tokens,
        loss=result.val_loss,
        loss_p=result.val_loss_p,
        loss_q=result.val_loss_q,
    )
    # The last validation may have seen fewer batches than the final one: the result stands.
    return (*(point for point in points if point.tokens < result.tokens), final)


def _record(cls: type[Record], data: Mapping[str, Any], where: str) -> Record:
    """``data`` as the dataclass ``cls``, each value of the type its field says."""
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in fields(cls):  # type: ignore[arg-type]
        if field.name not in data:
            raise RunError(f"{where}: {field.name} is missing")
        values[field.name] = check_value(hints[field.name], data[field.name], where, field.name)
    return cls(**values)


def check_value(hint: Any, value: Any, where: str, name: str) -> Any:
    """``value`` if it is a ``hint`` (str, int, finite float, or None), else ``RunError``."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    if isinstance(value, bool):
        pass
    elif float in options and isinstance(value, int | float):
        if math.isfinite(value):
            return float(value)
        raise RunError(f"{where}: {name} is {value}; expected a finite number (it diverged?)")
    elif type(value) is int and int in options and not -(2**63) <= value < 2**63:
        raise RunError(f"{where}: {name} is {value}; expected a whole number of at most 64 bits")
    elif isinstance(value, str) and str in options and not value.isprintable():
        raise RunError(f"{where}: {name} is {value!r}; expected printable text on one line")
    elif type(value) in options:
        return value
    words = {str: "text", int: "a whole number", float: "a number", type(None): "null"}
    expected = " or ".join(words[option] for option in options)
    raise RunError(f"{where}: {name} is {value!r}; expected {expected}")


def _require_positive(result: RunResult, where: str) -> None:
    for name in ("tokens", "params", "train_flops_per_token"):
        if getattr(result, name) <= 0:
            raise RunError(f"{where}: {name} is {getattr(result, name)}; expected more than 0")
