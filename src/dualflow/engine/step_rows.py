"""The rows of one sequence in one step: a token and its guesses, or a chunk of known tokens.
No torch.
"""

from dualflow.engine.drafts import NgramIndex
from dualflow.engine.placement import Placement, Scheduled
from dualflow.engine.step_plan import SequencePlan


def plan_writing(seq: Scheduled, placement: Placement, extra: int) -> SequencePlan:
    """The one row of a sequence whose every other token is computed, and at most ``extra``
    guesses. Its page is there; those of the guesses are taken if they can be had.
    """
    request = seq.request
    start = seq.length - 1
    drafts: tuple[int, ...] = ()
    primary_drafts = 0
    if extra > 0 and request.params.drafts != "off":
        count = _num_drafts(seq, placement, extra)
        if count > 0 and request.params.drafts == "ngram":
            drafts = _guess(seq, count)
        elif count > 0:
            primary_drafts = count
    rows = 1 + len(drafts)
    end = start + rows + primary_drafts
    if end > seq.length:
        placed = placement.grow(seq, end)
        assert placed, "guesses were counted by the room there is"
    last = request.output_ids[-1] if request.output_ids else request.prompt_ids[-1]
    return SequencePlan(
        request.id,
        (last, *drafts),
        start,
        seq.first_pages(placement.pool.pages_for(end)),
        seq.write_from if seq.write_from > start else start,
        rows,
        True,
        len(drafts),
        primary_drafts,
    )


def plan_chunk(seq: Scheduled, placement: Placement, limit: int) -> SequencePlan:
    """At most ``limit`` rows of known tokens. With the last of them the next token is sampled."""
    request = seq.request
    start = request.num_computed
    end = min(start + limit, seq.length)
    samples = end == seq.length
    num_read = int(samples)
    if seq.owes_prompt:
        num_read = max(end - max(start, seq.prompt_reported), 0)
    return SequencePlan(
        request.id,
        request.tokens(start, end),
        start,
        seq.first_pages(placement.pool.pages_for(end)),
        max(start, seq.write_from),
        num_read,
        samples,
    )


def _num_drafts(seq: Scheduled, placement: Placement, extra: int) -> int:
    """How many guesses are of use: with all of them accepted one more token follows."""
    request = seq.request
    if request.params.structured is not None or seq.owes_prompt:
        return 0
    return min(
        request.params.num_drafts,
        extra,
        request.max_tokens - len(request.output_ids) - 1,
        placement.positions_available(seq) - seq.length,
    )


def _guess(seq: Scheduled, count: int) -> tuple[int, ...]:
    if seq.ngrams is None:
        seq.ngrams = NgramIndex()
    seq.ngrams.extend(seq.request.tokens(len(seq.ngrams), seq.length))
    return seq.ngrams.propose(count)
