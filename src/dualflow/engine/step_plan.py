"""The contract between who decides and who computes: a plan goes in, a result comes out. No torch.

Both are frozen: a runner decides nothing about requests, and the scheduler computes nothing.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """What one sequence does in a step.

    tokens:          its primary rows, at positions ``start``, ``start + 1``, ...; the last
                     ``num_drafts`` of them are guesses that are to be verified.
    pages:           pages of all positions up to the last row's, and of the rows that
                     ``primary_drafts`` will need.
    write_from:      keys and values of positions below this are in the pages already, which may be
                     shared, and must not be written again.
    num_read:        trailing rows whose next-token distribution is wanted; 0: a chunk of the
                     prompt that is not its last.
    samples:         whether a token is to be chosen (at each of the last ``num_drafts + 1`` rows,
                     as far as guesses hold); rows read beyond those report prompt logprobs.
    primary_drafts:  guesses that the runner makes with the primary alone before it verifies them.
    """

    request_id: str
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    write_from: int
    num_read: int
    samples: bool
    num_drafts: int = 0
    primary_drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One model step. ``copies`` are (source, target) pages to copy before it."""

    sequences: tuple[SequencePlan, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Primary rows, those of drafts that are still to be made included."""
        return sum(len(s.tokens) + s.primary_drafts for s in self.sequences)


@dataclass(frozen=True, slots=True)
class Choice:
    """One token and what the model thought of it: natural logarithms, before temperature and cuts.

    log_q is None where the auxiliary flow did not run, ``alpha`` also where r is no mixture.
    ``source`` says which flow's distribution the token was drawn from, where that is known.
    ``top`` holds the most probable (id, log r), the best first.
    """

    token_id: int
    log_r: float
    log_p: float | None = None
    log_q: float | None = None
    alpha: float | None = None
    source: Literal["p", "q"] | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What a sequence's rows gave.

    tokens:           new tokens, in order; with drafts several.
    prompt:           for the rows that report prompt logprobs: the prompt's own next token.
    aux_positions:    positions at which the auxiliary flow ran.
    drafted, accepted: guesses verified, and how many of them held.
    error:            this sequence alone failed (say, NaN probabilities), and why.
    """

    request_id: str
    tokens: tuple[Choice, ...] = ()
    prompt: tuple[Choice, ...] = ()
    aux_positions: int = 0
    drafted: int = 0
    accepted: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One result for each sequence of the plan, in its order.

    execution: ``grouped``: both flows in one pass; ``lazy``: the auxiliary in a pass of its own,
    where it turned out to be needed; ``primary``: no auxiliary row was wanted.
    """

    sequences: tuple[SequenceResult, ...]
    execution: Literal["grouped", "lazy", "primary"] = "primary"
