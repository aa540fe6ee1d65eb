"""Killing and interrupting ``dualflow train``, and going on: equal to a run nobody touched."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dualflow.checkpoint.tensors import read_header
from dualflow.config import to_toml
from dualflow.testing.runs import tiny_run_config, write_tiny_text

STEPS = 60


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run.toml and a finished run nobody touched."""
    folder = tmp_path_factory.mktemp("resume")
    settings = {
        "steps": STEPS, "checkpoint_every": 7, "eval_every": 20, "eval_batches": 1, "batch_size": 8,
    }  # fmt: skip
    config = tiny_run_config(write_tiny_text(folder), "straight", train=settings)
    (folder / "run.toml").write_text(to_toml(config))
    done = dualflow(folder, "train", "run.toml")
    assert done.returncode == 0, done.stderr
    assert "validation loss r" in done.stdout
    return folder


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dualflow", *arguments]


def dualflow(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=folder, capture_output=True, text=True, timeout=110
    )


def shapes_of(model: Path) -> dict[str, tuple[int, ...]]:
    files = (read_header(path) for path in model.glob("*.safetensors"))
    return {name: entry.shape for header in files for name, entry in header.items()}


def start(folder: Path, name: str, step: int) -> subprocess.Popen[str]:
    """A run that has logged ``step`` by now."""
    process = subprocess.Popen(
        command("train", "run.toml", "--set", f"name={name}"),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = folder / "runs" / name / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process


def metrics(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in found:
        record.pop("tokens_per_second", None)
    return found


def assert_as_if_untouched(folder: Path, name: str) -> None:
    straight, other = folder / "runs/straight", folder / "runs" / name
    assert metrics(other) == metrics(straight)
    places = ["model", f"checkpoints/{(straight / 'checkpoints/latest').read_text().strip()}"]
    for place in places:
        files = sorted(path.name for path in (straight / place).glob("*.safetensors"))
        assert files
        for file in files:
            assert (other / place / file).read_bytes() == (straight / place / file).read_bytes()
    results = [json.loads((run / "result.json").read_text()) for run in (straight, other)]
    differ = {key for key in results[0] if results[0][key] != results[1][key]}
    assert differ <= {"name", "train_seconds", "finished"}


def test_a_run_killed_twice_and_resumed_equals_an_untouched_one(place: Path) -> None:
    process = start(place, "killed", 17)
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert not (place / "runs/killed/result.json").exists()

    again = dualflow(place, "train", "run.toml", "--set", "name=killed")
    assert again.returncode == 2
    assert "dualflow train --resume" in again.stderr
    assert len(again.stderr.strip().splitlines()) == 1

    # As if the process had been killed again, in the middle of writing a line.
    with (place / "runs/killed/metrics.jsonl").open("a") as lines:
        lines.write('{"kind": "train", "st')
    done = dualflow(place, "train", "--resume", "runs/killed")
    assert done.returncode == 0, done.stderr
    assert_as_if_untouched(place, "killed")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_leaves_a_run_that_goes_on(place: Path, number: int, code: int) -> None:
    name = f"signal{number}"
    process = start(place, name, 10)
    began = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert time.monotonic() - began < 5
    assert "stopped and saved at step" in errors
    assert f"dualflow train --resume runs/{name}" in errors
    assert "Traceback" not in errors
    run = place / "runs" / name
    latest = (run / "checkpoints/latest").read_text().strip()
    assert metrics(run)[-1]["step"] == int(latest.removeprefix("step-")) < STEPS
    if number == signal.SIGINT:
        done = dualflow(place, "train", "--resume", f"runs/{name}")
        assert done.returncode == 0, done.stderr
        assert_as_if_untouched(place, name)


def test_two_ranks_train_like_one_and_one_of_them_writes(place: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "dualflow", "train", "run.toml", "--set", "name=two"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("validation loss r") == 1
    two, straight = place / "runs/two", place / "runs/straight"
    assert json.loads((two / "environment.json").read_text())["ranks"] == 2
    assert shapes_of(two / "model") == shapes_of(straight / "model")
    for a, b in zip(metrics(two), metrics(straight), strict=True):
        assert (a["kind"], a["step"], a["tokens"]) == (b["kind"], b["step"], b["tokens"])
        # Muon's bfloat16 iterations blow up what rounding leaves different, step by step.
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4 if a["step"] <= 5 else 0.05)
