"""Tables and a plot from an experiment's ``results.json`` alone. No torch here.

The file is a list of flat rows, one per run: ``variant``, ``seed``, ``tokens``, ``val_loss``,
``val_loss_p``, ``val_loss_q`` and whatever else the experiment recorded. ``python -m
dualflow.evaluate.experiment results.json --out FOLDER`` prints the table and writes the plot.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from dualflow.evaluate.plots import final_loss_plot, write_plots
from dualflow.evaluate.runs import RunError, check_value
from dualflow.evaluate.statistics import paired_difference, summarize
from dualflow.evaluate.tables import NOTHING, Table, difference, mean, quantity, to_markdown, wins
from dualflow.extras import MissingExtraError


@dataclass(frozen=True, kw_only=True)
class ExperimentRow:
    """One run of an experiment; losses in nats per token, None where undefined."""

    variant: str
    seed: int
    tokens: int
    val_loss: float
    val_loss_p: float | None
    val_loss_q: float | None


def read_experiment(path: str | Path) -> list[ExperimentRow]:
    """Read ``results.json``. Raises ``RunError``: missing, malformed, empty, a seed twice."""
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(data, list) or not data:
        raise RunError(f"{path}: expected a list of at least one row")
    rows = [_row(entry, f"{path}, row {i}") for i, entry in enumerate(cast(list[Any], data), 1)]
    seen: set[tuple[str, int]] = set()
    for row in rows:
        if (row.variant, row.seed) in seen:
            raise RunError(f"{path}: variant {row.variant!r} has seed {row.seed} twice")
        seen.add((row.variant, row.seed))
    return rows


def experiment_table(rows: Sequence[ExperimentRow], baseline: str = "standard") -> Table:
    """Mean ± standard error of r, p and q per variant, and differences of r paired by seed.

    Raises ``ValueError`` where there is no variant called ``baseline``.
    """
    variants = list(dict.fromkeys(row.variant for row in rows))
    if baseline not in variants:
        raise ValueError(f"no variant called {baseline!r}; there are: {', '.join(variants)}")
    base = _losses(rows, baseline, "val_loss")
    lines: list[tuple[str, ...]] = []
    for variant in variants:
        losses = _losses(rows, variant, "val_loss")
        paired = None if variant == baseline else paired_difference(losses, base)
        columns = [
            mean(summarize(list(found.values())) if found else None)
            for found in (losses, *(_losses(rows, variant, f"val_loss_{x}") for x in "pq"))
        ]
        tokens = sorted({row.tokens for row in rows if row.variant == variant})
        trained = " … ".join(quantity(count) for count in sorted({tokens[0], tokens[-1]}))
        lines.append(
            (variant, str(len(losses)), trained, *columns, difference(paired), wins(paired))
        )
    return Table(
        title="Final validation loss (nats per token)",
        columns=("variant", "seeds", "tokens", "r", "p", "q", f"r − {baseline}", "lower in"),
        rows=tuple(lines),
        caption=(
            "Mean ± standard error over seeds; differences are paired by seed. "
            f"{NOTHING}: the variant has no such distribution."
        ),
    )


def write_experiment_plot(
    rows: Sequence[ExperimentRow], folder: str | Path, baseline: str = "standard"
) -> list[Path]:
    """Write the final losses by variant as PNG and SVG. Raises ``MissingExtraError``."""
    in_order = list(dict.fromkeys(row.variant for row in rows))
    variants = sorted(in_order, key=lambda variant: variant != baseline)
    values = {name: list(_losses(rows, name, "val_loss").values()) for name in variants}
    Path(folder).mkdir(parents=True, exist_ok=True)
    return write_plots([final_loss_plot(values)], Path(folder))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of a results.json and, with ``--out``, write the plot; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dualflow.evaluate.experiment",
        description="Print the table of an experiment's results.json and draw its plot.",
    )
    parser.add_argument("results", help="the results.json of an experiment")
    parser.add_argument("--baseline", default="standard", help="variant the others are set against")
    parser.add_argument("--out", help="folder for the plot and the table")
    args = parser.parse_args(argv)
    try:
        rows = read_experiment(args.results)
        markdown = to_markdown(experiment_table(rows, args.baseline))
        print(markdown, end="")
        if args.out is not None:
            Path(args.out).mkdir(parents=True, exist_ok=True)
            (Path(args.out) / "table.md").write_text(markdown, encoding="utf-8")
            for path in write_experiment_plot(rows, args.out, args.baseline):
                print(f"wrote {path}", file=sys.stderr)
    except (ValueError, OSError, MissingExtraError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def _row(entry: Any, where: str) -> ExperimentRow:
    if not isinstance(entry, dict):
        raise RunError(f"{where}: expected an object, found {entry!r}")
    record = cast(dict[str, Any], entry)
    values: dict[str, Any] = {}
    for field in fields(ExperimentRow):
        if field.name not in record:
            raise RunError(f"{where}: {field.name} is missing")
        values[field.name] = check_value(field.type, record[field.name], where, field.name)
    return ExperimentRow(**values)


def _losses(rows: Sequence[ExperimentRow], variant: str, column: str) -> dict[int, float]:
    found = {row.seed: getattr(row, column) for row in rows if row.variant == variant}
    return {seed: value for seed, value in found.items() if value is not None}


if __name__ == "__main__":
    sys.exit(main())
