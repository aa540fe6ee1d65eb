"""Killing ``dualflow generate --input`` in the middle and going on: the results of an uninterrupted
one.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.models import save_tiny

PROMPTS = 40


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, prompts of mixed kinds, and the results of a run nobody touched."""
    folder = tmp_path_factory.mktemp("batch")
    save_tiny(folder / "model", max_position=512)
    lines: list[dict[str, Any]] = []
    for number in range(PROMPTS):
        line: dict[str, Any] = {"prompt": "def f(x):\n" * (number % 4), "id": f"prompt {number}"}
        if number % 3 == 0:
            line |= {"n": 2, "aux": "exact", "temperature": 1.0}
        if number % 5 == 0:
            line |= {"stop": ["e"], "frequency_penalty": 0.5}
        lines.append(line)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "in.jsonl").write_text(text, encoding="utf-8")
    done = subprocess.run(
        command("straight.jsonl"), cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert len(results(folder / "straight.jsonl")) == PROMPTS
    return folder


def command(output: str) -> list[str]:
    # Few at once, so that results come over some time; float64, so that how the rows are grouped
    # into steps cannot change a token.
    options = "--max-running 4 --max-tokens 60 --ignore-eos --seed 3 --threads 1 --device cpu"
    formats = "--weights float64 --kv-dtype float64 --backend torch"
    words = ["generate", "model", "--input", "in.jsonl", "--output", output]
    return [sys.executable, "-m", "dualflow", *words, *options.split(), *formats.split()]


def results(path: Path) -> dict[str, Any]:
    """Outputs by id; what is in the cache, and so the usage, depends on what else ran."""
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    found = {record["id"]: record["outputs"] for record in records}
    assert len(found) == len(records), "a result is there twice"
    return found


def stop_in_the_middle(folder: Path, output: str, number: signal.Signals) -> tuple[int, str]:
    """Start a run, and send it a signal once some results are there; returns its exit code and what
    it said.
    """
    process = subprocess.Popen(
        command(output), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    path = folder / output
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < 5:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_batch_that_was_stopped_goes_on_where_it_ended(place: Path, number: signal.Signals):
    output = f"{number.name}.jsonl"
    code, err = stop_in_the_middle(place, output, number)
    assert code == (130 if number == signal.SIGINT else -number), err
    assert "Traceback" not in err
    path = place / output
    before = path.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    assert 5 <= whole.count(b"\n") < PROMPTS
    path.write_bytes(whole + b'{"id": "prompt 39", "line": 40, "inp')  # cut short in a write
    done = subprocess.run(command(output), cwd=place, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    kept = whole.count(b"\n")
    assert f"{kept} of {PROMPTS} results are in {output} already" in done.stderr
    assert path.read_bytes().startswith(whole)
    assert results(path) == results(place / "straight.jsonl")
