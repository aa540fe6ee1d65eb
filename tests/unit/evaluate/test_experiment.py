"""Tables and plots from results.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from dualflow.evaluate.experiment import experiment_table, main, read_experiment
from dualflow.evaluate.runs import RunError


def row(variant: str, seed: int, loss: float, **changes: Any) -> dict[str, Any]:
    return {
        "variant": variant,
        "seed": seed,
        "tokens": 6_000_000,
        "val_loss": loss,
        "val_loss_p": None,
        "val_loss_q": None,
        **changes,
    }


ROWS = [
    row("full, λ = 0.3", 0, 1.9, val_loss_p=2.5, val_loss_q=2.0, more="columns are welcome"),
    row("full, λ = 0.3", 1, 1.9, val_loss_p=2.7, val_loss_q=2.0),
    row("standard", 0, 2.0),
    row("standard", 1, 2.2),
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(ROWS), encoding="utf-8")
    return path


def test_means_errors_and_paired_differences(results: Path):
    table = experiment_table(read_experiment(results))
    # p: 2.6, deviations ±0.1, variance 0.02, error 0.1. Differences −0.1, −0.3: error 0.1 too.
    assert table.rows == (
        ("full, λ = 0.3", "2", "6.00 M", "1.9000 ± 0.0000", "2.6000 ± 0.1000",
         "2.0000 ± 0.0000", "−0.2000 ± 0.1000", "2 of 2"),
        ("standard", "2", "6.00 M", "2.1000 ± 0.1000", "–", "–", "–", "–"),
    )  # fmt: skip


def test_an_unknown_baseline(results: Path):
    with pytest.raises(ValueError, match=r"no variant called 'x'; there are: full, λ = 0\.3, stan"):
        experiment_table(read_experiment(results), "x")


def test_the_command_prints_markdown_and_writes_the_plot(
    results: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(results), "--out", str(results.parent / "out")]) == 0
    printed = capsys.readouterr().out
    assert "| variant | seeds | tokens | r | p | q | r − standard | lower in |" in printed
    names = sorted(path.name for path in (results.parent / "out").iterdir())
    assert names == ["final-loss.png", "final-loss.svg", "table.md"]
    assert (results.parent / "out" / "table.md").read_text(encoding="utf-8") == printed


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "not valid JSON"),
        ("{}", "expected a list"),
        ("[]", "expected a list of at least one row"),
        ("[3]", "row 1: expected an object"),
        (json.dumps([ROWS[0], {"variant": "x"}]), "row 2: seed is missing"),
        (json.dumps([row("standard", 0, float("nan"))]), "finite"),
        (json.dumps([row("standard", 0, 1.0, tokens="6M")]), "tokens is '6M'"),
        (json.dumps([ROWS[2], ROWS[2]]), "variant 'standard' has seed 0 twice"),
    ],
)
def test_faults_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, fault: str
):
    path = tmp_path / "results.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(RunError, match=r"results\.json"):
        read_experiment(path)
    assert main([str(path)]) == 2
    message = capsys.readouterr().err
    assert fault in message
    assert message.count("\n") == 1


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(RunError, match="cannot be read: No such file"):
        read_experiment(tmp_path / "results.json")
