"""Read loss curves at equal training tokens or equal training FLOPs. No torch here.

A loss between two validations is interpolated linearly in tokens; outside a curve nothing is read.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dualflow.evaluate.groups import Group
from dualflow.evaluate.runs import Run
from dualflow.evaluate.statistics import PairedDifference, Summary, paired_difference, summarize

Axis = Literal["tokens", "training FLOPs"]

CURVE_FRACTIONS = (0.25, 0.5, 0.75, 1.0)
"""Where along the budget that both sides reach the curves are compared."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One side read at a budget.

    losses:  validation loss of r over the paired seeds.
    tokens:  training tokens at which its curves are read.
    end:     training tokens at which its runs end.
    """

    losses: Summary
    tokens: float
    end: int

    @property
    def cut_short(self) -> bool:
        """Whether it is read before its own end, when its schedule had not ended either."""
        return self.tokens < self.end * (1 - 1e-6)


@dataclass(frozen=True, kw_only=True)
class Matched:
    """A group and the baseline read at one ``budget`` of ``axis``, over the seeds both have."""

    axis: Axis
    budget: float
    baseline: Reading
    group: Reading
    difference: PairedDifference


def loss_at(run: Run, tokens: float) -> float | None:
    """Validation loss of r after ``tokens`` training tokens, None outside the curve."""
    curve = run.curve
    if not curve[0].tokens <= tokens <= curve[-1].tokens:
        return None
    for left, right in itertools.pairwise(curve):
        if tokens <= right.tokens:
            share = (tokens - left.tokens) / (right.tokens - left.tokens)
            return left.loss + share * (right.loss - left.loss)
    return curve[-1].loss


def tokens_of(run: Run, axis: Axis, budget: float) -> float:
    """Training tokens that ``budget`` (tokens, or training FLOPs) buys in ``run``."""
    if axis == "tokens":
        return budget
    tokens = budget / run.result.train_flops_per_token
    # The budget is often this very run's end; the division must not push it beyond the curve.
    return min(tokens, run.result.tokens) if tokens < run.result.tokens * (1 + 1e-9) else tokens


def spent(run: Run, axis: Axis, tokens: float) -> float:
    """What ``tokens`` training tokens cost in ``run`` (tokens, or training FLOPs)."""
    return tokens if axis == "tokens" else tokens * run.result.train_flops_per_token


def along_curve(group: Group, base: Group, axis: Axis) -> tuple[Matched, ...]:
    """``group`` against ``base`` at ``CURVE_FRACTIONS`` of the budget that all paired runs reach.

    Fractions that come before a curve's first validation are left out.
    """
    seeds = sorted(group.runs.keys() & base.runs.keys())
    pairs = [(group.runs[seed], base.runs[seed]) for seed in seeds]
    if not pairs:
        return ()
    reach = min(spent(run, axis, run.result.tokens) for pair in pairs for run in pair)
    found = (_matched(group, base, seeds, axis, reach * part) for part in CURVE_FRACTIONS)
    return tuple(matched for matched in found if matched is not None)


def _matched(
    group: Group, base: Group, seeds: Sequence[int], axis: Axis, budget: float
) -> Matched | None:
    group_losses = _losses_at(group, seeds, axis, budget)
    base_losses = _losses_at(base, seeds, axis, budget)
    if len(group_losses) < len(seeds) or len(base_losses) < len(seeds):
        return None
    difference = paired_difference(group_losses, base_losses)
    assert difference is not None

    def reading(run: Run, losses: Mapping[int, float]) -> Reading:
        return Reading(
            losses=summarize(list(losses.values())),
            tokens=tokens_of(run, axis, budget),
            end=run.result.tokens,
        )

    return Matched(
        axis=axis,
        budget=budget,
        baseline=reading(base.runs[seeds[0]], base_losses),
        group=reading(group.runs[seeds[0]], group_losses),
        difference=difference,
    )


def _losses_at(of: Group, seeds: Sequence[int], axis: Axis, budget: float) -> dict[int, float]:
    runs = {seed: of.runs[seed] for seed in seeds}
    read = {seed: loss_at(run, tokens_of(run, axis, budget)) for seed, run in runs.items()}
    return {seed: value for seed, value in read.items() if value is not None}
