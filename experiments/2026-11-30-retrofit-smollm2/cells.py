"""What is compared: the cells of the grid, in the order in which they are worth having."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CORPORA = ("python-stdlib", "gcide")
SEEDS = (0, 1)
RANKS = (8, 0, 32)
BEST = "aux_only"
"""The objective that the ranks are compared under."""
OTHERS = ("learned", "mixture")
"""The objectives that are compared with it, at ``OBJECTIVE_RANK``."""
OBJECTIVE_RANK = 8


@dataclass(frozen=True)
class Cell:
    """One training run.

    trained:    ``aux``: an auxiliary flow beside the frozen primary; ``primary``: the control,
                which adapts the primary itself.
    objective:  the readout whose loss is trained; the control has its own distribution alone.
    """

    corpus: str
    seed: int
    trained: Literal["aux", "primary"]
    lora_rank: int
    objective: str

    def name(self, tokens: int) -> str:
        """The cell's file in the folder of runs: all that decides its figures."""
        parts = (self.corpus, self.trained, f"r{self.lora_rank}", self.objective, f"s{self.seed}")
        return "-".join((*parts, f"{tokens}tokens"))


def grid() -> list[Cell]:
    """Every cell. A grid stopped early still answers something: one seed of both corpora first,
    the control right after the ranks, the other objectives at the end. Cells of one corpus follow
    one another, as the primary's passes over it are kept in memory.
    """
    found: list[Cell] = []
    for seed in SEEDS:
        for corpus in CORPORA:
            found += [Cell(corpus, seed, "aux", rank, BEST) for rank in RANKS]
            found += [Cell(corpus, seed, "primary", rank, "primary_only") for rank in RANKS]
    for seed in SEEDS:
        for corpus in CORPORA:
            found += [Cell(corpus, seed, "aux", OBJECTIVE_RANK, other) for other in OTHERS]
    return found


def chosen(cells: Sequence[Cell], words: Sequence[str], tokens: int) -> list[Cell]:
    """The cells whose name holds every word; no words choose all."""
    return [cell for cell in cells if all(word in cell.name(tokens) for word in words)]
