"""Means, standard errors and paired differences against arithmetic done by hand."""

import math

import pytest

from dualflow.evaluate.statistics import paired_difference, summarize, t_quantile


def test_mean_and_standard_error_by_hand():
    # Deviations −1, 0, 1: variance 2 / 2 = 1, standard error √(1/3).
    summary = summarize([4.0, 5.0, 6.0])
    assert (summary.mean, summary.count) == (5.0, 3)
    assert summary.standard_error == pytest.approx(math.sqrt(1 / 3))


def test_one_value_has_no_spread():
    summary = summarize([2.5])
    assert (summary.mean, summary.standard_error, summary.interval) == (2.5, None, None)


def test_no_value_is_refused():
    with pytest.raises(ValueError, match="no values"):
        summarize([])


def test_interval_is_students():
    low, high = summarize([4.0, 5.0, 6.0]).interval or (0.0, 0.0)
    assert (low, high) == pytest.approx((5 - 4.303 * 0.57735, 5 + 4.303 * 0.57735), abs=1e-4)


def test_pairing_is_by_seed_not_by_order():
    # −0.1, −0.3, +0.1: mean −0.1, deviations 0, −0.2, 0.2, variance 0.08 / 2 = 0.04.
    paired = paired_difference({2: 2.2, 0: 1.9, 1: 1.9}, {0: 2.0, 1: 2.2, 2: 2.1})
    assert paired is not None
    assert paired.differences == pytest.approx({0: -0.1, 1: -0.3, 2: 0.1})
    assert paired.summary.mean == pytest.approx(-0.1)
    assert paired.summary.standard_error == pytest.approx(math.sqrt(0.04 / 3))
    assert paired.wins == 2


def test_pairing_removes_what_seeds_share():
    # The seeds scatter by 10, the pairs not at all: an unpaired error would be above 5.
    paired = paired_difference({0: 9.0, 1: 19.0, 2: 29.0}, {0: 10.0, 1: 20.0, 2: 30.0})
    assert paired is not None
    assert paired.summary.standard_error == 0.0


def test_seeds_of_one_side_alone_are_left_out():
    paired = paired_difference({0: 1.0, 1: 2.0}, {1: 2.5, 7: 9.0})
    assert paired is not None
    assert paired.differences == {1: -0.5}


def test_no_common_seed_is_no_difference():
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_a_tie_is_no_win():
    paired = paired_difference({0: 1.0}, {0: 1.0})
    assert paired is not None
    assert paired.wins == 0


def test_t_quantiles():
    assert t_quantile(1) == 12.706
    assert t_quantile(4) == 2.776
    assert t_quantile(1000) == t_quantile(30)
    with pytest.raises(ValueError, match="0 degrees"):
        t_quantile(0)
