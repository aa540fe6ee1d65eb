"""What one sequence does in one step: from the rows that were read to the tokens that stand."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from dualflow.engine.aux_rules import SURELY_SHARP, AuxRule, greedy_is_sure
from dualflow.engine.executor import Readout
from dualflow.engine.request import Request
from dualflow.engine.sampler import RequestSampler
from dualflow.engine.step_plan import SequencePlan
from dualflow.model.sampling import invert

_SHARE_STEP = 0.1


@dataclass(slots=True, eq=False)
class RequestState:
    """What the runner remembers of a request between steps.

    share: how often of late a position that could do without its auxiliary row needed it.
    """

    request: Request
    sampler: RequestSampler
    rule: AuxRule
    share: float = 0.5


@dataclass(frozen=True, slots=True)
class Picked:
    """A token and how it came about.

    row:      of the readout.
    by_p:     p stands in for r here: what is reported as log r is log p.
    source:   the flow it was drawn from, where that is known.
    """

    token_id: int
    row: int
    by_p: bool = False
    source: Literal["p", "q"] | None = None


@dataclass(slots=True, eq=False)
class Turn:
    """One sequence in one step.

    tokens:     its primary rows, guesses included; ``drafts`` are the guesses.
    rows:       its rows of the readout; a token may be decided at each of ``sample_rows``, the
                others report on the prompt.
    output:     what was generated before the position that is to be decided; ``start`` tokens
                before this step.
    picked:     tokens decided so far.
    ended:      whether no more follow in this step.
    """

    state: RequestState
    plan: SequencePlan
    tokens: tuple[int, ...]
    drafts: tuple[int, ...]
    rows: range
    sample_rows: range
    output: list[int]
    start: int
    picked: list[Picked] = field(default_factory=list)
    ended: bool = False
    error: str | None = None

    @property
    def accepted(self) -> int:
        """Guesses that held."""
        pairs = zip(self.picked, self.drafts, strict=False)
        return sum(picked.token_id == draft for picked, draft in pairs)

    def first_pass_aux(self) -> Iterator[tuple[int, bool]]:
        """Rows that get auxiliary rows in the first pass, and whether in any case (else: where
        execution is grouped).
        """
        rule = self.state.rule
        if rule.need == "never":
            return
        for row in range(self.rows.start, self.sample_rows.start):
            yield row, True
        for index, row in enumerate(self.sample_rows, self.start):
            if rule.need != "two_stage" or self.state.sampler.uniform(index) >= 0.5:
                yield row, not rule.decides_late

    def advance(self, readout: Readout, size: int) -> list[int]:
        """Decide tokens up to the first that needs an auxiliary row; returns the rows that need
        one, those of later guesses included. ``size``: ids from here on are padding.
        """
        last = len(self.sample_rows) - 1
        while not self.ended:
            place = len(self.picked)
            row = self.sample_rows[place]
            if self._needs_aux(readout, row, self.output, size):
                return [row, *self._later_needs(readout, place + 1, size)]
            picked = self._pick(readout, row, size)
            self.picked.append(picked)
            token = picked.token_id
            self.state.sampler.accepted(token)
            stops = token in self.state.request.stop_ids
            if place == last or stops or token != self.drafts[place]:
                self.ended = True
            else:
                self.output.append(token)
        return []

    def observe(self, alpha: Sequence[float] | None) -> None:
        """Learn how often the auxiliary is needed."""
        rule = self.state.rule
        if alpha is None or not rule.decides_late:
            return
        for index, picked in enumerate(self.picked, self.start):
            weight = alpha[picked.row]
            if rule.need == "two_stage":
                uniform = self.state.sampler.uniform(index)
                if uniform < 0.5:
                    continue
                needed = uniform >= weight
            else:
                limit = SURELY_SHARP if rule.need == "greedy" else rule.threshold
                needed = weight < limit
            self.state.share += _SHARE_STEP * (needed - self.state.share)

    def _later_needs(self, readout: Readout, place: int, size: int) -> list[int]:
        """Rows from ``place`` on that need an auxiliary row if the guesses before them hold."""
        rows, output = [], list(self.output)
        for later in range(place, len(self.sample_rows)):
            output.append(self.drafts[later - 1])
            if self._needs_aux(readout, self.sample_rows[later], output, size):
                rows.append(self.sample_rows[later])
        return rows

    def fail(self, error: str) -> None:
        """Give up on this sequence alone."""
        self.error, self.ended = error, True

    def _needs_aux(self, readout: Readout, row: int, output: list[int], size: int) -> bool:
        rule = self.state.rule
        if not rule.decides_late or readout.q_index[row] >= 0:
            return False
        assert readout.alpha is not None and readout.p is not None
        alpha = readout.alpha[row]
        if rule.need == "threshold":
            return alpha < rule.threshold
        sampler, p_V = self.state.sampler, readout.p[row]
        if rule.need == "two_stage":
            uniform = sampler.uniform(len(output))
            return uniform >= alpha or uniform / alpha >= real_share(p_V, size)
        if sampler.params.masks:
            mask_V = sampler.allowed_mask(output)
            if mask_V is not None:
                p_V = p_V.masked_fill(~mask_V.to(p_V.device), -float("inf"))
        elif alpha > SURELY_SHARP and size == len(p_V):
            return False
        first, second = p_V[:size].topk(min(2, size)).values.exp().tolist()[:2]
        return not greedy_is_sure(alpha, first, second)

    def _pick(self, readout: Readout, row: int, size: int) -> Picked:
        sampler, rule, output = self.state.sampler, self.state.rule, self.output
        if rule.need == "two_stage":
            return self._pick_in_two_stages(readout, row, size)
        by_p = False
        if rule.need == "threshold":
            assert readout.alpha is not None
            by_p = readout.alpha[row] >= rule.threshold
        if by_p and readout.q_index[row] >= 0:
            assert readout.p is not None
            target_V, best = readout.p[row], None
        else:
            target_V, best = readout.r[row], readout.best[row]
        if rule.coupled:
            assert readout.p is not None
            p_V = None if by_p or readout.q_index[row] < 0 else readout.p[row]
            token = draw_coupled(sampler, target_V, p_V, output)
        else:
            token = sampler.choose(target_V, output, best)
        return Picked(token, row, by_p, "p" if by_p else None)

    def _pick_in_two_stages(self, readout: Readout, row: int, size: int) -> Picked:
        """The flow first, then the token from it: together a token of r.

        Padding has no place in r but a share of p and of q. Where the draw falls on it, the token
        is drawn anew from r, which is what r's share is scaled up by.
        """
        assert readout.alpha is not None and readout.p is not None
        sampler, output = self.state.sampler, self.output
        uniform, alpha = sampler.uniform(len(output)), readout.alpha[row]
        if uniform < alpha:
            source, log_V, quantile = "p", readout.p[row], uniform / alpha
        else:
            assert readout.q is not None
            source, log_V = "q", readout.q[readout.q_index[row]]
            quantile = (uniform - alpha) / (1 - alpha)
        share = real_share(log_V, size)
        if quantile >= share:
            again = sampler.draft_uniform(len(output), "residual")
            return Picked(sampler.draw(readout.r[row], output, again), row)
        return Picked(sampler.draw(log_V, output, quantile / share), row, source=source)


def real_share(log_V: Tensor, size: int) -> float:
    """The probability of the ids below ``size``, the rest being padding."""
    if size == len(log_V):
        return 1.0
    return 1.0 - float(log_V[size:].double().exp().sum())


def guess(sampler: RequestSampler, log_p_V: Tensor, output: list[int], best: int) -> int:
    """The primary's own guess at the token that ``draw_coupled`` will draw, or at the arg max."""
    if sampler.params.greedy:
        return sampler.choose(log_p_V, output, best)
    return sampler.draw(log_p_V, output, sampler.draft_uniform(len(output), "draft"))


def draw_coupled(
    sampler: RequestSampler, log_r_V: Tensor, log_p_V: Tensor | None, output: list[int]
) -> int:
    """A token of the shaped r that equals the primary's guess as often as can be: the guess x is
    kept with probability min(1, r(x) / p(x)), and otherwise replaced by one from the positive part
    of r − p (Leviathan et al. 2023; Chen et al. 2023).

    Every position draws its token so, guessed beforehand or not: how many guesses a step has room
    for changes no token. ``log_p_V`` None: p is r.
    """
    index = len(output)
    uniform = sampler.draft_uniform(index, "draft")
    if log_p_V is None:
        return sampler.draw(log_r_V, output, uniform)
    token = sampler.draw(log_p_V, output, uniform)
    r_V, p_V = sampler.shape(log_r_V, output).exp(), sampler.shape(log_p_V, output).exp()
    if sampler.draft_uniform(index, "accept") * float(p_V[token]) < float(r_V[token]):
        return token
    rest_V = (r_V - p_V).clamp_min(0)
    total = float(rest_V.sum())
    if total <= 0:
        return token  # r is p but for rounding
    return invert(rest_V, sampler.draft_uniform(index, "residual"))
