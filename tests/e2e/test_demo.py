"""The demo as a user runs it, at a size that takes seconds."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SMALL = (
    "model.vocab_size=259",
    "model.hidden_size=16",
    "model.num_layers=1",
    "model.intermediate_size=24",
    "data.source=text.txt",
    "data.tokenizer=bytes",
    "data.sequence_length=32",
    "train.batch_size=4",
    "train.log_every=1",
    "train.compile=off",
    "train.tensorboard=off",
)


def command(*assignments: str) -> list[str]:
    sets = [word for each in (*SMALL, *assignments) for word in ("--set", each)]
    return [sys.executable, "-m", "dualflow", "demo", "--runs", "out", *sets]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return tmp_path


def test_demo_trains_compares_and_generates(folder: Path) -> None:
    done = subprocess.run(command("train.steps=3"), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((folder / "out/compare.json").read_text(encoding="utf-8"))
    assert [row["variant"] for row in rows] == ["standard", "dual"]
    assert rows[0]["prefill_flops_per_token"] == rows[1]["prefill_flops_per_token"]
    assert rows[0]["kv_bytes_per_token"] == rows[1]["kv_bytes_per_token"]
    assert (folder / "out/report.html").is_file()
    assert "def main(argv=None):" in done.stdout
    again = subprocess.run(command("train.steps=3"), cwd=folder, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "finished already" in again.stderr


def test_what_goes_wrong_in_a_run_is_one_line(folder: Path) -> None:
    (folder / "text.txt").write_text("short")
    done = subprocess.run(command("train.steps=3"), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2
    assert "found 5 tokens of text; expected at least 33" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_demo_saves_and_goes_on(folder: Path, number: int, code: int) -> None:
    process = subprocess.Popen(
        command("train.steps=100000"), cwd=folder, stderr=subprocess.PIPE, text=True
    )
    metrics = [folder / f"out/{variant}-seed0/metrics.jsonl" for variant in ("standard", "dual")]
    wait_for(metrics)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "stopped and saved" in errors and "Traceback" not in errors
    for path in metrics:
        assert (path.parent / "checkpoints/latest").is_file()


def test_a_killed_demo_leaves_no_run_behind(folder: Path) -> None:
    process = subprocess.Popen(command("train.steps=100000"), cwd=folder, stderr=subprocess.DEVNULL)
    runs = [folder / f"out/{variant}-seed0" for variant in ("standard", "dual")]
    wait_for([run / "metrics.jsonl" for run in runs])
    process.kill()
    process.wait()
    wait_for([run / "checkpoints/latest" for run in runs])


def wait_for(files: list[Path]) -> None:
    deadline = time.monotonic() + 60
    while not all(path.is_file() and path.stat().st_size for path in files):
        assert time.monotonic() < deadline, f"not all there: {files}"
        time.sleep(0.1)
