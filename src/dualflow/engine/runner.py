"""One model step: a plan becomes rows, rows become distributions, distributions become tokens.

The runner decides nothing about requests. Which rows get auxiliary rows follows from each request's
rule (``aux_rules``), whether they run with the primary's or after them from costs (``execution``).
"""

import math
from collections.abc import Sequence

from torch import Tensor

from dualflow.engine.aux_rules import aux_rule
from dualflow.engine.execution import OptionalRow, StepShape, choose_execution
from dualflow.engine.executor import Executor, Readout, SequenceRows, StepRows
from dualflow.engine.request import Request
from dualflow.engine.sampler import RequestSampler
from dualflow.engine.step_plan import Choice, SequenceResult, StepPlan, StepResult
from dualflow.engine.turns import Picked, RequestState, Turn, guess, real_share
from dualflow.plan.roofline import Machine, ModelWork, model_work
from dualflow.spec import ModelConfig

_FAILURES = (ValueError, RuntimeError, ArithmeticError)
"""What sampling one sequence may raise without the others being hurt."""

_NOT_NUMBERS = (
    "the model's probabilities are not numbers (NaN); "
    "its weights are damaged or overflow this dtype"
)


class Runner:
    """Runs plans with one executor.

    work, machine: what passes cost, for the choice between grouped and lazy execution; None: by
                   formula, on a small CPU.
    """

    def __init__(
        self,
        executor: Executor,
        config: ModelConfig,
        *,
        work: ModelWork | None = None,
        machine: Machine | None = None,
    ) -> None:
        self._executor, self._config = executor, config
        self._work = work or model_work(config)
        self._machine = machine or Machine()
        self._size = config.num_real_tokens
        self._padded = config.num_real_tokens < config.vocab_size
        self._states: dict[str, RequestState] = {}

    def add(self, request: Request, sampler: RequestSampler) -> None:
        """Take on a request; its tokens are chosen by ``sampler``.

        Raises ``RequestError`` where the model cannot do what its parameters ask.
        """
        rule = aux_rule(request.params, self._config)
        self._states[request.id] = RequestState(request, sampler, rule)

    def drop(self, request_id: str) -> None:
        """Forget a request; one that is not known is none."""
        self._states.pop(request_id, None)

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step. What fails in one sequence alone is that sequence's ``error``."""
        if plan.copies:
            self._executor.copy_pages(plan.copies)
        turns = self._turns(plan)
        rows, lazy = self._rows(turns)
        readout = self._executor.step(rows)
        missing = self._advance(turns, readout)
        if missing:
            readout = self._executor.add_aux(rows, readout, missing)
            still = self._advance(turns, readout)
            assert not still, "rows with auxiliary rows need none"
        results = self._results(turns, readout)
        ran = "grouped" if rows.aux else "primary"
        return StepResult(results, "lazy" if lazy or missing else ran)

    def _turns(self, plan: StepPlan) -> list[Turn]:
        guesses: dict[str, tuple[int, ...]] = {}
        if any(sequence.primary_drafts for sequence in plan.sequences):
            guesses = self._guesses(plan)
        turns, first = [], 0
        for sequence in plan.sequences:
            state = self._states[sequence.request_id]
            drafts = sequence.tokens[len(sequence.tokens) - sequence.num_drafts :]
            tokens, output = sequence.tokens, state.request.output_ids
            if made := guesses.get(sequence.request_id, ()):
                drafts, tokens = drafts + made, tokens + made
            num_read = sequence.num_read + len(made)
            samples = len(drafts) + 1 if sequence.samples else 0
            end = first + num_read
            turns.append(
                Turn(
                    state,
                    sequence,
                    tokens,
                    drafts,
                    range(first, end),
                    range(end - samples, end),
                    list(output) if drafts else output,
                    len(output),
                    ended=not samples,
                )
            )
            first = end
        return turns

    def _rows(self, turns: Sequence[Turn]) -> tuple[StepRows, bool]:
        """The rows of the first pass, and whether auxiliary rows were put off."""
        tokens: list[int] = []
        sequences, read = [], []
        certain, optional, chances = [], [], []
        for turn in turns:
            plan, count = turn.plan, len(turn.tokens)
            sequences.append(SequenceRows(plan.start, count, plan.pages, plan.write_from))
            tokens += turn.tokens
            read += range(len(tokens) - len(turn.rows), len(tokens))
            for row, in_any_case in turn.first_pass_aux():
                if in_any_case:
                    certain.append(row)
                else:
                    optional.append(row)
                    chances.append(OptionalRow(turn.state.share, plan.start + count))
        lazy = bool(optional) and self._is_lazy(sequences, len(read), certain, chances)
        aux = certain if lazy or not optional else sorted(certain + optional)
        # On a padded vocabulary a draw may fall on padding, which only r can mend.
        mend = self._padded and any(turn.state.rule.need == "two_stage" for turn in turns)
        return StepRows(tokens, sequences, read, aux, keep=lazy or mend), lazy

    def _is_lazy(
        self, sequences: Sequence[SequenceRows], num_read: int, certain: Sequence[int],
        chances: Sequence[OptionalRow],
    ) -> bool:  # fmt: skip
        ends = [s.start + s.count for s in sequences]
        shape = StepShape(
            primary_rows=sum(s.count for s in sequences),
            read_rows=num_read,
            aux_positions=len(certain),
            keys=sum(ends),
            primary_keys=sum(s.count * end for s, end in zip(sequences, ends, strict=True)),
            aux_keys=len(certain) * max(ends),
        )
        return choose_execution(self._work, self._machine, shape, chances) == "lazy"

    def _advance(self, turns: Sequence[Turn], readout: Readout) -> list[int]:
        """Decide what can be decided; returns the rows that need auxiliary rows, ascending."""
        missing: list[int] = []
        for turn in turns:
            if turn.ended:
                continue
            try:
                missing += turn.advance(readout, self._size)
            except _FAILURES as error:
                turn.fail(str(error) or repr(error))
        return missing

    def _guesses(self, plan: StepPlan) -> dict[str, tuple[int, ...]]:
        """The primary's own guesses, made one after the other: each is a pass."""
        made: dict[str, list[int]] = {s.request_id: [] for s in plan.sequences if s.primary_drafts}
        planned = {s.request_id: s for s in plan.sequences}
        growing = list(made)
        while growing:
            tokens: list[int] = []
            sequences, read = [], []
            for name in growing:
                sequence, own = planned[name], made[name]
                new = sequence.tokens if not own else own[-1:]
                start = sequence.start + (len(sequence.tokens) + len(own) - 1 if own else 0)
                sequences.append(SequenceRows(start, len(new), sequence.pages, sequence.write_from))
                tokens += new
                read.append(len(tokens) - 1)
            readout = self._executor.step(StepRows(tokens, sequences, read, ()))
            still = []
            for row, name in enumerate(growing):
                sequence, state = planned[name], self._states[name]
                verified = sequence.tokens[len(sequence.tokens) - sequence.num_drafts :]
                output = [*state.request.output_ids, *verified, *made[name]]
                try:
                    token = guess(state.sampler, readout.r[row], output, readout.best[row])
                except _FAILURES:
                    continue  # the pass that verifies will say so
                made[name].append(token)
                if len(made[name]) < sequence.primary_drafts:
                    still.append(name)
            growing = still
        return {name: tuple(tokens) for name, tokens in made.items()}

    # Results.

    def _results(self, turns: Sequence[Turn], readout: Readout) -> tuple[SequenceResult, ...]:
        choices = self._choices(turns, readout)
        results = []
        for turn in turns:
            turn.observe(readout.alpha)
            # What fails may have decided some tokens before, which nobody described.
            picked = turn.picked if turn.error is None else ()
            tokens = tuple(choices[one.row] for one in picked)
            if any(choice.log_r != choice.log_r for choice in tokens):
                turn.fail(_NOT_NUMBERS)
            aux_positions = 0
            if self._config.num_flows:
                aux_positions = sum(readout.q_index[row] >= 0 for row in turn.rows)
            name = turn.plan.request_id
            if turn.error is not None:
                results.append(SequenceResult(name, aux_positions=aux_positions, error=turn.error))
                continue
            results.append(
                SequenceResult(
                    name,
                    tokens,
                    self._prompt_choices(turn, readout),
                    aux_positions,
                    len(turn.drafts),
                    turn.accepted,
                )
            )
        return tuple(results)

    def _choices(self, turns: Sequence[Turn], readout: Readout) -> dict[int, Choice]:
        """What to report of every token decided, by row."""
        choices: dict[int, Choice] = {}
        brief: list[Picked] = []
        for turn in turns:
            if turn.error is not None:
                continue
            if turn.state.sampler.wants_logprobs:
                for picked in turn.picked:
                    choices[picked.row] = self._describe(turn, picked, readout)
            else:
                brief += turn.picked
        if brief:
            self._describe_briefly(brief, readout, choices)
        return choices

    def _describe(self, turn: Turn, picked: Picked, readout: Readout) -> Choice:
        r_V, p_V, q_V, alpha = _row(readout, picked.row)
        if picked.by_p:
            assert p_V is not None
            r_V, q_V = self._as_r(p_V), None
        return turn.state.sampler.describe(picked.token_id, r_V, p_V, q_V, alpha, picked.source)

    def _describe_briefly(
        self, brief: Sequence[Picked], readout: Readout, choices: dict[int, Choice]
    ) -> None:
        """Without the distributions: three look-ups for all tokens of the step."""
        rows, tokens = [p.row for p in brief], [p.token_id for p in brief]
        log_r = _at(readout.r, rows, tokens)
        log_p = [None] * len(brief) if readout.p is None else _at(readout.p, rows, tokens)
        log_q: list[float | None] = [None] * len(brief)
        if readout.q is not None:
            places = [i for i, row in enumerate(rows) if readout.q_index[row] >= 0]
            if places:
                q_rows = [readout.q_index[rows[i]] for i in places]
                values = _at(readout.q, q_rows, [tokens[i] for i in places])
                for place, value in zip(places, values, strict=True):
                    log_q[place] = value
        for i, picked in enumerate(brief):
            alpha = None if readout.alpha is None else readout.alpha[picked.row]
            r, q = log_r[i], log_q[i]
            if picked.by_p and readout.q_index[picked.row] >= 0:
                assert readout.p is not None
                r, q = float(self._as_r(readout.p[picked.row])[picked.token_id]), None
            choices[picked.row] = Choice(picked.token_id, r, log_p[i], q, alpha, picked.source)

    def _prompt_choices(self, turn: Turn, readout: Readout) -> tuple[Choice, ...]:
        """What the rows that report on the prompt thought of the token that follows there."""
        rows = range(turn.rows.start, turn.sample_rows.start)
        if not rows:
            return ()
        request, sampler = turn.state.request, turn.state.sampler
        first = turn.plan.start + len(turn.tokens) - len(turn.rows) + 1
        tokens = request.tokens(first, first + len(rows))
        return tuple(
            sampler.describe(token, *_row(readout, row), top=request.params.prompt_logprobs)
            for row, token in zip(rows, tokens, strict=True)
        )

    def _as_r(self, log_p_V: Tensor) -> Tensor:
        """Log p as r is reported where the auxiliary is skipped: over the real ids alone."""
        if not self._padded:
            return log_p_V
        log_r_V = log_p_V - math.log(real_share(log_p_V, self._size))
        log_r_V[self._size :] = -math.inf
        return log_r_V


def _row(readout: Readout, row: int) -> tuple[Tensor, Tensor | None, Tensor | None, float | None]:
    """Log r, log p, log q and α of one row."""
    place = readout.q_index[row]
    return (
        readout.r[row],
        None if readout.p is None else readout.p[row],
        None if readout.q is None or place < 0 else readout.q[place],
        None if readout.alpha is None else readout.alpha[row],
    )


def _at(x_RV: Tensor, rows: list[int], tokens: list[int]) -> list[float]:
    """x_RV[rows[i], tokens[i]] for every i."""
    if len(rows) == 1:
        return [x_RV[rows[0], tokens[0]].item()]
    return x_RV[rows, tokens].tolist()
