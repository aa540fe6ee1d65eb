"""Plots of a comparison as PNG and SVG. Needs matplotlib (the extra ``plot``); no torch here.

Colours are Okabe and Ito's, which colour-blind people can tell apart; line styles and markers say
the same once more. Ink is one fixed colour, so that a page can swap it for its own.
"""

import io
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dualflow.evaluate.compare import Comparison
from dualflow.evaluate.curves import Axis, loss_at, spent, tokens_of
from dualflow.evaluate.groups import Group
from dualflow.evaluate.statistics import PairedDifference, Summary, summarize
from dualflow.extras import require_extra

INK = "#22262b"
"""Colour of text and axes in every plot."""

_BASELINE_COLOUR = "#7a828c"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_STYLES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "figure.dpi": 160,
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.size": 10,
    "grid.alpha": 0.18,
    "grid.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,  # a run's name may hold a dollar sign
    "xtick.color": INK,
    "ytick.color": INK,
}

SKIPPED_START = 0.2
"""The part of a curve, its steep start, for which the loss axis makes no room."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A drawn figure.

    name:     of its files, without an ending.
    title:    for a caption.
    summary:  what it shows, for those who do not see it.
    """

    name: str
    title: str
    summary: str
    png: bytes
    svg: str


def comparison_plots(comparison: Comparison) -> list[Plot]:
    """Loss over tokens, loss over training FLOPs, and differences by seed where there are any.

    Raises ``MissingExtraError`` where matplotlib is missing.
    """
    plots = [
        curve_plot(comparison.groups, "tokens"),
        curve_plot(comparison.groups, "training FLOPs"),
    ]
    paired = {
        contrast.group.label: contrast.final
        for contrast in comparison.contrasts
        if contrast.final is not None
    }
    if paired:
        plots.append(difference_plot(paired, comparison.baseline.label))
    return plots


def curve_plot(groups: Sequence[Group], axis: Axis) -> Plot:
    """Validation loss of r over ``axis``: the mean of each group, and a band over its seeds."""
    with _canvas(7.2, 4.4) as (figure, axes):
        shown: list[float] = []
        for index, group in enumerate(groups):
            spread = spread_over_seeds(group, axis)
            if not spread:  # seeds of different lengths may share no place at which all can be read
                continue
            at = [point.at for point in spread]
            means = [point.mean for point in spread]
            axes.fill_between(
                at,
                [point.low for point in spread],
                [point.high for point in spread],
                color=_colour(index),
                alpha=0.18,
                linewidth=0,
            )
            axes.plot(
                at,
                means,
                color=_colour(index),
                label=_label(group),
                linestyle=_STYLES[index % len(_STYLES)],
                linewidth=2,
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=4,
                zorder=3,
            )
            late = [point for point in spread if point.at >= SKIPPED_START * at[-1]]
            shown += [value for point in late for value in (point.low, point.high)]
        if shown:
            _focus(axes, shown)
            axes.legend(loc="upper right")
        ticker = cast(Any, require_extra("matplotlib.ticker", "plot", "drawing plots"))
        axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=" "))
        axes.set_xlabel("training tokens" if axis == "tokens" else "training FLOPs")
        axes.set_ylabel("validation loss (nats per token)")
        title = "Validation loss over " + axes.get_xlabel()
        axes.set_title(title)
        several = any(len(group.runs) > 1 for group in groups)
        summary = f"{title}, a line per variant"
        summary += "; bands reach from the lowest to the highest seed." if several else "."
        return _plot(figure, f"loss-over-{axis.lower().replace(' ', '-')}", title, summary)


def difference_plot(paired: Mapping[str, PairedDifference], baseline: str) -> Plot:
    """The final loss less the baseline's, a dot per seed, with the mean and its standard error."""
    with _canvas(7.2, 1.5 + 0.55 * len(paired)) as (figure, axes):
        for index, (label, difference) in enumerate(paired.items(), start=1):
            values = list(difference.differences.values())
            _dots(axes, values, difference.summary, index, height=-index, label=label)
        axes.axvline(0, color=INK, linewidth=1)
        _rows(axes, list(paired))
        axes.set_xlabel(
            f"validation loss less {baseline}'s (nats per token); left of zero is lower"
        )
        title = f"Difference to {baseline}, seed by seed"
        axes.set_title(title)
        return _plot(
            figure,
            "difference-by-seed",
            title,
            f"{title}: a dot per seed; the bar is the mean and its standard error.",
        )


def final_loss_plot(values: Mapping[str, Sequence[float]]) -> Plot:
    """Final losses by variant, a dot per seed, with the mean and its standard error."""
    with _canvas(7.2, 1.5 + 0.55 * len(values)) as (figure, axes):
        for index, (label, losses) in enumerate(values.items()):
            _dots(axes, losses, summarize(losses), index, height=-index - 1, label=label)
        _rows(axes, list(values))
        axes.set_xlabel("validation loss (nats per token)")
        title = "Final validation loss by variant"
        axes.set_title(title)
        return _plot(
            figure,
            "final-loss",
            title,
            f"{title}: a dot per seed; the bar is the mean and its standard error.",
        )


@dataclass(frozen=True)
class Spread:
    """Losses over a group's seeds at one place of the axis."""

    at: float
    mean: float
    low: float
    high: float


def spread_over_seeds(group: Group, axis: Axis) -> list[Spread]:
    """A group's curves wherever one of its runs was validated and all of them can be read."""
    runs = list(group.runs.values())
    places = sorted({spent(run, axis, point.tokens) for run in runs for point in run.curve})
    spread: list[Spread] = []
    for place in places:
        losses = [loss_at(run, tokens_of(run, axis, place)) for run in runs]
        known = [loss for loss in losses if loss is not None]
        if len(known) == len(runs):
            spread.append(Spread(place, summarize(known).mean, min(known), max(known)))
    return spread


def write_plots(plots: Sequence[Plot], folder: Path) -> list[Path]:
    """Write each plot as PNG and SVG into ``folder``; returns the files."""
    written: list[Path] = []
    for plot in plots:
        (folder / f"{plot.name}.png").write_bytes(plot.png)
        (folder / f"{plot.name}.svg").write_text(plot.svg, encoding="utf-8")
        written += [folder / f"{plot.name}.png", folder / f"{plot.name}.svg"]
    return written


@contextmanager
def _canvas(width: float, height: float) -> Generator[tuple[Any, Any], None, None]:
    """A figure and its axes, to be drawn and saved inside: text is set as it is made."""
    matplotlib = cast(Any, require_extra("matplotlib", "plot", "drawing plots"))
    figures = cast(Any, require_extra("matplotlib.figure", "plot", "drawing plots"))
    with matplotlib.rc_context(_STYLE):
        # No pyplot: nothing is kept between figures and no display is looked for.
        figure = figures.Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.add_subplot()


def _plot(figure: Any, name: str, title: str, summary: str) -> Plot:
    import matplotlib

    png, svg = io.BytesIO(), io.StringIO()
    with cast(Any, matplotlib).rc_context({"svg.hashsalt": name}):
        figure.savefig(png, format="png", metadata={"Software": None})
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return Plot(name=name, title=title, summary=summary, png=png.getvalue(), svg=svg.getvalue())


def _dots(
    axes: Any, values: Sequence[float], summary: Summary, index: int, *, height: int, label: str
) -> None:
    colour, marker = _colour(index), _MARKERS[index % len(_MARKERS)]
    # Seeds are set a little apart, so that equal values do not hide each other.
    shifts = [
        0.0 if len(values) == 1 else 0.3 * i / (len(values) - 1) - 0.15 for i in range(len(values))
    ]
    heights = [height - shift for shift in shifts]
    axes.scatter(values, heights, s=26, color=colour, alpha=0.55, linewidth=0, marker=marker)
    axes.errorbar(
        [summary.mean],
        [height],
        xerr=None if summary.standard_error is None else [summary.standard_error],
        color=colour,
        capsize=4,
        elinewidth=2,
        fmt="|",
        markersize=16,
        markeredgewidth=2.5,
        zorder=4,
    )


def _rows(axes: Any, labels: Sequence[str]) -> None:
    axes.set_yticks([-index for index in range(1, len(labels) + 1)], labels)
    axes.set_ylim(-len(labels) - 0.6, -0.4)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _focus(axes: Any, shown: Sequence[float]) -> None:
    """Fit the loss axis to ``shown``, so that late differences can be seen."""
    low, high = min(shown), max(shown)
    margin = 0.06 * (high - low) or 0.05
    axes.set_ylim(low - margin, high + margin)


def _label(group: Group) -> str:
    count = len(group.runs)
    text = f"{group.label} ({count} seed{'s' if count > 1 else ''})"
    # matplotlib leaves labels with a leading underscore out of the legend.
    return f" {text}" if text.startswith("_") else text


def _colour(index: int) -> str:
    return _BASELINE_COLOUR if index == 0 else _COLOURS[(index - 1) % len(_COLOURS)]
