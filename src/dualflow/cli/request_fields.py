"""From plain values, as options and JSON lines give them, to the parameters of a request.

``fields`` below are JSON values under the names of ``engine.RequestParams``, with these spellings:
``aux`` is text (``on``, ``off``, ``exact``, ``threshold=0.9``), ``stop`` may be one text, and the
shape of structured output is one of ``json_schema`` (an object, or its text), ``json`` (true),
``regex`` and ``grammar``. A field that is null says nothing.
"""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualflow.engine.request import RequestParams, StructuredOutput

Fields = Mapping[str, Any]

SHAPES = ("json_schema", "json", "regex", "grammar")
"""Fields of structured output; a request has one at most."""


@cache
def field_names() -> tuple[str, ...]:
    """All names that ``build_params`` knows."""
    from dualflow.engine.request import RequestParams

    own = (field.name for field in dataclasses.fields(RequestParams) if field.name != "structured")
    return (*own, *SHAPES)


def check_names(fields: Fields, others: tuple[str, ...] = ()) -> None:
    """Raise ``ValueError`` for a name that is neither a field nor one of ``others``."""
    known = (*others, *field_names())
    for name in fields:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            advice = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ValueError(f"there is no field {name!r}; {advice}")


def merged(defaults: Fields, own: Fields) -> dict[str, Any]:
    """``own`` laid over ``defaults``, without what is null; a shape of its own replaces the
    default's.
    """
    said = {name: value for name, value in own.items() if value is not None}
    has_shape = any(name in said for name in SHAPES)
    kept = {
        name: value
        for name, value in defaults.items()
        if value is not None and not (has_shape and name in SHAPES)
    }
    return {**kept, **said}


def build_params(fields: Fields) -> "RequestParams":
    """The parameters that ``fields`` mean. Raises ``ValueError`` naming the field that is wrong."""
    from dualflow.engine.request import AuxPolicy, RequestParams

    check_names(fields)
    values = {n: v for n, v in fields.items() if v is not None and n not in SHAPES}
    if "aux" in values:
        values["aux"] = AuxPolicy.parse(_text("aux", values["aux"]))
    if "stop" in values:
        stop = values["stop"]
        values["stop"] = (stop,) if isinstance(stop, str) else tuple(_list("stop", stop))
    for name in ("stop_ids", "allowed_ids"):
        if name in values:
            values[name] = _ids(name, values[name])
    if "logit_bias" in values:
        values["logit_bias"] = _biases(values["logit_bias"])
    if not isinstance(values.get("ignore_eos", False), bool):
        raise ValueError(f"ignore_eos is {values['ignore_eos']!r}; expected true or false")
    return RequestParams(**values, structured=_structured(fields))


def _structured(fields: Fields) -> "StructuredOutput | None":
    from dualflow.engine.request import StructuredOutput

    given = [name for name in SHAPES if fields.get(name) not in (None, False)]
    if not given:
        return None
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other; expected one of them")
    name, value = given[0], fields[given[0]]
    if name == "json":
        if value is not True:
            raise ValueError(f"json is {value!r}; expected true or false")
        return StructuredOutput("json")
    if name == "json_schema":
        return StructuredOutput("json_schema", _schema(value))
    return StructuredOutput("regex" if name == "regex" else "grammar", _text(name, value))


def _schema(value: object) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json_schema is not JSON ({error})") from error
    # true and false are schemas too: anything, and nothing.
    if not isinstance(value, dict | bool):
        raise ValueError(f"json_schema is {value!r}; expected a JSON object")
    return json.dumps(value, ensure_ascii=False)


def _biases(value: object) -> dict[int, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias is {value!r}; expected biases by token id")
    return {_id("logit_bias", token): bias for token, bias in value.items()}


def _id(name: str, token: object) -> int:
    """JSON has text for keys."""
    try:
        return token if type(token) is int else int(token)  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} names the token id {token!r}; expected a number") from error


def _ids(name: str, value: object) -> frozenset[int]:
    try:
        return frozenset(_list(name, value))
    except TypeError as error:  # something in it cannot be hashed
        raise ValueError(f"{name} is {value!r}; expected a list of token ids") from error


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is {value!r}; expected a list")
    return list(value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; expected a text")
    return value
