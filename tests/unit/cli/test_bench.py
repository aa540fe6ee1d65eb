"""``dualflow bench`` as a person calls it, with measurements made up."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from dualflow.bench import CORE, core, latency, serve_trace, throughput
from dualflow.bench.core import Sizes
from dualflow.bench.engines import Settings
from dualflow.bench.measurement import Machine, Measurement, Row
from dualflow.bench.timing import Watcher
from dualflow.bench.trace import TraceSizes
from dualflow.cli import bench
from dualflow.cli.main import Parser
from tests.unit.bench.rows import memory_measurement, time_measurement


def call(*arguments: str) -> int:
    parser = Parser(prog="dualflow bench")
    bench.configure(parser)
    return bench.run(parser.parse_args(arguments))


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """The benchmarks each call asked for; nothing is measured, and relative paths are in a
    temporary folder.
    """
    calls: list[tuple[str, ...]] = []

    def measure(names: Collection[str], *, sizes: Sizes, watcher: Watcher) -> Iterator[Measurement]:
        calls.append(tuple(names))
        for name in names:
            watcher.at(name, 0, 1)
            yield memory_measurement() if name == "loss-memory" else time_measurement(name)

    monkeypatch.setattr(core, "measure_core", measure)
    monkeypatch.chdir(tmp_path)
    return calls


def test_tables_rows_and_page(asked: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]):
    assert call() == 0
    assert asked == [tuple(CORE)]
    printed = capsys.readouterr()
    assert "2.00 (1.50 … 3.00)" in printed.out and "torch" in printed.out
    assert "wrote benchmarks/core/results.json, benchmarks/core/README.md" in printed.err
    rows = json.loads(Path("benchmarks/core/results.json").read_text("utf-8"))
    assert [row["benchmark"] for row in rows] == list(CORE)
    assert "2.00 (1.50 … 3.00)" in Path("benchmarks/core/README.md").read_text("utf-8")


def test_only_some(asked: list[tuple[str, ...]]):
    assert call("core", "--only", "decode", "--only", "prefill", "--out", "x/y.json") == 0
    assert asked == [("decode", "prefill")]
    assert len(json.loads(Path("x/y.json").read_text("utf-8"))) == 2


def test_a_quick_run_replaces_no_results(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert call("--quick") == 0
    assert "nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert call("--quick", "--out", "q/quick.json") == 0
    assert Path("q/quick.json").exists()


def test_the_target_is_checked_before_measuring(asked: list[tuple[str, ...]], tmp_path: Path):
    Path("README.md").write_text("# Mine\n")
    with pytest.raises(ValueError, match=r"README\.md would be replaced"):
        call("--out", "results.json")
    assert asked == []


def test_nothing_is_written_when_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def measure(*args: object, **settings: object) -> Iterator[Measurement]:
        yield time_measurement()
        raise KeyboardInterrupt

    monkeypatch.setattr(core, "measure_core", measure)
    with pytest.raises(KeyboardInterrupt):
        call("--out", "results.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "decoding"), "decoding"),
        (("latencies",), "latencies"),
        (("--threads", "many"), "many"),
        (("--quik",), "did you mean '--quick'?"),
    ],
)
def test_mistyped_arguments(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stop:
        call(*arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_threads_below_one_are_refused():
    with pytest.raises(ValueError, match="--threads is 0; expected at least 1"):
        call("--threads", "0")


def made_up_rows(lost: int = 0) -> list[Row]:
    numbers = dict.fromkeys(serve_trace.COLUMNS, 1.0)
    words = {"suite": "serve-trace", "model": "m", "variant": "dual", "aux": "on"}
    counts = {"requests": 5, "lost": lost, "failed": 0, "pages_leaked": 0, "threads": 1}
    machine = {"commit": "c", "machine": "cpu", "torch": "9", "started": "now"}
    formats = {"sampling": "sampled", "weights": "w", "kv_dtype": "k", "backend": "torch"}
    return [{**numbers, **words, **counts, **machine, **formats}]


@pytest.mark.parametrize(("lost", "code"), [(0, 0), (1, 1)])
def test_traffic_that_loses_a_request_is_a_bad_answer(
    lost: int, code: int, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[Settings, TraceSizes]] = []

    class Result:
        def rows(self, machine: Machine) -> list[Row]:
            return made_up_rows(lost)

    def measure(settings: Settings, sizes: TraceSizes, watcher: Watcher) -> Result:
        asked.append((settings, sizes))
        return Result()

    monkeypatch.setattr(serve_trace, "measure_serve_trace", measure)
    options = "--requests 5 --rate 2 --seed 3 --weights int8 --backend torch --model here"
    assert call("serve-trace", *options.split()) == code
    ((settings, sizes),) = asked
    assert (sizes.requests, sizes.rate, sizes.seed) == (5, 2.0, 3)
    assert settings == Settings(model=Path("here"), weights="int8", backend="torch")
    assert Path("benchmarks/serve-trace/results.json").exists()


@pytest.mark.parametrize("suite", ["latency", "throughput", "serve-trace"])
def test_a_quick_run_of_the_engine_takes_a_tiny_model(
    suite: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked: list[Settings] = []

    class Nothing:
        def __iter__(self) -> Iterator[Row]:
            return iter(())

        def rows(self, machine: Machine) -> list[Row]:
            return []

    def measure(settings: Settings, sizes: object, watcher: Watcher) -> Nothing:
        asked.append(settings)
        assert sizes is not None
        return Nothing()

    for module in (latency, throughput, serve_trace):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, f"measure_{name}", measure)
    assert call(suite, "--quick") == 0
    assert asked == [Settings(preset="demo", layers=2)]
    assert "nothing was written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("latency", "--only", "decode"), "--only belongs to core, not to latency"),
        (("--model", "x"), "--model belongs to latency, throughput, serve-trace, not to core"),
        (("latency", "--rate", "3"), "--rate belongs to serve-trace, not to latency"),
        (("serve-trace", "--rate", "0"), "--rate is 0.0; expected requests per second"),
        (("serve-trace", "--requests", "0"), "--requests is 0; expected at least 1"),
        (("serve-trace", "--seed", "-1"), "--seed is -1; expected at least 0"),
    ],
)
def test_options_of_another_suite_are_refused(arguments: tuple[str, ...], message: str):
    with pytest.raises(ValueError, match=message):
        call(*arguments)
