"""What holds for every configuration: it survives JSON, TOML and an override by its own values."""

import json
import tomllib
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import given
from hypothesis import strategies as st

from dualflow.config import ConfigError, from_dict, merge, override, to_dict, to_toml

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


@dataclass(frozen=True)
class Inner:
    kind: Literal["a", "b"] = "a"
    rate: float = 0.5
    pair: tuple[int, float] = (1, 2.0)
    note: str | None = None


@dataclass(frozen=True)
class Outer:
    name: str = ""
    count: int = 0
    flag: bool = False
    sizes: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    inner: Inner = field(default_factory=Inner)
    spare: Inner | None = None


inners = st.builds(
    Inner,
    kind=st.sampled_from(["a", "b"]),
    rate=NUMBERS,
    pair=st.tuples(INTEGERS, NUMBERS),
    note=st.none() | TEXT,
)
outers = st.builds(
    Outer,
    name=TEXT,
    count=INTEGERS,
    flag=st.booleans(),
    sizes=st.lists(INTEGERS, max_size=4).map(tuple),
    words=st.lists(TEXT, max_size=4).map(tuple),
    inner=inners,
    spare=st.none() | inners,
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(outers)
def test_json_there_and_back(config: Outer) -> None:
    assert from_dict(Outer, json.loads(json.dumps(to_dict(config)))) == config


@given(outers)
def test_toml_there_and_back(config: Outer) -> None:
    assert from_dict(Outer, tomllib.loads(to_toml(config))) == config


@given(outers, outers)
def test_merging_a_whole_configuration_gives_that_configuration(a: Outer, b: Outer) -> None:
    assert merge(a, to_dict(b)) == b


@given(outers)
def test_overriding_by_its_own_values_changes_nothing(config: Outer) -> None:
    assert override(config, []) == config
    assert (
        override(config, [f"count={config.count}", f"inner.rate={config.inner.rate!r}"]) == config
    )


@given(st.sampled_from(["name", "count", "flag", "sizes", "words", "inner", "spare"]), values)
def test_any_value_is_accepted_or_refused_by_name(key: str, value: Any) -> None:
    try:
        config = from_dict(Outer, {key: value})
    except ConfigError as error:
        assert str(error).startswith(key)
    else:
        assert from_dict(Outer, to_dict(config)) == config


@given(TEXT)
def test_any_assignment_is_applied_or_refused(assignment: str) -> None:
    for text in (assignment, f"name={assignment}", f"inner.note={assignment}"):
        try:
            override(Outer(), [text])
        except ConfigError:
            continue
