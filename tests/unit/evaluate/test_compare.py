"""Grouping, pairing and reading curves, against numbers worked out by hand."""

import math
from pathlib import Path

import pytest

from dualflow.evaluate.compare import Comparison, compare_runs, rows
from dualflow.evaluate.curves import loss_at, tokens_of
from dualflow.evaluate.groups import group_runs
from dualflow.evaluate.runs import read_run, read_runs
from tests.unit.evaluate.run_folders import write_pair_of_groups, write_run


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    write_pair_of_groups(tmp_path)
    return compare_runs([tmp_path])


def test_final_losses_are_paired_by_seed(comparison: Comparison):
    (contrast,) = comparison.contrasts
    assert comparison.baseline.label == "standard"
    assert contrast.group.label == "dual"
    assert contrast.final is not None
    assert contrast.final.differences == pytest.approx({0: -0.1, 1: -0.3, 2: 0.1})
    assert contrast.final.summary.mean == pytest.approx(-0.1)
    assert contrast.final.summary.standard_error == pytest.approx(math.sqrt(0.04 / 3))
    assert contrast.final.wins == 2


def test_p_is_set_against_the_baselines_own_prediction(comparison: Comparison):
    (contrast,) = comparison.contrasts
    assert contrast.final_p is not None
    assert contrast.final_p.summary.mean == pytest.approx(-0.05)
    assert comparison.baseline.final_summary("p") is None


def test_cost_ratios(comparison: Comparison):
    ratios = comparison.contrasts[0].cost_ratios
    assert ratios["params"] == 1.5
    assert ratios["prefill_flops_per_token"] == ratios["kv_bytes_per_token"] == 1.0
    assert ratios["decode_flops_per_token"] == pytest.approx(1.92)
    assert ratios["train_flops_per_token"] == 2.0


def test_equal_tokens_along_the_curve(comparison: Comparison):
    # Budgets 50, 100, 150, 200: the curves begin at 100, so 50 cannot be read.
    halves = comparison.contrasts[0].tokens
    assert [matched.budget for matched in halves] == [100, 150, 200]
    assert halves[0].difference.differences == pytest.approx({0: 0.1, 1: 0.1, 2: 0.1})
    # Half way between the validations: standard (3 + final) / 2, dual (3.1 + final) / 2.
    assert halves[1].difference.differences == pytest.approx({0: 0.0, 1: -0.1, 2: 0.1})
    assert halves[2].difference.differences == pytest.approx({0: -0.1, 1: -0.3, 2: 0.1})
    assert not halves[2].baseline.cut_short
    assert not halves[2].group.cut_short


def test_equal_training_flops(comparison: Comparison):
    # Standard ends after 2000 FLOPs; dual spends as many by token 100. Of the smaller budgets,
    # 1000 and 1500 are 50 and 75 tokens of dual, before its first validation.
    (matched,) = comparison.contrasts[0].flops
    assert matched.budget == 2000
    assert (matched.baseline.tokens, matched.group.tokens) == (200, 100)
    assert matched.difference.differences == pytest.approx({0: 1.1, 1: 0.9, 2: 1.0})
    assert matched.group.cut_short
    assert not matched.baseline.cut_short
    assert matched.group.end == 200


def test_interpolation_is_linear_and_never_leaves_the_curve(tmp_path: Path):
    run = read_run(write_run(tmp_path / "a", curve=((10, 4.0), (20, 3.0), (60, 1.0))))
    assert loss_at(run, 10) == 4.0
    assert loss_at(run, 15) == 3.5
    assert loss_at(run, 20) == 3.0
    assert loss_at(run, 50) == 1.5
    assert loss_at(run, 60) == 1.0
    assert loss_at(run, 9.99) is None
    assert loss_at(run, 60.01) is None


def test_a_curve_of_one_point_is_read_there_alone(tmp_path: Path):
    run = read_run(write_run(tmp_path / "a", curve=((10, 4.0),)))
    assert (loss_at(run, 10), loss_at(run, 9)) == (4.0, None)


def test_rounding_does_not_push_a_budget_beyond_the_end(tmp_path: Path):
    # 49 · (200 / 49) is not 200 in floating point, and 3 · 0.1 is above 0.3.
    for number, flops in enumerate((0.1, 1 / 3, 49.0, 1e9 / 7)):
        run = read_run(write_run(tmp_path / str(number), train_flops=flops))
        assert tokens_of(run, "training FLOPs", run.result.train_flops_per_token * 200) <= 200


def test_execution_settings_do_not_split_a_group(tmp_path: Path):
    for seed in range(2):
        train = {"steps": 10, "threads": seed, "micro_batch_size": seed, "compile": str(seed)}
        write_run(tmp_path / f"a{seed}", seed=seed, config={"train": train})
    (group,) = group_runs(read_runs([tmp_path]))
    assert sorted(group.runs) == [0, 1]


def test_groups_of_one_variant_are_called_by_their_runs(tmp_path: Path):
    for label, size in (("minimal", 1), ("full", 2)):
        for seed in range(2):
            model = {"variant": "dual", "x": size}
            write_run(
                tmp_path / f"{label}-seed{seed}",
                variant="dual",
                seed=seed,
                config={"model": model},
            )
    write_run(tmp_path / "standard-seed0")
    comparison = compare_runs([tmp_path])
    assert [group.label for group in comparison.groups] == ["standard", "full", "minimal"]


def test_a_label_loses_its_seed_and_nothing_else(tmp_path: Path):
    names = {"lambda0.3-seed3": "lambda0.3", "v3": "v3", "run_s3": "run", "x-3": "x"}
    for number, name in enumerate(names):
        write_run(tmp_path / name, seed=3, config={"model": {"x": number}})
    labels = {
        next(iter(g.runs.values())).result.name: g.label for g in group_runs(read_runs([tmp_path]))
    }
    assert labels == names


def test_one_name_for_two_configurations_is_told_apart(tmp_path: Path):
    write_run(tmp_path / "a", name="x", config={"model": {"x": 1}})
    write_run(tmp_path / "b", name="x", config={"model": {"x": 2}})
    assert [group.label for group in group_runs(read_runs([tmp_path]))] == ["x", "x (2)"]


def test_a_seed_twice_is_refused(tmp_path: Path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    with pytest.raises(ValueError, match="same seed 0; give one of them"):
        compare_runs([tmp_path])


@pytest.mark.parametrize("baseline", ["dual", "dual-seed1"])
def test_the_baseline_can_be_chosen(tmp_path: Path, baseline: str):
    write_pair_of_groups(tmp_path)
    comparison = compare_runs([tmp_path], baseline)
    assert comparison.baseline.label == "dual"
    assert comparison.contrasts[0].final is not None
    assert comparison.contrasts[0].final.summary.mean == pytest.approx(0.1)
    # The standard model has no p of its own to be set against anything.
    assert comparison.contrasts[0].final_p is None


def test_an_unknown_baseline_is_refused(tmp_path: Path):
    write_pair_of_groups(tmp_path)
    with pytest.raises(ValueError, match="no baseline called 'x' among the runs; there are: dual"):
        compare_runs([tmp_path], "x")


def test_an_ambiguous_baseline_is_refused(tmp_path: Path):
    write_run(tmp_path / "a", variant="dual", config={"model": {"x": 1}})
    write_run(tmp_path / "b", variant="dual", config={"model": {"x": 2}})
    with pytest.raises(ValueError, match="could be any of: a, b"):
        compare_runs([tmp_path], "dual")


def test_without_a_standard_model_the_first_is_the_baseline(tmp_path: Path):
    runs = [write_run(tmp_path / "z", variant="phd2"), write_run(tmp_path / "a", variant="dual")]
    assert compare_runs(runs).baseline.label == "phd2"


def test_unpaired_seeds_are_left_out_and_named(tmp_path: Path):
    write_pair_of_groups(tmp_path)
    write_run(tmp_path / "dual-seed7", variant="dual", seed=7, curve=((200, 0.5),))
    comparison = compare_runs([tmp_path])
    contrast = comparison.contrasts[0]
    assert contrast.final is not None
    assert sorted(contrast.final.differences) == [0, 1, 2]
    assert any("do not share seed 7" in note for note in comparison.notes)


def test_no_common_seed(tmp_path: Path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, variant="dual")
    (contrast,) = compare_runs([tmp_path]).contrasts
    assert contrast.final is None
    assert contrast.tokens == contrast.flops == ()


def test_different_data_and_training_are_noted(tmp_path: Path):
    write_run(tmp_path / "a")
    write_run(
        tmp_path / "b",
        variant="dual",
        config={"data": {"source": "notes.txt"}, "train": {"steps": 20}},
    )
    notes = " ".join(compare_runs([tmp_path]).notes)
    assert 'data.source "notes.txt" against "python-stdlib"' in notes
    assert "train.steps 20 against 10" in notes
    assert "their losses are not comparable" in notes


def test_equal_settings_leave_no_note(comparison: Comparison):
    assert comparison.notes == ()


def test_rows_hold_the_columns_of_compare_json(tmp_path: Path):
    runs = [read_run(write_run(tmp_path / "a"))]
    assert rows(runs) == [
        {
            "name": "a",
            "variant": "standard",
            "seed": 0,
            "tokens": 200,
            "val_loss": 2.0,
            "val_loss_p": None,
            "val_loss_q": None,
            "params": 1000,
            "prefill_flops_per_token": 4.0,
            "decode_flops_per_token": 5.0,
            "train_flops_per_token": 10.0,
            "kv_bytes_per_token": 64.0,
        }
    ]
