"""What the plots draw."""

from pathlib import Path

import pytest

from dualflow.evaluate.groups import group_runs
from dualflow.evaluate.plots import curve_plot, spread_over_seeds
from dualflow.evaluate.runs import read_runs
from tests.unit.evaluate.run_folders import write_run


def test_the_band_reaches_from_the_lowest_to_the_highest_seed(tmp_path: Path):
    for seed, losses in enumerate(((4.0, 2.0), (5.0, 1.0), (6.0, 1.5))):
        write_run(tmp_path / f"a{seed}", seed=seed, curve=tuple(zip((10, 30), losses, strict=True)))
    (group,) = group_runs(read_runs([tmp_path]))
    first, last = spread_over_seeds(group, "tokens")
    assert (first.at, first.mean, first.low, first.high) == (10, 5.0, 4.0, 6.0)
    assert (last.at, last.mean, last.low, last.high) == (30, 1.5, 1.0, 2.0)
    assert [point.at for point in spread_over_seeds(group, "training FLOPs")] == [100, 300]


def test_seeds_validated_at_other_places_are_interpolated_where_all_can_be_read(tmp_path: Path):
    write_run(tmp_path / "a0", seed=0, curve=((10, 4.0), (30, 2.0)))
    write_run(tmp_path / "a1", seed=1, curve=((20, 3.0), (40, 1.0)))
    (group,) = group_runs(read_runs([tmp_path]))
    spread = spread_over_seeds(group, "tokens")
    assert [(point.at, point.mean) for point in spread] == [(20, 3.0), (30, 2.0)]


def test_seeds_without_a_common_place_are_not_drawn(tmp_path: Path):
    write_run(tmp_path / "a0", seed=0, curve=((10, 4.0),))
    write_run(tmp_path / "a1", seed=1, curve=((20, 3.0),))
    groups = group_runs(read_runs([tmp_path]))
    assert spread_over_seeds(groups[0], "tokens") == []
    assert curve_plot(groups, "tokens").png


@pytest.mark.parametrize("order", [("low", "high"), ("high", "low")])
def test_the_loss_axis_has_room_for_every_group(tmp_path: Path, order: tuple[str, str]):
    curves = {"low": ((10, 9.0), (60, 1.0), (100, 0.5)), "high": ((10, 9.0), (60, 4.0), (100, 3.5))}
    for number, name in enumerate(order):
        write_run(tmp_path / f"{number}", variant=name, curve=curves[name])
    svg = curve_plot(group_runs(read_runs([tmp_path])), "tokens").svg
    ticks = {float(text.split("<")[0]) for text in svg.split(">") if text[:3] in ("1.0", "3.0")}
    assert ticks == {1.0, 3.0}
