"""Flat rows, and pages rendered from them alone."""

import json
from pathlib import Path

import pytest

from dualflow.bench.measurement import COLUMNS, this_machine
from dualflow.bench.results import (
    check_target,
    number,
    read_results,
    results_markdown,
    results_tables,
    summary,
    write_results,
)
from tests.unit.bench.rows import MACHINE, memory_measurement, rows, time_measurement


def test_a_row_is_flat_and_has_every_column():
    for row in rows():
        assert tuple(row) == COLUMNS
        assert all(isinstance(v, (str, int, float, bool, type(None))) for v in row.values())


def test_the_ratio_is_the_median_of_the_pairs_not_of_the_medians():
    row = time_measurement().row(MACHINE)
    assert (row["standard_median"], row["dual_median"]) == (2.0, 3.0)
    assert (row["ratio_min"], row["ratio_median"], row["ratio_max"], row["n"]) == (1.5, 2.0, 3.0, 3)
    assert row["ratio_of"] == "dual / standard"
    assert row["naive_median"] is None


def test_what_does_not_compare_models_fills_columns_of_its_own():
    row = memory_measurement().row(MACHINE)
    assert row["standard_median"] is None and row["dual_median"] is None
    assert (row["naive_median"], row["chunked_median"], row["ratio_median"]) == (1000, 125, 0.125)
    assert row["counted_ratio"] is None


def test_the_machine_is_described_without_names_or_paths():
    machine = this_machine()
    assert "core" in machine.machine and machine.threads >= 1
    assert str(Path.home()) not in repr(machine)


def test_one_table_for_each_benchmark_in_order():
    tables = results_tables(rows())
    titles = [table.title.partition(":")[0] for table in tables]
    assert titles == ["training", "loss-memory", "decode"]
    assert all(len(table.rows[0]) == len(table.columns) for table in tables)
    assert "naive (MiB)" in tables[1].columns and "difference" in tables[1].columns
    assert tables[2].rows[0][-3:] == ("2.00 (1.50 … 3.00)", "1.92 (+4.2%)", "3")


def test_the_page_names_command_machine_and_figures():
    page = results_markdown(rows())
    for part in ("`dualflow bench core`", "Some CPU, 2 cores, 2 threads, torch 9.9", "0123abc"):
        assert part in page
    assert page.count("Some CPU") == 1
    assert "0.125 (0.125 … 0.125)" in page and "2e-07" in page


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (1.0, "1"), (99.96, "100"), (12345.6, "12,346")]
)
def test_numbers(value: float, text: str):
    assert number(value) == text


def test_a_line_for_the_log():
    assert summary(rows()[0]).endswith("fp32, compiled: 2 → 3 ms (2×)")


def test_written_rows_are_read_again_and_the_page_is_rendered_from_them(tmp_path: Path):
    path = tmp_path / "results.json"
    check_target(path)
    assert write_results(path, rows()) == [path, tmp_path / "README.md"]
    assert read_results(path) == rows()
    assert (tmp_path / "README.md").read_text("utf-8") == results_markdown(read_results(path))
    check_target(path)


def test_rows_of_benchmarks_that_were_not_measured_stay(tmp_path: Path):
    path = tmp_path / "results.json"
    write_results(path, rows())
    again = time_measurement("decode", case="another").row(MACHINE)
    prefill = time_measurement("prefill").row(MACHINE)
    write_results(path, [prefill, again])
    found = [(row["benchmark"], row["case"]) for row in read_results(path)]
    assert [name for name, _ in found] == ["training", "loss-memory", "decode", "prefill"]
    assert ("decode", "another") in found


def test_a_page_that_is_not_ours_is_never_replaced(tmp_path: Path):
    (tmp_path / "README.md").write_text("# My project\n")
    with pytest.raises(ValueError, match=r"README\.md would be replaced"):
        check_target(tmp_path / "results.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "not a list of benchmark rows"),
        ('[{"a": 1}]', "not a list of benchmark rows"),
        (json.dumps([1]), "not a list of benchmark rows"),
    ],
)
def test_another_file_is_never_replaced(tmp_path: Path, text: str, message: str):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        check_target(path)
    assert path.read_text() == text


def test_a_folder_or_another_kind_of_file_is_no_target(tmp_path: Path):
    for path in (tmp_path, tmp_path / "results.csv"):
        with pytest.raises(ValueError, match=r"expected a file name that ends in \.json"):
            check_target(path)
