"""Table and plot from results.json alone: ``python render.py results.json --out FOLDER``."""

import argparse
import io
import json
from pathlib import Path
from statistics import mean

from cells import BEST, CORPORA, OBJECTIVE_RANK, RANKS

from dualflow.evaluate.plots import INK, Plot, write_plots
from dualflow.evaluate.tables import NOTHING, Table, to_markdown

Row = dict
BASE_COLOUR, AUX_COLOUR, CONTROL_COLOUR = "#7a828c", "#0072b2", "#d55e00"
LOSSES = ("loss_p", "loss_r_after", "loss_q_after", "loss_mixture_after", "loss_learned_after")


def render(results: Path, folder: Path) -> None:
    """Write table.md, and loss-by-rank.png and .svg where there is anything to draw."""
    rows = json.loads(results.read_text(encoding="utf-8"))
    tables = [*(rank_table(rows, corpus) for corpus in CORPORA),
              *(objective_table(rows, corpus) for corpus in CORPORA)]  # fmt: skip
    text = "\n".join(to_markdown(table) for table in tables if table.rows)
    (folder / "table.md").write_text(text, encoding="utf-8")
    write_plots([loss_plot(rows)], folder)


def rank_table(rows: list[Row], corpus: str) -> Table:
    """The auxiliary and the control by rank."""
    lines = []
    for trained, objective in (("aux", BEST), ("primary", "primary_only")):
        for rank in sorted(RANKS):
            own = _cell(rows, corpus, trained, rank, objective)
            if own:
                parameters = f"{own[0]['trainable_parameters'] / 1e6:.2f} M"
                lines.append((trained, str(rank), parameters, *_losses(own), _gain(own)))
    columns = ("trained", "rank", "trainable", "p", "r after", "q", "mixture", "learned", "r − p")
    return Table(
        title=f"{corpus}: held-out loss (nats per token) by rank",
        columns=columns,
        rows=tuple(lines),
        caption=(
            f"Mean over seeds, in brackets seed by seed. aux: trained and read as {BEST}; p is "
            "the frozen primary, before and after; mixture and learned: the same auxiliary read "
            f"otherwise. primary: the control, r is its own distribution. {NOTHING}: not there."
        ),
    )


def objective_table(rows: list[Row], corpus: str) -> Table:
    """What is trained against what is read, at one rank."""
    lines = []
    for objective in (BEST, "learned", "mixture"):
        own = _cell(rows, corpus, "aux", OBJECTIVE_RANK, objective)
        if own:
            fitted = _spread([row["loss_fitted_after"] for row in own])
            lines.append((objective, *_losses(own), fitted))
    return Table(
        title=f"{corpus}: held-out loss by objective, rank {OBJECTIVE_RANK}",
        columns=(
            "trained with",
            "p",
            "r after",
            "read as q",
            "as mixture",
            "as learned",
            "α fitted after",
        ),
        rows=tuple(lines),
        caption=(
            "r after is the readout that was trained. As learned: with the trained α where there "
            "is one, else as fitted after. Mean over seeds, in brackets seed by seed."
        ),
    )


def loss_plot(rows: list[Row]) -> Plot:
    """Held-out loss by rank: before, with the auxiliary, and of the control; a panel a corpus."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.0), layout="constrained", dpi=160)
    panels = figure.subplots(1, len(CORPORA))
    for axes, corpus in zip(panels, CORPORA, strict=True):
        own = [row for row in rows if row["corpus"] == corpus]
        axes.set_title(corpus, loc="left", fontweight="bold", color=INK)
        for spine in ("top", "right"):
            axes.spines[spine].set_visible(False)
        axes.grid(axis="y", alpha=0.18)
        axes.set_xticks(range(len(RANKS)), [f"rank {rank}" for rank in sorted(RANKS)])
        axes.set_xlim(-0.5, len(RANKS) - 0.5)
        if not own:
            continue
        axes.axhline(own[0]["loss_p"], color=BASE_COLOUR, label="before (p)", linewidth=1.5)
        _series(axes, own, "aux", BEST, "frozen primary + auxiliary (r)", AUX_COLOUR, "o", -0.1)
        _series(
            axes, own, "primary", "primary_only", "control: primary adapted", CONTROL_COLOUR, "s",
            0.1,
        )  # fmt: skip
    panels[0].set_ylabel("held-out loss (nats per token)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    title = "Held-out loss before and after training, by LoRA rank"
    summary = f"{title}: a mark per seed, a line through the means; lower is better."
    return Plot(name="loss-by-rank", title=title, summary=summary, **_images(figure))


def _series(axes, rows, trained, objective, label, colour, marker, shift) -> None:
    at, means = [], []
    for index, rank in enumerate(sorted(RANKS)):
        losses = [
            row["loss_r_after"] for row in rows
            if (row["trained"], row["lora_rank"], row["objective"]) == (trained, rank, objective)
        ]  # fmt: skip
        if losses:
            axes.scatter([index + shift] * len(losses), losses, color=colour, marker=marker, s=30,
                         alpha=0.6, linewidth=0)  # fmt: skip
            at.append(index + shift)
            means.append(mean(losses))
    if at:
        axes.plot(at, means, color=colour, marker="_", markersize=14, linewidth=1, label=label)


def _images(figure) -> dict:
    import matplotlib

    png, svg = io.BytesIO(), io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "loss-by-rank", "svg.fonttype": "none"}):
        figure.savefig(png, format="png", metadata={"Software": None})
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return {"png": png.getvalue(), "svg": svg.getvalue()}


def _cell(rows: list[Row], corpus: str, trained: str, rank: int, objective: str) -> list[Row]:
    key = (corpus, trained, rank, objective)
    return [r for r in rows if (r["corpus"], r["trained"], r["lora_rank"], r["objective"]) == key]


def _losses(rows: list[Row]) -> tuple[str, ...]:
    return tuple(_spread([row[name] for row in rows if name in row]) for name in LOSSES)


def _gain(rows: list[Row]) -> str:
    return f"{mean(row['loss_r_after'] - row['loss_r_before'] for row in rows):+.3f}".replace(
        "-", "−"
    )


def _spread(values: list[float]) -> str:
    if not values:
        return NOTHING
    if len(set(values)) == 1:
        return f"{values[0]:.3f}"
    return f"{mean(values):.3f} ({', '.join(f'{v:.3f}' for v in values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    render(args.results, args.out)


if __name__ == "__main__":
    main()
