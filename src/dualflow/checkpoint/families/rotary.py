"""Rotary positions in config.json: ``rope_theta`` beside ``rope_scaling``, or both in
``rope_parameters`` (transformers 5). The old spelling is written: everybody reads it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dualflow import config as configuration
from dualflow.spec import ModelConfig, RopeScaling

_FIELDS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor", "original_max_position": "original_max_position_embeddings",
        "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor", "original_max_position": "original_max_position_embeddings",
        "beta_fast": "beta_fast", "beta_slow": "beta_slow", "truncate": "truncate",
        "attention_factor": "attention_factor",
    },
}  # fmt: skip
"""Of each kind of scaling: fields of ``RopeScaling`` and their keys."""

_OPTIONAL = ("beta_fast", "beta_slow", "truncate", "attention_factor",
             "original_max_position_embeddings")  # fmt: skip
_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
_MSCALE = ("mscale", "mscale_all_dim")


@dataclass(frozen=True)
class Rotary:
    """One rotation for all layers."""

    theta: float = 10000.0
    """The base where none is given."""

    @property
    def keys(self) -> frozenset[str]:
        return frozenset({"rope_theta", "rope_scaling", "rope_parameters"})

    def read(self, table: Mapping[str, Any]) -> dict[str, Any]:
        where, given = _given(table)
        theta, scaling = _one(given, table, where, table.get("rope_theta", self.theta))
        return {"rope_theta": theta, "rope_scaling": scaling}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {"rope_theta": config.rope_theta, "rope_scaling": _written(config.rope_scaling)}


@dataclass(frozen=True)
class LayeredRotary:
    """A rotation for full layers, which may be scaled, and one for sliding layers (Gemma 3)."""

    theta: float = 1_000_000.0
    local_theta: float = 10_000.0

    @property
    def keys(self) -> frozenset[str]:
        return frozenset({"rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq"})

    def read(self, table: Mapping[str, Any]) -> dict[str, Any]:
        where, given = _given(table)
        full, sliding = given, {}
        if where == "rope_parameters":
            _only(given, {"full_attention", "sliding_attention"}, where)
            full, sliding = (
                _table(given.get(key) or {}, f"{where}.{key}")
                for key in ("full_attention", "sliding_attention")
            )
        theta = table.get("rope_theta", self.theta)
        local = table.get("rope_local_base_freq", self.local_theta)
        # transformers looks for yarn's `truncate` outside the layer's own table, and so ignores it.
        if full.get("truncate") is False:
            raise ValueError(f"{where}.truncate = False is not supported in this family")
        theta, scaling = _one(full, table, f"{where}.full_attention", theta)
        local, unscaled = _one(sliding, table, f"{where}.sliding_attention", local)
        if unscaled is not None:
            raise ValueError(
                f"{where}.sliding_attention is scaled ({unscaled['kind']}), which is not supported"
            )
        return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        local = config.local_rope_theta
        return {
            "rope_theta": config.rope_theta,
            "rope_local_base_freq": config.rope_theta if local is None else local,
            "rope_scaling": _written(config.rope_scaling),
        }


def _given(table: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The key that holds the scaling, and what it holds."""
    present = [key for key in ("rope_scaling", "rope_parameters") if table.get(key)]
    if len(present) == 2:
        raise ValueError("rope_scaling and rope_parameters are both given; expected one of them")
    where = present[0] if present else "rope_scaling"
    return where, _table(table.get(where) or {}, where)


def _one(
    given: Mapping[str, Any], table: Mapping[str, Any], where: str, theta: Any
) -> tuple[Any, dict[str, Any] | None]:
    """The base and the scaling of one kind of layer, fields of ``RopeScaling`` or None."""
    kind = given.get("rope_type") or given.get("type") or "default"
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(
            f"{where}.rope_type = {kind!r} is not supported (expected {' or '.join(_FIELDS)})"
        )
    names = _FIELDS[kind]
    _only(given, _ALWAYS | set(names.values()) | set(_MSCALE if kind == "yarn" else ()), where)
    if given.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(
            f"{where}.partial_rotary_factor = {given['partial_rotary_factor']!r} is not supported "
            "(expected 1.0)"
        )
    own = given.get("rope_theta")
    theta = theta if own is None else own
    if kind == "default":
        return theta, None
    values = {ours: given[key] for ours, key in names.items() if given.get(key) is not None}
    if missing := set(names.values()) - given.keys() - set(_OPTIONAL):
        raise ValueError(f"{where} of type {kind!r} lacks {', '.join(sorted(missing))}")
    if "original_max_position" in names:
        values.setdefault("original_max_position", table["max_position_embeddings"])
    if kind == "yarn" and "attention_factor" not in values:
        values |= _from_mscale(given, where)
    try:
        configuration.from_dict(RopeScaling, {"kind": kind, **values})
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error
    return theta, {"kind": kind, **values}


def _from_mscale(given: Mapping[str, Any], where: str) -> dict[str, float]:
    """What DeepSeek's two numbers make of the attention factor; one alone changes nothing."""
    if not all(given.get(key) for key in _MSCALE):
        return {}
    for key in (*_MSCALE, "factor"):
        if type(given[key]) not in (int, float) or not 0 < given[key] < 1 << 32:
            raise ValueError(f"{where}.{key} = {given[key]!r}; expected a number above 0")
    stretch = 0.1 * math.log(max(1.0, given["factor"]))
    first, second = (given[key] * stretch + 1.0 for key in _MSCALE)
    return {"attention_factor": first / second}


def _written(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    keys = {key: getattr(scaling, ours) for ours, key in _FIELDS[scaling.kind].items()}
    return {
        "rope_type": scaling.kind,
        **{key: value for key, value in keys.items() if value is not None},
    }


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} = {value!r}; expected a table")
    return value


def _only(given: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = {key: value for key, value in given.items() if key not in known and value is not None}
    if unknown:
        listed = ", ".join(f"{where}.{key} = {str(value)[:40]}" for key, value in unknown.items())
        raise ValueError(f"{listed} is not supported")
