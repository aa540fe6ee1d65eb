"""Rows of the comparison with other engines, and the page rendered from them alone."""

import pytest

from dualflow.bench.peers import (
    COLUMNS,
    FIGURES,
    make_row,
    ratio_table,
    results_text,
    speed_table,
    with_results,
)

ABOUT = {
    "versions": "peer 1.2",
    "commit": "0123abc",
    "machine": "Some CPU, 2 cores",
    "threads": 2,
    "started": "2000-01-01",
}
AGREEMENT = [
    {"engine": "peer", "variant": "eager", "precision": "fp32", "agree": [32, 32], "of": 32},
    {"engine": "dualflow", "variant": "dual", "precision": "bf16", "agree": [32, 7], "of": 32},
]


def rows() -> list[dict]:
    figure = "decode_b8"
    return [
        make_row(("peer", "eager", "bf16"), figure, [100.0, 80.0, 90.0], **ABOUT),
        make_row(("slow", "eager", "bf16"), figure, [10.0, 10.0, 10.0], **ABOUT),
        make_row(("peer", "eager", "int8"), figure, [200.0, 100.0, 150.0], **ABOUT),
        make_row(("dualflow", "standard", "bf16"), figure, [150.0, 160.0, 90.0], **ABOUT),
        make_row(("dualflow", "dual", "bf16"), figure, [75.0, 120.0, 45.0], **ABOUT),
    ]


def results() -> dict:
    return {"rows": rows(), "agreement": AGREEMENT, "failed": ["other fp32: it | ended"]}


def test_a_row_has_every_column_and_the_median_of_its_readings():
    row = rows()[0]
    assert tuple(row) == COLUMNS
    assert (row["median"], row["min"], row["max"], row["n"]) == (90, 80, 100, 3)


def test_each_engine_has_one_line_with_a_cell_for_each_figure():
    table = speed_table(rows())
    assert len(table.rows) == 5
    assert all(len(line) == len(table.columns) == 2 + len(FIGURES) for line in table.rows)
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells["engine"] == "peer, eager"
    assert cells[FIGURES["decode_b8"]] == "90 (80 … 100)"
    assert cells[FIGURES["prefill_512"]] == "–"


def test_ours_is_compared_with_the_fastest_peer_round_by_round():
    same, overall = ratio_table(rows()).rows
    assert same[1:3] == ("bf16", "peer bf16, 90")
    assert same[4:] == ("1.50", "0.75", "0.50")
    assert overall[1:3] == ("any", "peer int8, 150")


def test_a_precision_that_only_a_peer_has_is_left_out_of_the_comparison():
    assert [line[1] for line in ratio_table(rows()).rows] == ["bf16", "any"]


def test_the_page_keeps_what_was_written_by_hand():
    page = "# Title\n\n<!-- results -->\nold\n<!-- end of results -->\n\nEnd\n"
    text = with_results(page, results())
    assert text.startswith("# Title\n") and text.endswith("\nEnd\n")
    assert "old" not in text and results_text(results()) in text
    assert with_results(text, results()) == text


def test_the_page_names_versions_agreement_and_what_failed():
    text = results_text(results())
    for part in ("commit 0123abc", "peer: peer 1.2", "32, 7 of 32", r"other fp32: it \| ended"):
        assert part in text


def test_a_page_without_a_place_for_results_is_refused():
    with pytest.raises(ValueError, match="no <!-- results -->"):
        with_results("# Title\n", results())
