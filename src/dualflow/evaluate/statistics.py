"""Means over seeds and differences paired by seed, with their standard errors. Plain Python."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Two-sided 95% quantiles of Student's t for 1, 2, ... 30 degrees of freedom (any statistics table).
_T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """A mean over ``count`` values and its standard error (None for a single value)."""

    mean: float
    standard_error: float | None
    count: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the mean by Student's t; None for a single value."""
        if self.standard_error is None:
            return None
        half = t_quantile(self.count - 1) * self.standard_error
        return self.mean - half, self.mean + half


@dataclass(frozen=True)
class PairedDifference:
    """Values less a baseline's, seed by seed; negative means lower than the baseline.

    differences: by seed, ascending.
    """

    differences: Mapping[int, float]
    summary: Summary

    @property
    def wins(self) -> int:
        """In how many pairs the value is strictly lower than the baseline's."""
        return sum(difference < 0 for difference in self.differences.values())


def summarize(values: Sequence[float]) -> Summary:
    """Mean and standard error (sample deviation over √n). Raises ``ValueError`` for no values."""
    if not values:
        raise ValueError("no values to average; expected at least one")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Summary(mean, None, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Summary(mean, math.sqrt(variance / count), count)


def paired_difference(
    values: Mapping[int, float], baseline: Mapping[int, float]
) -> PairedDifference | None:
    """``values`` less ``baseline`` over the seeds both have; None where they share no seed."""
    seeds = sorted(values.keys() & baseline.keys())
    if not seeds:
        return None
    differences = {seed: values[seed] - baseline[seed] for seed in seeds}
    return PairedDifference(differences, summarize(list(differences.values())))


def t_quantile(degrees: int) -> float:
    """Half the width of a 95% interval in standard errors; above 30 degrees the value for 30."""
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom; expected at least 1")
    return _T_QUANTILES[min(degrees, len(_T_QUANTILES)) - 1]
