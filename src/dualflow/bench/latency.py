"""The suite ``latency``: one request at a time, time to its first token and speed of the others.

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
    Side,
    Track,
    described,
    params_of,
    run_together,
)
from dualflow.bench.figures import Figure, figure_suite, figures_of_sides
from dualflow.bench.timing import SILENT, Watcher, in_turns
from dualflow.engine.engine import Engine

SUITE = figure_suite(
    "latency",
    "Latency: one request at a time",
    "`ttft` is the time from the request to its first token, `decode_b1_S` the speed of the tokens "
    "after it, each after a prompt of S tokens. A ratio is the median over rounds in which all "
    "sides were measured, in turns.",
)


@dataclass(frozen=True, kw_only=True)
class LatencySizes:
    """Prompts, new tokens after each, and rounds."""

    prompts: tuple[int, ...] = (128, 1024)
    new_tokens: int = 32
    repetitions: int = 7


QUICK = LatencySizes(prompts=(32, 128), new_tokens=12, repetitions=3)


def measure_latency(
    settings: Settings, sizes: LatencySizes | None = None, watcher: Watcher = SILENT
) -> Iterator[Figure]:
    """Figures of all sides; measured as the iterator is read."""
    sizes = sizes or LatencySizes()
    pair = ModelPair(settings)
    tokens = max(sizes.prompts) + sizes.new_tokens
    pair.require_positions(tokens)
    # A prompt that was read before would be found, and not read again.
    engines = {
        variant: pair.engine(variant, tokens=tokens, running=1, prefix_cache=False)
        for variant in ("standard", "dual")
    }
    of_engines = {variant: described(pair, engine) for variant, engine in engines.items()}
    for prompt, length in zip(pair.prompts(*sizes.prompts), sizes.prompts, strict=True):
        works = [
            partial(_one, engines[s.variant], s, prompt, sizes.new_tokens, count()) for s in SIDES
        ]
        what = f"latency after {length} tokens"
        tracks = in_turns(works, sizes.repetitions, what=what, watcher=watcher)
        by_side = dict(zip(SIDES, tracks, strict=True))
        yield from _figures(by_side, length, sizes.new_tokens, of_engines)


def _one(
    engine: Engine, side: Side, prompt: list[int], new_tokens: int, rounds: Iterator[int]
) -> Track:
    (track,) = run_together(engine, [prompt], params_of(side, new_tokens), rounds)
    return track


def _figures(
    tracks: dict[Side, list[Track]],
    prompt_tokens: int,
    new_tokens: int,
    engines: dict[str, dict[str, str]],
) -> Iterator[Figure]:
    setting = {"batch": 1, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    shares = {side: aux_share(own) for side, own in tracks.items()}
    first = {side: [t.first_token_seconds * 1e3 for t in own] for side, own in tracks.items()}
    speed = {side: [_decode_speed(track) for track in own] for side, own in tracks.items()}
    name = f"ttft_{prompt_tokens}"
    yield from figures_of_sides(name, setting, "ms", engines, first, shares)
    name = f"decode_b1_{prompt_tokens}"
    yield from figures_of_sides(name, setting, "tokens/s", engines, speed, shares)


def aux_share(tracks: list[Track]) -> float:
    """Auxiliary positions per new token."""
    usages = [track.end.usage for track in tracks]
    return sum(u.aux_positions for u in usages) / sum(u.new_tokens for u in usages)


def _decode_speed(track: Track) -> float:
    return (len(track.times) - 1) / (track.times[-1] - track.times[0])
