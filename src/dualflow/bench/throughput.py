"""The suite ``throughput``: tokens per second with 1, 8 and 32 requests at once, and of a prompt.

Standard and dual, auxiliary on, off and exact, greedy and sampled, in turns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

from dualflow.bench.engines import (
    SIDES,
    ModelPair,
    Settings,
    Track,
    described,
    params_of,
    run_together,
)
from dualflow.bench.figures import Figure, figure_suite, figures_of_sides
from dualflow.bench.latency import aux_share
from dualflow.bench.timing import SILENT, Watcher, in_turns

SUITE = figure_suite(
    "throughput",
    "Throughput: many requests at once",
    "`decode_bN` counts the tokens of N requests per second while all N decode; `prefill_S` a "
    "prompt's S tokens per second until the first new one. A ratio is the median over rounds in "
    "which all sides were measured, in turns.",
)


@dataclass(frozen=True, kw_only=True)
class ThroughputSizes:
    """Requests at once, their prompts and new tokens; the prompt that prefill is measured on."""

    batches: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 128
    new_tokens: int = 48
    prefill: int = 512
    repetitions: int = 5


QUICK = ThroughputSizes(
    batches=(1, 4), prompt_tokens=32, new_tokens=16, prefill=128, repetitions=3
)  # fmt: skip


def measure_throughput(
    settings: Settings, sizes: ThroughputSizes | None = None, watcher: Watcher = SILENT
) -> Iterator[Figure]:
    """Figures of all sides; measured as the iterator is read."""
    sizes = sizes or ThroughputSizes()
    pair = ModelPair(settings)
    tokens = max(sizes.prompt_tokens + sizes.new_tokens, sizes.prefill + 1)
    pair.require_positions(tokens)
    engines = {
        variant: pair.engine(variant, tokens=tokens, running=max(sizes.batches), prefix_cache=False)
        for variant in ("standard", "dual")
    }
    of_engines = {variant: described(pair, engine) for variant, engine in engines.items()}
    cases = [("prefill", 1, sizes.prefill, 1)]
    cases += [("decode", n, sizes.prompt_tokens, sizes.new_tokens) for n in sizes.batches]
    for kind, batch, prompt_tokens, new_tokens in cases:
        prompts = pair.prompts(*[prompt_tokens] * batch)
        works = [
            partial(run_together, engines[s.variant], prompts, params_of(s, new_tokens), count())
            for s in SIDES
        ]
        name = f"prefill_{prompt_tokens}" if kind == "prefill" else f"decode_b{batch}"
        rounds = in_turns(works, sizes.repetitions, what=name, watcher=watcher)
        speed = _prefill_speed if kind == "prefill" else _decode_speed
        by_side = dict(zip(SIDES, rounds, strict=True))
        yield from figures_of_sides(
            name,
            {"batch": batch, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens},
            "tokens/s",
            of_engines,
            {side: [speed(tracks) for tracks in own] for side, own in by_side.items()},
            {
                side: aux_share([t for tracks in own for t in tracks])
                for side, own in by_side.items()
            },
        )


def _prefill_speed(tracks: list[Track]) -> float:
    (track,) = tracks
    return track.end.usage.prompt_tokens / track.first_token_seconds


def _decode_speed(tracks: list[Track]) -> float:
    """Of the time in which all requests decode: from the last one's first token to the first one's
    last.
    """
    begin = max(track.times[0] for track in tracks)
    end = min(track.times[-1] for track in tracks)
    if end <= begin:
        raise ValueError("no two steps in which all requests decode; give more new tokens")
    return sum(begin < t <= end for track in tracks for t in track.times) / (end - begin)
