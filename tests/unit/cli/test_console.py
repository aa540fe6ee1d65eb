"""Results on standard output, remarks on standard error, nothing folded when piped."""

import pytest
from rich.table import Table

from dualflow.cli import console


def test_a_piped_table_is_not_folded(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", "what")
    table.add_row("x" * 60, "y" * 60)
    console.output().print(table)
    shown = capsys.readouterr()
    assert f"{'x' * 60} │ {'y' * 60}" in shown.out
    assert "\x1b" not in shown.out
    assert shown.err == ""


def test_remarks_leave_standard_output_alone(capsys: pytest.CaptureFixture[str]) -> None:
    console.remarks().print("reading 3 files")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "reading 3 files\n")
