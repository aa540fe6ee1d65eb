"""Strict frozen dataclasses to and from TOML (for people) and JSON (for machines).

A configuration is a tree of frozen dataclasses whose leaves are str, int, float, bool, None or
tuples of them. Nothing is coerced silently: a wrong type, an unknown key or a value outside a
``Literal`` raises ``ConfigError`` that names the full dotted path, what was found and what was
expected.
"""

import dataclasses
import datetime
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast

Config = TypeVar("Config")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is meant for the person who wrote it."""


def from_dict(cls: type[Config], data: Mapping[str, Any], path: str = "") -> Config:
    """Build ``cls`` from nested mappings. Raises ``ConfigError`` on anything unexpected."""
    return _with_defaults(cls, data, path, base=None)


def to_dict(config: Any) -> dict[str, Any]:
    """The whole tree as plain dicts and lists, ready for JSON; every default written out."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def merge(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy of ``config`` with the nested ``changes`` laid over it; what they do not name
    stays.
    """
    return _with_defaults(type(config), changes, "", base=config)


def override(config: Config, assignments: Iterable[str]) -> Config:
    """Apply ``--set`` assignments such as ``optimizer.lr=3e-4``; of two for one key the later
    counts.

    The value is read as TOML (``true``, ``3``, ``[1, 2]``, ``"text"``); what is not valid TOML is
    taken as text, and ``none`` as None. All are laid over together, so fields that must fit each
    other can be changed in any order.
    """
    return merge(config, assigned(assignments))


def assigned(assignments: Iterable[str]) -> dict[str, Any]:
    """The nested changes that ``--set`` assignments ask for, as ``override`` reads them."""
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        *parents, leaf = key.strip().split(".")
        if not equals or not all((*parents, leaf)):
            raise ConfigError(
                f"--set {assignment!r}: expected KEY=VALUE, such as optimizer.lr=3e-4"
            )
        inner = changes
        for parent in parents:
            if not isinstance(inner.get(parent), dict):
                inner[parent] = {}
            inner = inner[parent]
        inner[leaf] = _parse_value(text.strip())
    return changes


def overlay(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested ``changes`` laid over a nested ``table``; neither is changed."""
    merged = dict(table)
    for key, value in changes.items():
        below = merged.get(key)
        nested = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = overlay(below, value) if nested else value  # type: ignore[arg-type]
    return merged


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file into a dict. Raises ``ConfigError`` where it is missing or malformed."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # a number may have too many digits to be read
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{path} is not valid TOML: {reason}") from error


def to_toml(config: Any) -> str:
    """The configuration as TOML, tables last; None values are left out (absence means the
    default).
    """
    return "\n".join(_toml_lines(to_dict(config), "")).strip() + "\n"


def _toml_lines(table: Mapping[str, Any], prefix: str) -> list[str]:
    scalars = {k: v for k, v in table.items() if not isinstance(v, dict) and v is not None}
    lines = [f"{key} = {_toml_value(value)}" for key, value in scalars.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            inner = cast(dict[str, Any], value)
            lines += ["", f"[{prefix}{key}]", *_toml_lines(inner, f"{prefix}{key}.")]
    return lines


def _toml_value(value: Any) -> str:
    """JSON is TOML for text, numbers, booleans and lists, but for one control character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _parse_value(text: str) -> Any:
    if text.lower() == "none":
        return None
    if "\n" in text:
        return text
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    # Not TOML, more digits than Python reads, or brackets beyond its recursion.
    except (ValueError, RecursionError):
        return text
    # No field is a date: 2026-01-31 is the name of a run.
    return text if isinstance(value, (datetime.date, datetime.time)) else value


def _with_defaults(cls: type[Config], data: Any, path: str, base: Config | None) -> Config:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path or cls.__name__}: expected a table, found {_describe(data)}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    table = cast(Mapping[str, Any], data)
    for key in table:
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            advice = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(fields)}"
            raise ConfigError(f"{_join(path, key)}: unknown key; {advice}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in table:
            current = getattr(base, name) if base is not None else None
            values[name] = _convert(hints[name], table[name], _join(path, name), current)
        elif base is not None:
            values[name] = getattr(base, name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_join(path, name)}: missing, and it has no default")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error


def _convert(hint: Any, value: Any, path: str, current: Any) -> Any:
    """``value`` as ``hint`` wants it; ``current`` is the dataclass a partial table is laid over."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        options = [arg for arg in args if arg is not type(None)]
        if len(options) == 1:
            return _convert(options[0], value, path, current)
        for option in options:
            try:
                return _convert(option, value, path, current)
            except ConfigError:
                continue
    elif origin is Literal:
        if any(value == arg and type(value) is type(arg) for arg in args):
            return value
        expected = ", ".join(map(repr, args))
        raise ConfigError(f"{path}: expected one of {expected}, found {value!r}")
    elif origin is tuple:
        if isinstance(value, (list, tuple)):
            return _convert_tuple(args, cast(Sequence[Any], value), path)
    elif dataclasses.is_dataclass(hint):
        base = current if isinstance(current, hint) else None  # type: ignore[arg-type]
        return _with_defaults(hint, value, path, base)  # type: ignore[arg-type]
    elif hint is float and type(value) in (int, float):
        return _finite(value, path)
    elif hint is int and type(value) is int and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{path}: expected an integer of at most 64 bits, found {value}")
    elif hint is Any or type(value) is hint:
        return value
    raise ConfigError(f"{path}: expected {_name(hint)}, found {_describe(value)}")


def _convert_tuple(items: tuple[Any, ...], value: Sequence[Any], path: str) -> tuple[Any, ...]:
    """``value`` as ``tuple[item, ...]`` or as ``tuple[first, second]``, whose length counts."""
    if items[-1] is Ellipsis:
        items = items[:1] * len(value)
    elif len(items) != len(value):
        raise ConfigError(f"{path}: expected {len(items)} values, found {len(value)}")
    pairs = zip(items, value, strict=True)
    return tuple(_convert(item, v, f"{path}[{i}]", None) for i, (item, v) in enumerate(pairs))


def _finite(value: int | float, path: str) -> float:
    """``value`` as a float; NaN and infinity have no place in JSON and mean a mistake."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{path}: expected a finite number, found {str(value)[:24]}")
    return number


def _name(hint: Any) -> str:
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    if typing.get_origin(hint) is tuple:
        args = typing.get_args(hint)
        if args[-1] is Ellipsis:
            return f"a list ({_name(args[0])} each)"
        return f"a list of {len(args)}: {', '.join(map(_name, args))}"
    return names.get(hint) or str(hint)


def _describe(value: Any) -> str:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{shown} ({type(value).__name__})"


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
