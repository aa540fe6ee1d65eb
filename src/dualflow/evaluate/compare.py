"""Compare finished runs: variants against a baseline, paired by seed. No torch here.

Every group of runs is set against the baseline at its end, along the curve at equal training
tokens, and at equal training FLOPs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualflow.evaluate.curves import Matched, along_curve
from dualflow.evaluate.groups import Group, differing_settings, find_baseline, group_runs
from dualflow.evaluate.runs import Run, read_runs
from dualflow.evaluate.statistics import PairedDifference, paired_difference

COSTS = (
    "params",
    "prefill_flops_per_token",
    "decode_flops_per_token",
    "train_flops_per_token",
    "kv_bytes_per_token",
)


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """One group against the baseline.

    final:        difference of the final validation loss of r; None where they share no seed.
    final_p:      the same of the group's p (auxiliary off) less the baseline's r.
    tokens:       along the curve at equal tokens, one entry per fraction that both curves cover.
    flops:        along the curve at equal training FLOPs.
    cost_ratios:  figures of the group over those of the baseline.
    """

    group: Group
    final: PairedDifference | None
    final_p: PairedDifference | None
    tokens: tuple[Matched, ...]
    flops: tuple[Matched, ...]
    cost_ratios: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything tables, plots and the report are rendered from.

    contrasts: one per group other than the baseline, in the order the runs were given.
    notes:     what a reader must know before trusting a figure.
    """

    baseline: Group
    contrasts: tuple[Contrast, ...]
    notes: tuple[str, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The baseline, then the others."""
        return (self.baseline, *(contrast.group for contrast in self.contrasts))


def compare_runs(paths: Sequence[str | Path], baseline: str | None = None) -> Comparison:
    """Read the runs in ``paths`` and compare them; see ``compare``."""
    return compare(read_runs(paths), baseline)


def compare(runs: Sequence[Run], baseline: str | None = None) -> Comparison:
    """Compare ``runs`` with the group called ``baseline``.

    ``baseline`` is a group's label, a variant or a run's name; None: the group of variant
    ``standard``, or the first given where there is none.
    Raises ``ValueError``: no runs, two runs of one configuration and seed, no such baseline.
    """
    groups = group_runs(runs)
    base = find_baseline(groups, baseline)
    others = [group for group in groups if group is not base]
    return Comparison(
        baseline=base,
        contrasts=tuple(_contrast(group, base) for group in others),
        notes=tuple(_notes(base, others)),
    )


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The flat rows of ``compare.json``, one per run."""
    columns = (
        "name", "variant", "seed", "tokens", "val_loss", "val_loss_p", "val_loss_q", "params",
        "prefill_flops_per_token", "decode_flops_per_token", "train_flops_per_token",
        "kv_bytes_per_token",
    )  # fmt: skip
    return [{column: getattr(run.result, column) for column in columns} for run in runs]


def _contrast(group: Group, base: Group) -> Contrast:
    ratios = {
        cost: float(getattr(group.first.result, cost)) / float(getattr(base.first.result, cost))
        for cost in COSTS
        if getattr(base.first.result, cost)
    }
    return Contrast(
        group=group,
        final=paired_difference(group.final_losses(), base.final_losses()),
        final_p=paired_difference(group.final_losses("p"), base.final_losses()),
        tokens=along_curve(group, base, "tokens"),
        flops=along_curve(group, base, "training FLOPs"),
        cost_ratios=ratios,
    )


def _notes(base: Group, others: Sequence[Group]) -> list[str]:
    notes: list[str] = []
    for group in others:
        lonely = sorted(group.runs.keys() ^ base.runs.keys())
        if lonely:
            seeds = ", ".join(map(str, lonely))
            notes.append(
                f"{group.label} and {base.label} do not share seed {seeds}: "
                "left out of every paired difference."
            )
        differing = differing_settings(group.first.config, base.first.config)
        if differing:
            notes.append(
                f"{group.label} and {base.label} differ in more than the model: "
                f"{'; '.join(differing)}."
            )
        if any(setting.startswith(("data.", "tokenizer")) for setting in differing):
            notes.append(
                f"{group.label} and {base.label} were trained or validated on different data: "
                "their losses are not comparable."
            )
    return notes
