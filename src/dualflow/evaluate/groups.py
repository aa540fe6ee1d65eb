"""Sort finished runs into groups: what differs in its seed alone is one variant. No torch here."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from dualflow.evaluate.runs import CurvePoint, Run
from dualflow.evaluate.statistics import Summary, summarize

Loss = Literal["r", "p", "q"]

# How a run is watched and executed, not what it learns: such fields do not set groups apart.
_EXECUTION = {
    "data": {"cache_dir"},
    "train": {
        "activation_checkpointing", "checkpoint_every", "compile", "device", "eval_every",
        "keep_last", "log_every", "micro_batch_size", "tensorboard", "threads",
        "wandb_project",
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in their seed alone.

    label: the variant, or where several groups share it, the runs' name without the seed.
    runs:  by seed.
    """

    label: str
    variant: str
    runs: Mapping[int, Run]

    @property
    def first(self) -> Run:
        """The run of the lowest seed: costs are the same in all of them."""
        return self.runs[min(self.runs)]

    def final_losses(self, loss: Loss = "r") -> dict[int, float]:
        """Final validation loss by seed; empty where the variant has no such distribution."""
        found = {seed: _value(run.curve[-1], loss) for seed, run in self.runs.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def final_summary(self, loss: Loss = "r") -> Summary | None:
        """Mean and standard error of ``final_losses``; None where there are none."""
        losses = self.final_losses(loss)
        return summarize(list(losses.values())) if losses else None


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs by what they learn, in order of first appearance."""
    if not runs:
        raise ValueError("no runs to compare; expected at least one")
    members: dict[str, dict[int, Run]] = {}
    for run in runs:
        group = members.setdefault(_identity(run), {})
        seed = run.result.seed
        if seed in group:
            raise ValueError(
                f"{group[seed].folder} and {run.folder} are runs of one configuration with the "
                f"same seed {seed}; give one of them"
            )
        group[seed] = run
    return [
        Group(label=label, variant=next(iter(group.values())).result.variant, runs=group)
        for label, group in zip(_labels(list(members.values())), members.values(), strict=True)
    ]


def find_baseline(groups: Sequence[Group], name: str | None) -> Group:
    """The group called ``name``: a label, a variant or a run's name; None: see ``compare``.

    Raises ``ValueError`` where there is none, or more than one.
    """
    if name is None:
        return next((group for group in groups if group.variant == "standard"), groups[0])
    exact = [group for group in groups if group.label == name]
    found = exact or [
        group
        for group in groups
        if name == group.variant
        or any(
            name in (run.result.name, _without_seed(run.result.name, run.result.seed))
            for run in group.runs.values()
        )
    ]
    known = ", ".join(group.label for group in groups)
    if not found:
        raise ValueError(f"no baseline called {name!r} among the runs; there are: {known}")
    if len(found) > 1:
        several = ", ".join(group.label for group in found)
        raise ValueError(f"baseline {name!r} could be any of: {several}; give one of these names")
    return found[0]


def differing_settings(config: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What sets two configurations apart beside model, seed, name and how they were executed."""
    ours, theirs = _flat(config), _flat(other)
    return [
        f"{key} {json.dumps(ours.get(key))} against {json.dumps(theirs.get(key))}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name, without the model, the seed, the name and how it was executed."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        dotted = f"{prefix}{key}"
        table, _, field = dotted.partition(".")
        if dotted in ("name", "seed", "model") or field in _EXECUTION.get(table, ()):
            continue
        if isinstance(value, dict):
            flat.update(_flat(cast(dict[str, Any], value), f"{dotted}."))
        else:
            flat[dotted] = value
    return flat


def _value(point: CurvePoint, loss: Loss) -> float | None:
    return {"r": point.loss, "p": point.loss_p, "q": point.loss_q}[loss]


def _identity(run: Run) -> str:
    """What a run learns: its configuration without name, seed and how it was executed."""
    settings = {key: value for key, value in run.config.items() if key not in ("name", "seed")}
    for table, names in _EXECUTION.items():
        if isinstance(settings.get(table), dict):
            inner = cast(dict[str, Any], settings[table])
            settings[table] = {key: value for key, value in inner.items() if key not in names}
    return json.dumps([run.result.variant, settings], sort_keys=True)


def _labels(groups: Sequence[Mapping[int, Run]]) -> list[str]:
    firsts = [next(iter(group.values())).result for group in groups]
    variants = [result.variant for result in firsts]
    labels: list[str] = []
    for result in firsts:
        alone = variants.count(result.variant) == 1
        label = result.variant if alone else _without_seed(result.name, result.seed)
        number, unique = 2, label
        while unique in labels:
            unique, number = f"{label} ({number})", number + 1
        labels.append(unique)
    return labels


def _without_seed(name: str, seed: int) -> str:
    return re.sub(rf"([-_. ](seed|s)?|seed)[-_=]?0*{seed}$", "", name) or name
