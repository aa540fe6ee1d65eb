"""What a comparison says, in sentences that claim no more than the seeds show. No torch here."""

from dualflow.evaluate.compare import Comparison, Contrast
from dualflow.evaluate.curves import Matched
from dualflow.evaluate.statistics import PairedDifference
from dualflow.evaluate.tables import quantity, signed, wins


def findings(comparison: Comparison) -> list[str]:
    """One sentence or two per contrast and question, whichever side is lower."""
    base = comparison.baseline.label
    sentences: list[str] = []
    for contrast in comparison.contrasts:
        sentences += _of_contrast(contrast, base)
    if not comparison.contrasts:
        sentences.append(f"There is only {base}: nothing to compare it with.")
    return sentences


def verdict(name: str, other: str, paired: PairedDifference) -> str:
    """Which of two is lower, by how much, and whether the seeds tell them apart."""
    summary = paired.summary
    if signed(summary.mean).startswith(("+", "−")):
        lower, higher = (name, other) if summary.mean < 0 else (other, name)
        text = f"{lower} is lower than {higher} by {abs(summary.mean):.4f} nats"
    else:
        text = f"{name} and {other} are equal to four decimals"
    if summary.interval is None:
        return f"{text}, in one seed: nothing can be said of the spread over seeds."
    low, high = summary.interval
    text += (
        f" on average (± {summary.standard_error:.4f}, the standard error over {summary.count} "
        f"paired seeds; {name} is lower in {wins(paired)})"
    )
    interval = f"the 95% interval of the difference, {signed(low)} to {signed(high)},"
    if low <= 0 <= high:
        return f"{text}. These seeds do not tell the two apart: {interval} includes zero."
    return f"{text}; {interval} excludes zero."


def _of_contrast(contrast: Contrast, base: str) -> list[str]:
    label = contrast.group.label
    if contrast.final is None:
        return [f"{label} shares no seed with {base}: their difference cannot be paired."]
    sentences = ["At the end of training, " + verdict(label, base, contrast.final)]
    if contrast.final_p is not None:
        off = f"{label} with its auxiliary off"
        sentences.append("Read from p, " + verdict(off, base, contrast.final_p))
    if contrast.flops:
        matched = contrast.flops[-1]
        sentence = f"At equal training FLOPs ({quantity(matched.budget)}), "
        sentence += verdict(label, base, matched.difference)
        sentences.append(sentence + _cut_short(matched, label, base))
    return sentences


def _cut_short(matched: Matched, label: str, base: str) -> str:
    short = [
        f"{name} after {quantity(side.tokens)} of its {quantity(side.end)} tokens"
        for name, side in ((base, matched.baseline), (label, matched.group))
        if side.cut_short
    ]
    if not short:
        return ""
    return (
        f" This reads {' and '.join(short)}, before its learning-rate schedule had ended, "
        "which counts against that side."
    )
