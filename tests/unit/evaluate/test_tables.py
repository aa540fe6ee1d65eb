"""Tables, sentences and their escaping."""

from pathlib import Path

import pytest

from dualflow.evaluate.compare import compare_runs
from dualflow.evaluate.findings import findings, verdict
from dualflow.evaluate.statistics import PairedDifference, paired_difference
from dualflow.evaluate.tables import (
    Table,
    comparison_tables,
    quantity,
    signed,
    to_html,
    to_markdown,
    to_rich,
)
from tests.unit.evaluate.run_folders import write_pair_of_groups, write_run

HOSTILE = Table(
    title="a|b <i>",
    columns=("<script>", "x"),
    rows=(("[red]one|two", "`2` *3*"),),
    caption="<img src=x>",
)


def paired(*differences: float) -> PairedDifference:
    found = paired_difference(dict(enumerate(differences)), dict.fromkeys(range(9), 0.0))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (1, "1.00"),
        (12.34, "12.3"),
        (999.4, "999"),
        (999.6, "1.00 k"),
        (6_123_456, "6.12 M"),
        (61_234_567, "61.2 M"),
        (999_499, "999 k"),
        (999_600, "1.00 M"),
        (1e10, "10.0 G"),
        (9.996, "10.0"),
        (3e17, "300 P"),
    ],
)
def test_quantities(value: float, text: str):
    assert quantity(value) == text


def test_signs():
    assert (signed(0.12345), signed(-0.5), signed(-0.00001)) == ("+0.1235", "−0.5000", "0.0000")


def test_the_tables_of_a_comparison(tmp_path: Path):
    write_pair_of_groups(tmp_path)
    losses, costs, flops, tokens = comparison_tables(compare_runs([tmp_path]))
    assert losses.rows[0][:5] == ("standard", "3", "200", "2.1000 ± 0.0577", "–")
    assert losses.rows[1] == (
        "dual", "3", "200", "2.0000 ± 0.1000", "2.0500 ± 0.1000", "2.0200 ± 0.1000",
        "−0.1000 ± 0.1155", "2 of 3",
    )  # fmt: skip
    assert costs.rows[1] == (
        "dual", "1,500 (1.50×)", "4.00 (1.00×)", "9.60 (1.92×)", "20.0 (2.00×)", "64 (1.00×)",
    )  # fmt: skip
    assert flops.rows[0][-1] == "200, 100*"
    assert [row[1] for row in tokens.rows] == ["100", "150", "200"]
    for table in (losses, costs, flops, tokens):
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_markdown_shows_hostile_text_as_it_is():
    lines = to_markdown(HOSTILE).splitlines()
    assert lines[0] == r"**a\|b \<i\>**"
    assert lines[2] == r"| \<script\> | x |"
    assert lines[3] == "| :--- | ---: |"
    assert lines[4] == r"| \[red\]one\|two | \`2\` \*3\* |"


def test_html_is_escaped():
    page = to_html(HOSTILE)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "<img" not in page


def test_a_terminal_reads_no_markup():
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(to_rich(HOSTILE))
    assert "[red]one|two" in console.export_text()


def test_a_clear_difference_is_stated():
    text = verdict("dual", "standard", paired(-0.10, -0.11, -0.09, -0.10))
    assert text.startswith("dual is lower than standard by 0.1000 nats on average (± 0.0041")
    assert "lower in 4 of 4" in text
    assert text.endswith("excludes zero.")


def test_the_other_side_may_be_lower():
    text = verdict("dual", "standard", paired(0.10, 0.11, 0.09, 0.10))
    assert text.startswith("standard is lower than dual by 0.1000 nats")
    assert "dual is lower in 0 of 4" in text


def test_what_the_seeds_do_not_show_is_not_claimed():
    # Mean −0.1, standard error 0.115: two standard errors would reach zero, and so does t.
    text = verdict("dual", "standard", paired(-0.1, -0.3, 0.1))
    assert "do not tell the two apart" in text
    # Beyond two standard errors, but three seeds need 4.3 of them.
    assert "do not tell the two apart" in verdict("dual", "standard", paired(-0.10, -0.05, -0.03))


def test_one_seed_says_nothing_of_the_spread():
    text = verdict("dual", "standard", paired(-0.2))
    assert text == (
        "dual is lower than standard by 0.2000 nats, in one seed: "
        "nothing can be said of the spread over seeds."
    )


def test_equal_is_neither_lower():
    assert verdict("dual", "standard", paired(0.0, 0.0)).startswith("dual and standard are equal")


def test_findings_name_the_side_that_is_read_early(tmp_path: Path):
    write_pair_of_groups(tmp_path)
    said = findings(compare_runs([tmp_path]))
    assert said[0].startswith("At the end of training, dual is lower than standard by 0.1000")
    assert said[1].startswith("Read from p, dual with its auxiliary off is lower")
    assert "(2.00 k), standard is lower than dual by 1.0000" in said[2]
    assert "dual after 100 of its 200 tokens" in said[2]
    assert len(said) == 3


def test_a_group_alone_has_nothing_to_say(tmp_path: Path):
    write_run(tmp_path / "a")
    comparison = compare_runs([tmp_path])
    assert findings(comparison) == ["There is only standard: nothing to compare it with."]
    assert [table.title for table in comparison_tables(comparison)] == [
        "Final validation loss (nats per token)",
        "Costs per token",
    ]


def test_groups_without_a_common_seed(tmp_path: Path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, variant="dual")
    assert "shares no seed" in findings(compare_runs([tmp_path]))[0]
