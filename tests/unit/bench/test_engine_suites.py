"""The suites about the engine, at a tiny size, yield well-formed rows. No time is asserted."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dualflow.bench import latency, serve_trace, throughput
from dualflow.bench.engines import SIDES, ModelPair, Settings, params_of, run_together
from dualflow.bench.figures import COLUMNS, Figure
from dualflow.bench.latency import LatencySizes, measure_latency
from dualflow.bench.results import read_results, results_markdown, write_results
from dualflow.bench.serve_trace import Outcome, TraceResult, measure_serve_trace, replay
from dualflow.bench.throughput import ThroughputSizes, measure_throughput
from dualflow.bench.timing import Silent
from dualflow.bench.trace import TraceRequest, TraceSizes
from dualflow.engine.outputs import FinishEvent, TokenEvent
from dualflow.spec import ReadoutConfig
from tests.unit.bench.rows import MACHINE
from tests.unit.cli.models import save_tiny

TINY = Settings(preset="demo", layers=1, backend="torch")
TRAFFIC = TraceSizes(
    requests=12, rate=400.0, prompt_tokens=8, new_tokens=4, longest=48, segments=2,
    abort_share=0.25,
)  # fmt: skip


class Notes(Silent):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def figures() -> list[Figure]:
    sizes = LatencySizes(prompts=(4, 9), new_tokens=3, repetitions=2)
    return list(measure_latency(TINY, sizes))


@pytest.fixture(scope="module")
def traffic() -> TraceResult:
    return measure_serve_trace(TINY, TRAFFIC)


def test_latency_has_every_figure_of_every_side(figures: list[Figure]):
    found = [(figure.name, figure.side) for figure in figures]
    names = ["ttft_4", "decode_b1_4", "ttft_9", "decode_b1_9"]
    assert found == [(name, side) for name in names for side in SIDES]
    for figure in figures:
        row = figure.row("latency", MACHINE)
        assert tuple(row) == COLUMNS
        assert all(isinstance(v, str | int | float | None) for v in row.values())
        assert row["min"] <= row["median"] <= row["max"] and row["n"] == 2
        assert (row["model"], row["backend"]) == ("demo, 1 layers, random values", "torch")
        assert (row["weights"], row["kv_dtype"]) == ("float32", "float32")
        if figure.side.variant == "standard":
            assert row["ratio_median"] == 1 and row["aux_share"] is None


def test_the_share_of_auxiliary_positions_is_that_of_the_policy(figures: list[Figure]):
    shares = {figure.side: figure.aux_share for figure in figures}
    for side, share in shares.items():
        if side.aux is not None and share is not None:
            assert {"on": share == 1, "off": share == 0, "exact": 0 <= share <= 1}[side.aux]


def test_throughput_has_prefill_and_every_batch():
    sizes = ThroughputSizes(
        batches=(1, 3), prompt_tokens=4, new_tokens=6, prefill=12, repetitions=1
    )
    rows = [figure.row("throughput", MACHINE) for figure in measure_throughput(TINY, sizes)]
    names = list(dict.fromkeys(row["figure"] for row in rows))
    assert names == ["prefill_12", "decode_b1", "decode_b3"]
    assert len(rows) == 3 * len(SIDES)
    assert all(row["median"] > 0 and row["unit"] == "tokens/s" for row in rows)
    assert {row["batch"] for row in rows if row["figure"] == "decode_b3"} == {3}


def test_traffic_is_lost_nowhere_and_pages_come_back(traffic: TraceResult):
    rows = traffic.rows(MACHINE)
    assert [row["aux"] for row in rows] == ["off", "on", "exact"]
    for row in rows:
        assert tuple(row) == serve_trace.COLUMNS
        assert (row["requests"], row["lost"], row["failed"], row["pages_leaked"]) == (12, 0, 0, 0)
        assert (row["finished"], row["aborted"]) == (9, 3)
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p90_ms"] <= row["ttft_p99_ms"]
        assert row["tbt_p50_ms"] > 0 and row["rate"] == 400
    off, on, exact = (row["aux_share"] for row in rows)
    assert off == 0 and on == 1 and 0 < exact < 1
    assert all(outcome.sound for outcome in traffic.outcomes)


def test_without_a_rate_the_engine_is_tried_first():
    notes = Notes()
    sizes = dataclasses.replace(TRAFFIC, requests=3, rate=None, segments=1)
    result = measure_serve_trace(TINY, sizes, notes)
    assert result.rate > 0
    assert "70% of what the engine manages" in notes.texts[0]


def test_what_is_lost_or_leaked_is_counted(monkeypatch: pytest.MonkeyPatch):
    """An engine that forgets every third end and keeps its pages."""
    pair = ModelPair(TINY)
    engine = pair.engine("dual", tokens=32, running=4, prefix_cache=False)
    step, stats, ends = engine.step, engine.stats, 0

    def forgetful() -> list[Any]:
        nonlocal ends
        kept = []
        for event in step():
            ends += isinstance(event, FinishEvent)
            if not isinstance(event, FinishEvent) or ends % 3:
                kept.append(event)
        return kept

    monkeypatch.setattr(engine, "step", forgetful)
    monkeypatch.setattr(engine, "stats", lambda: dataclasses.replace(stats(), pages_used=2))
    requests = [
        TraceRequest(number=n, arrival=0.0, prompt_tokens=4, new_tokens=3, abort_after=None)
        for n in range(6)
    ]
    outcome = Outcome("on")
    replay(engine, requests, pair.prompts(*[4] * 6), outcome)
    assert (outcome.lost, outcome.finished, outcome.pages_leaked) == (2, 4, 2)
    assert not outcome.sound


def test_requests_wait_until_they_are_due():
    pair = ModelPair(TINY)
    engine = pair.engine("dual", tokens=32, running=4, prefix_cache=False)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert not engine.has_work
        import time

        time.sleep(seconds)

    requests = [
        TraceRequest(number=0, arrival=0.05, prompt_tokens=4, new_tokens=1, abort_after=None)
    ]
    outcome = Outcome("on")
    replay(engine, requests, pair.prompts(4), outcome, sleep=sleep)
    assert slept and slept[0] <= 0.05
    assert outcome.seconds >= 0.05 and outcome.first_token[0] >= 0


def test_both_models_are_made_of_a_loaded_one(tmp_path: Path):
    pair = ModelPair(Settings(model=Path(save_tiny(tmp_path / "dual")), backend="torch"))
    assert (pair.standard.config.variant, pair.dual.config.variant) == ("standard", "dual")
    values = dict(pair.dual.named_parameters())
    assert all(torch.equal(t, values[name]) for name, t in pair.standard.named_parameters())
    plain = save_tiny(tmp_path / "plain", variant="standard")
    pair = ModelPair(Settings(model=Path(plain), backend="torch", weights="float64"))
    values = dict(pair.dual.named_parameters())
    assert torch.equal(
        values["model.aux.0.embed_tokens.weight"], values["model.embed_tokens.weight"]
    )
    assert values["lm_head.weight"].dtype == torch.float64
    # Real text: ids of the bytes of this package's source.
    (prompt,) = pair.prompts(20)
    assert bytes(prompt).decode().startswith('"""')


def test_the_retrofit_of_a_standard_model_generates_the_same(tmp_path: Path):
    plain = save_tiny(tmp_path / "plain", variant="standard")
    pair = ModelPair(Settings(model=Path(plain), backend="torch", weights="float64"))
    texts: list[list[int]] = []
    for side in SIDES[:2]:
        engine = pair.engine(side.variant, tokens=32, running=1, prefix_cache=False)
        engine.add(pair.prompts(8)[0], params_of(side, 6))
        found: list[int] = []
        while engine.has_work:
            events = engine.step()
            found += [e.choice.token_id for e in events if isinstance(e, TokenEvent)]
        texts.append(found)
    assert texts[0] == texts[1]


def test_models_that_cannot_be_compared_are_refused(tmp_path: Path):
    folder = save_tiny(tmp_path / "phd", variant="phd2")
    with pytest.raises(ValueError, match="holds a phd2 model; expected a standard or a dual one"):
        ModelPair(Settings(model=Path(folder)))
    short = ModelPair(Settings(model=Path(save_tiny(tmp_path / "short"))))
    with pytest.raises(ValueError, match="has 128 positions, and this benchmark takes 1,000"):
        short.require_positions(1000)


def test_a_benchmark_whose_request_fails_says_so():
    pair = ModelPair(TINY)
    engine = pair.engine("dual", tokens=8, running=1, prefix_cache=False)
    with pytest.raises((RuntimeError, ValueError)):
        run_together(engine, pair.prompts(8), params_of(SIDES[1], 100))


def test_rows_are_written_and_read_with_their_page(
    tmp_path: Path, figures: list[Figure], traffic: TraceResult
):
    rows = [figure.row("latency", MACHINE) for figure in figures]
    path = tmp_path / "latency" / "results.json"
    path.parent.mkdir()
    write_results(path, rows, latency.SUITE)
    other = [{**row, "weights": "int8"} for row in rows]
    write_results(path, other, latency.SUITE)  # beside the first ones
    write_results(path, other, latency.SUITE)  # in place of the second ones
    assert read_results(path, latency.SUITE) == rows + other
    page = (path.parent / "README.md").read_text("utf-8")
    assert page.count("b1\\_9 (tokens/s)") == 2 * len(SIDES)
    assert "`dualflow bench latency`" in page and "int8 weights" in page
    text = results_markdown(traffic.rows(MACHINE), "results.json", serve_trace.SUITE)
    assert "12 requests, 400 per second" in text
    with pytest.raises(ValueError, match="not a list of benchmark rows"):
        read_results(path)  # of the suite core
    assert json.loads(path.read_text("utf-8"))[0]["suite"] == "latency"


def test_lines_for_the_log(figures: list[Figure], traffic: TraceResult):
    line = latency.SUITE.summary(figures[1].row("latency", MACHINE))
    assert line.startswith("ttft_4, dual, aux on, greedy: ") and "× of standard" in line
    line = serve_trace.SUITE.summary(traffic.rows(MACHINE)[0])
    assert line.startswith("serve-trace, aux off: first token ") and "0 lost" in line


@pytest.mark.parametrize("suite", [latency.SUITE, throughput.SUITE, serve_trace.SUITE])
def test_quick_and_full_sizes_fit_the_models_they_are_for(suite: Any):
    from dualflow.spec import PRESETS

    longest = {
        "latency": [max(s.prompts) + s.new_tokens for s in (LatencySizes(), latency.QUICK)],
        "throughput": [max(s.prefill, s.prompt_tokens + s.new_tokens) + 1
                       for s in (ThroughputSizes(), throughput.QUICK)],
        "serve-trace": [s.longest for s in (TraceSizes(), serve_trace.QUICK)],
    }[suite.name]  # fmt: skip
    assert longest[0] <= PRESETS["smollm2-135m"].max_position
    assert longest[1] <= PRESETS["demo"].max_position


def test_a_mixture_is_what_is_measured():
    assert ModelPair(TINY).dual.config.readout == ReadoutConfig(primary_loss_weight=0.3)
