"""A comparison as one HTML page that needs nothing from outside: tables, inline SVG, method.

Everything that comes from a run (names, variants, settings) is escaped.
"""

import html
import re
from collections.abc import Sequence

from dualflow.evaluate.compare import Comparison
from dualflow.evaluate.findings import findings
from dualflow.evaluate.plots import INK, Plot
from dualflow.evaluate.tables import comparison_tables, to_html

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #22262b; --soft: #5b6570;
  --line: #d9dee3; --panel: #f6f8fa; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --ink: #e4e8ec; --soft: #9aa5b1;
  --line: #323a42; --panel: #1c2125; --accent: #56b4e9; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2.5rem 1.25rem 4rem; background: var(--ground);
  color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.1rem; margin: 2.4rem 0 .6rem; }
.lead { color: var(--soft); margin: 0 0 1.5rem; }
.findings { border-left: 4px solid var(--accent); background: var(--panel); margin: 0;
  padding: .8rem 1.2rem .8rem 2.2rem; border-radius: 0 6px 6px 0; }
.findings li + li { margin-top: .5rem; }
.warning { border-color: #d55e00; margin-top: 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .7rem; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; }
thead th { border-bottom: 2px solid var(--line); color: var(--soft); font-weight: 600; }
tbody tr + tr > * { border-top: 1px solid var(--line); }
.note, figcaption, details { color: var(--soft); font-size: .88rem; }
figure { margin: 1.6rem 0; }
figure svg { display: block; width: 100%; height: auto; max-width: 46rem; color: var(--ink); }
details { margin-top: 2.4rem; }
summary { cursor: pointer; color: var(--ink); font-weight: 600; }
@media print { body { max-width: none; } }
"""

_METHOD = """
<p>Runs that differ in their seed alone form one variant. Differences are taken between runs of the
same seed, which share the order of the data and the initial values of every parameter that both
have; their mean is given with its standard error over seeds (sample deviation over √n), and the 95%
interval is Student's t with n − 1 degrees of freedom, which supposes that the differences scatter
normally. With few seeds that interval is wide, and it should be.</p>
<p>Losses are means of −log probability of the next token over the validation split, in nats. r is
the distribution a model predicts with. Where a model has two, p is that of the primary flow and q
that of the auxiliary.</p>
<p>FLOPs are counted by formula: a multiply-add is 2; prefill at the sequence's length, by the
primary alone, causal attention counted half, one head row; decode at a context of the sequence's
length; training as forward and backward of every row, the backward twice the forward. What a
variant runs beside the primary at the last prompt position counts as the first decoded token.
Equal FLOPs are not equal time.</p>
<p>At equal training FLOPs each curve is read where the budget ends. The side that is read before
its own end had a learning rate that was still to fall, so that this reading is not what a run
planned for that budget would reach.</p>
"""


def report_html(
    comparison: Comparison, plots: Sequence[Plot], *, title: str = "Comparison of runs"
) -> str:
    """The whole page. Without plots it says how to get them."""
    said = "\n".join(f"<li>{html.escape(sentence)}</li>" for sentence in findings(comparison))
    figures = "\n".join(_figure(plot) for plot in plots)
    if not plots:
        figures = (
            "<p class=note>No plots: matplotlib is not installed "
            "(pip install 'dualflow[plot]').</p>"
        )
    tables = [to_html(table) for table in comparison_tables(comparison)]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="dualflow">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p class="lead">{html.escape(_lead(comparison))}</p>
<ul class="findings">
{said}
</ul>
{_notes(comparison)}
{"".join(tables[:2])}
<h2>Curves</h2>
{figures}
{"".join(tables[2:])}
<details>
<summary>Method</summary>
{_METHOD}</details>
</body>
</html>
"""


def inline_svg(plot: Plot) -> str:
    """The plot's SVG for use inside a page: no prologue, no namespaces, no ground, ink of the page.

    Its ids get the plot's name in front, since a page with several plots needs them unique.
    """
    svg = plot.svg[plot.svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(xmlns(:\w+)?|version|width|height)="[^"]*"', "", opening)
    svg = f'{opening} role="img" aria-label="{html.escape(plot.summary)}">{rest}'
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{plot.name}-", svg)
    svg = re.sub(
        r'(<g id="[^"]*patch_1">.*?)fill: #ffffff', r"\1fill: none", svg, count=1, flags=re.DOTALL
    )
    return re.sub(re.escape(INK), "currentColor", svg, flags=re.IGNORECASE)


def _figure(plot: Plot) -> str:
    return (
        f"<figure>{inline_svg(plot)}<figcaption>{html.escape(plot.summary)}</figcaption></figure>"
    )


def _lead(comparison: Comparison) -> str:
    runs = sum(len(group.runs) for group in comparison.groups)
    others = ", ".join(contrast.group.label for contrast in comparison.contrasts)
    against = f"; {others} against {comparison.baseline.label}" if others else ""
    return f"{runs} run{'s' if runs > 1 else ''}{against}."


def _notes(comparison: Comparison) -> str:
    if not comparison.notes:
        return ""
    items = "\n".join(f"<li>{html.escape(note)}</li>" for note in comparison.notes)
    return (
        f'<ul class="findings warning" aria-label="Before you trust these figures">\n{items}\n</ul>'
    )
