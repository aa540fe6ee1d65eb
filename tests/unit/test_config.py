"""Configurations: strict reading, overrides, and what each error tells."""

import dataclasses
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from dualflow.config import ConfigError, from_dict, merge, override, read_toml, to_dict, to_toml


@dataclass(frozen=True)
class Schedule:
    kind: Literal["wsd", "cosine"] = "wsd"
    warmup_steps: int = 10
    betas: tuple[float, float] = (0.9, 0.95)

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is {self.warmup_steps}; expected 0 or more")


@dataclass(frozen=True)
class Run:
    name: str
    steps: int = 100
    lr: float = 1e-3
    compile: bool = False
    layers: tuple[int, ...] = ()
    eval_batches: int | None = None
    schedule: Schedule = Schedule()
    fallback: Schedule | None = None


@dataclass(frozen=True)
class Heads:
    heads: int = 8
    kv_heads: int = 2

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError("heads is not a multiple of kv_heads")


def test_defaults_fill_what_is_not_named() -> None:
    assert from_dict(Run, {"name": "a", "schedule": {"kind": "cosine"}}) == Run(
        "a", schedule=Schedule(kind="cosine")
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "name: missing, and it has no default"),
        ({"name": "a", "stesp": 3}, "stesp: unknown key; did you mean 'steps'?"),
        ({"name": "a", "zzz": 3}, "zzz: unknown key; known keys: name, steps"),
        ({"name": "a", "schedule": {"warmup": 1}}, "schedule.warmup: unknown key; did you mean"),
        ({"name": 3}, r"name: expected text, found 3 \(int\)"),
        ({"name": "a", "steps": 3.0}, r"steps: expected an integer, found 3.0 \(float\)"),
        ({"name": "a", "steps": True}, "steps: expected an integer, found True"),
        ({"name": "a", "steps": "3"}, "steps: expected an integer, found '3'"),
        ({"name": "a", "steps": None}, "steps: expected an integer, found None"),
        ({"name": "a", "lr": True}, "lr: expected a number, found True"),
        ({"name": "a", "lr": float("nan")}, "lr: expected a finite number, found nan"),
        ({"name": "a", "lr": float("inf")}, "lr: expected a finite number, found inf"),
        ({"name": "a", "lr": 10**400}, "lr: expected a finite number, found 1000"),
        ({"name": "a", "steps": 2**63}, "steps: expected an integer of at most 64 bits, found 922"),
        ({"name": "a", "steps": "9" * 999}, r"steps: expected an integer, found '9{76}\.\.\. \("),
        ({"name": "a", "compile": 1}, "compile: expected true or false, found 1"),
        ({"name": "a", "layers": 3}, r"layers: expected a list \(an integer each\), found 3"),
        ({"name": "a", "layers": [1, "x"]}, r"layers\[1\]: expected an integer, found 'x'"),
        ({"name": "a", "schedule": 3}, "schedule: expected a table, found 3"),
        (
            {"name": "a", "schedule": {"kind": "linear"}},
            "schedule.kind: expected one of 'wsd', 'cosine', found 'linear'",
        ),
        ({"name": "a", "schedule": {"betas": [0.9]}}, "schedule.betas: expected 2 values, found 1"),
        (
            {"name": "a", "schedule": {"betas": 0.9}},
            "schedule.betas: expected a list of 2: a number, a number, found 0.9",
        ),
        (
            {"name": "a", "schedule": {"warmup_steps": -1}},
            "^schedule: warmup_steps is -1; expected 0 or more$",
        ),
    ],
)
def test_errors_name_the_path_the_value_and_what_was_expected(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(Run, data)


def test_whole_numbers_are_numbers() -> None:
    run = from_dict(Run, {"name": "a", "lr": 1})
    assert run.lr == 1.0
    assert type(run.lr) is float


def test_merge_keeps_what_is_not_named() -> None:
    run = Run("a", schedule=Schedule(kind="cosine", warmup_steps=7))
    assert merge(run, {"schedule": {"warmup_steps": 3}}) == Run(
        "a", schedule=Schedule(kind="cosine", warmup_steps=3)
    )


def test_merge_starts_an_absent_table_from_its_defaults() -> None:
    merged = merge(Run("a"), {"fallback": {"warmup_steps": 3}})
    assert merged.fallback == Schedule(warmup_steps=3)
    assert merge(merged, {"fallback": None}).fallback is None


@pytest.mark.parametrize(
    ("assignment", "field", "expected"),
    [
        ("steps=7", "steps", 7),
        ("steps = 7", "steps", 7),
        ("lr=3e-4", "lr", 3e-4),
        ("lr=1", "lr", 1.0),
        ("compile=true", "compile", True),
        ("layers=[1, 2]", "layers", (1, 2)),
        ("eval_batches=none", "eval_batches", None),
        ("eval_batches=5", "eval_batches", 5),
        ("name=plain words", "name", "plain words"),
        ("name=a=b", "name", "a=b"),
        ('name="7"', "name", "7"),
        ("name=2026-01-31", "name", "2026-01-31"),
        ("name=12:30:00", "name", "12:30:00"),
        ("name=", "name", ""),
        ("name=first\nsteps = 2", "name", "first\nsteps = 2"),
    ],
)
def test_override_reads_the_value_as_toml_or_text(
    assignment: str, field: str, expected: object
) -> None:
    assert getattr(override(Run("a"), [assignment]), field) == expected


@pytest.mark.parametrize("assignment", ["steps", "=3", ".steps=3", "schedule.=3", "a..b=3", ""])
def test_override_refuses_what_is_not_key_value(assignment: str) -> None:
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        override(Run("a"), [assignment])


def test_the_later_override_counts() -> None:
    assert override(Run("a"), ["steps=1", "steps=2"]).steps == 2
    assert override(Run("a"), ["fallback=none", "fallback.warmup_steps=2"]).fallback == Schedule(
        warmup_steps=2
    )
    assert override(Run("a"), ["fallback.warmup_steps=2", "fallback=none"]).fallback is None


def test_fields_that_must_fit_each_other_change_together() -> None:
    assert override(Heads(), ["heads=9", "kv_heads=3"]) == Heads(9, 3)
    assert override(Heads(), ["kv_heads=3", "heads=9"]) == Heads(9, 3)
    with pytest.raises(ConfigError, match="not a multiple"):
        override(Heads(), ["heads=9"])


def test_to_dict_is_json_and_back() -> None:
    run = Run("a", layers=(1, 2), fallback=Schedule())
    assert from_dict(Run, json.loads(json.dumps(to_dict(run)))) == run


def test_to_toml_is_toml_and_back() -> None:
    run = Run('a "quoted"\\ \n\x7f name', lr=1e-8, layers=(1, 2), fallback=Schedule(warmup_steps=2))
    assert from_dict(Run, tomllib.loads(to_toml(run))) == run


def test_read_toml(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b'\xef\xbb\xbfname = "with a byte order mark"\n')
    assert read_toml(path) == {"name": "with a byte order mark"}


@pytest.mark.parametrize(
    "content",
    [
        b"name = ",
        b"name = 1\nname = 2",
        b"\xff\xfe",
        b"name = " + b"[" * 100_000,
        b"name = " + b"9" * 10_000,
    ],
)
def test_read_toml_names_the_malformed_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML"):
        read_toml(path)


def test_read_toml_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        read_toml(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_toml(tmp_path)


def test_configurations_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Run("a").steps = 3  # type: ignore[misc]


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 10_000])
def test_a_value_that_python_cannot_read_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigError, match="steps: expected an integer, found"):
        override(Run("a"), [f"steps={value}"])
