"""Every benchmark runs at a tiny size and yields well-formed rows. No time is asserted."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dualflow.bench import CORE, loss_memory, training
from dualflow.bench.core import InferenceCase, Sizes, full_sizes, measure_core, quick_sizes
from dualflow.bench.inference import measure_decode
from dualflow.bench.loss_memory import (
    MIB,
    LossMemoryCase,
    measure_loss_memory,
    read_in_fresh_process,
)
from dualflow.bench.loss_probe import Probe, Reading, peak_bytes, resident_bytes, run
from dualflow.bench.measurement import COLUMNS, Measurement
from dualflow.bench.pairs import build_pair
from dualflow.bench.timing import Samples, Silent
from dualflow.bench.training import TrainingCase, measure_training
from dualflow.testing import tiny_config
from dualflow.train.config import OptimizerConfig
from tests.unit.bench.rows import MACHINE

TRAINING = TrainingCase(
    name="tiny",
    model=tiny_config(),
    optimizer=OptimizerConfig(),
    batch_size=2,
    sequence_length=8,
    eager_repetitions=1,
    compiled_repetitions=0,
)
INFERENCE = InferenceCase(
    name="tiny",
    # The decode benchmark has a prompt of 128 tokens.
    model=tiny_config(max_position=256),
    new_tokens=2,
    decode_repetitions=2,
    prefill_repetitions=2,
    prompts=(5,),
)
TINY = Sizes(
    training=(TRAINING,),
    loss_memory=(
        LossMemoryCase(rows=1024, vocab_size=4096, hidden_size=8, chunk_counts=(8,)),
    ),
    inference=(INFERENCE,),
)  # fmt: skip
PROBE = Probe(rows=1024, vocab_size=4096, hidden_size=8, rows_per_chunk=None, threads=1)


class Notes(Silent):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def measured() -> list[Measurement]:
    """The whole suite at a tiny size."""
    return list(measure_core(sizes=TINY))


def test_the_whole_suite_at_a_tiny_size(measured: list[Measurement]):
    rows = [measurement.row(MACHINE) for measurement in measured]
    assert list(dict.fromkeys(row["benchmark"] for row in rows)) == list(CORE)
    names = [(row["benchmark"], row["case"], row["precision"]) for row in rows]
    assert len(set(names)) == len(names) == 2 + 1 + 2 + 2
    for row in rows:
        assert tuple(row) == COLUMNS
        assert row["ratio_min"] <= row["ratio_median"] <= row["ratio_max"]
        is_memory = row["benchmark"] == "loss-memory"
        assert (row["counted_ratio"] is None) == is_memory
        assert row["value_difference"] is None or row["value_difference"] < 1e-4
    memory = next(row for row in rows if row["benchmark"] == "loss-memory")
    # Memory is no time: a matrix of all logits is 16 MiB, and naive holds several.
    assert memory["naive_median"] > 2 * memory["chunked_median"] > 0


def test_counted_ratios_are_those_of_the_cost_formulas(measured: list[Measurement]):
    counted = {measurement.benchmark: measurement.counted_ratio for measurement in measured}
    assert counted["training"] == TRAINING.counted_ratio
    assert 1.5 < TRAINING.counted_ratio < 2
    assert counted["decode"] and 1.5 < counted["decode"] < 2
    # Five prompt tokens and an auxiliary row of the last.
    assert counted["prefill"] and 1 < counted["prefill"] < 1.4


def test_an_unknown_benchmark_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match="no benchmark 'decoding'; known: training, loss-memory"):
        measure_core(["decoding"])


@pytest.mark.parametrize("sizes", [full_sizes(), quick_sizes()])
def test_the_sizes_of_the_suite_fit(sizes: Sizes):
    assert sizes.training and sizes.loss_memory and sizes.inference
    for case in sizes.inference:
        assert max(case.prompts) + case.new_tokens <= case.model.max_position
        assert case.model.variant == "standard"
    for case in sizes.training:
        assert 1.8 < case.counted_ratio < 2


def test_the_shared_weights_of_a_pair_are_equal_and_change_format_together():
    pair = build_pair("tiny", tiny_config())
    dual = dict(pair.dual.named_parameters())
    assert all(torch.equal(value, dual[name]) for name, value in pair.standard.named_parameters())
    measure_decode(pair, precision="bf16", prompt_tokens=3, new_tokens=1, repetitions=1)
    assert {p.dtype for p in pair.dual.parameters()} == {torch.bfloat16}


def test_training_goes_on_without_a_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "find_cpp_compiler", lambda: None)
    notes = Notes()
    case = dataclasses.replace(TRAINING, compiled_repetitions=1)
    assert [m.compiled for m in measure_training(case, notes)] == [False, False]
    assert notes.texts == [
        "training: tiny is measured eager only: no working C++ compiler was found"
    ]


def test_training_goes_on_where_compiling_fails(monkeypatch: pytest.MonkeyPatch):
    def broken(*args: Any, **settings: Any) -> Any:
        raise RuntimeError("no\nluck")

    monkeypatch.setattr(training, "find_cpp_compiler", lambda: "g++")
    monkeypatch.setattr(torch, "compile", broken)
    notes = Notes()
    case = dataclasses.replace(TRAINING, eager_repetitions=0, compiled_repetitions=1)
    assert list(measure_training(case, notes)) == []
    assert "torch.compile failed (RuntimeError: no luck)" in notes.texts[0]


def test_compiled_rows_say_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "find_cpp_compiler", lambda: "g++")
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    case = dataclasses.replace(TRAINING, eager_repetitions=0, compiled_repetitions=1)
    assert [m.compiled for m in measure_training(case)] == [True, True]


def test_chunks_change_neither_value_nor_gradient():
    naive = run(PROBE)
    for rows_per_chunk in (32, 256):
        chunked = run(dataclasses.replace(PROBE, rows_per_chunk=rows_per_chunk))
        assert chunked.loss == pytest.approx(naive.loss, rel=1e-5)
        assert chunked.gradient_norm == pytest.approx(naive.gradient_norm, rel=1e-5)


def test_the_chunks_of_training_are_those_of_the_loss():
    case = LossMemoryCase(rows=4096, vocab_size=32768, hidden_size=8, chunk_counts=(2,))
    assert case.training_chunks == 32
    assert TINY.loss_memory[0].training_chunks == 1


def test_as_in_training_has_a_naive_reading_of_its_own(monkeypatch: pytest.MonkeyPatch):
    def read(probe: Probe) -> Reading:
        rows = probe.rows_per_chunk or probe.rows
        return Reading(rows * MIB * (2 if probe.keep_freed else 1), 1.0, 1.0)

    monkeypatch.setattr(loss_memory, "read_in_fresh_process", read)
    case = LossMemoryCase(rows=64, vocab_size=2**18, hidden_size=8, chunk_counts=(2, 4))
    found = {m.case: m.samples for m in measure_loss_memory(case)}
    assert list(found.values()) == [
        Samples((64.0,), (32.0,)),
        Samples((64.0,), (16.0,)),
        Samples((128.0,), (32.0,)),
    ]
    assert [name.endswith("4 chunks, as in training") for name in found] == [False, False, True]


def test_a_process_knows_its_memory():
    assert 0 < resident_bytes() <= peak_bytes()


def test_a_probe_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no luck >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ValueError, match=r"ended with code 3 \(no luck\); is there enough memory"):
        read_in_fresh_process(PROBE)


@pytest.mark.parametrize("count", [1, 3, 2048])
def test_chunks_that_do_not_divide_the_rows_are_refused(count: int):
    with pytest.raises(ValueError, match="expected a power of two, above 1, that divides the rows"):
        LossMemoryCase(rows=1024, vocab_size=8, hidden_size=8, chunk_counts=(count,))
