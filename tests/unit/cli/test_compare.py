"""``dualflow compare`` as a person calls it."""

import json
from pathlib import Path

import pytest

from dualflow.cli.main import main
from tests.unit.evaluate.run_folders import write_pair_of_groups, write_run


def test_tables_findings_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_pair_of_groups(tmp_path / "runs")
    out = tmp_path / "out"
    assert main(["compare", str(tmp_path / "runs"), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "−0.1000 ± 0.1155" in printed.out
    assert "9.60 (1.92×)" in printed.out
    assert "do not tell the two apart" in printed.out
    assert str(out / "report.html") in printed.err
    assert len(json.loads((out / "compare.json").read_text())) == 6
    assert {path.suffix for path in out.iterdir()} == {".json", ".md", ".html", ".png", ".svg"}


def test_the_baseline_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_pair_of_groups(tmp_path / "runs")
    command = ["compare", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert main([*command, "--baseline", "dual"]) == 0
    assert "r − dual" in capsys.readouterr().out


def test_names_are_not_read_as_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path / "a", variant="[bold]x[/bold]")
    assert main(["compare", str(tmp_path / "a"), "--out", str(tmp_path / "out")]) == 0
    assert "[bold]x[/bold]" in capsys.readouterr().out


def test_faults_are_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "a")
    (run / "result.json").unlink()
    for command in (["compare", str(run)], ["compare", str(tmp_path / "none")]):
        assert main([*command, "--out", str(tmp_path / "out")]) == 2
        message = capsys.readouterr().err
        assert message.startswith("dualflow compare: ")
        assert message.count("\n") == 1
    assert not (tmp_path / "out").exists()
