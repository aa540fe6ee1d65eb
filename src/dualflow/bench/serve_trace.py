"""The suite ``serve-trace``: made-up traffic replayed with the auxiliary off, on and exact.

Times are those of a user: the first token's counts from when the request should have been sent,
also where the engine was too busy to take it just then.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise

from dualflow.bench.engines import ModelPair, Settings, Side, described, params_of, run_together
from dualflow.bench.measurement import MACHINE_COLUMNS, Machine, Row, rounded
from dualflow.bench.results import Suite, number
from dualflow.bench.timing import SILENT, Watcher
from dualflow.bench.trace import TraceRequest, TraceSizes, make_trace, percentiles
from dualflow.engine.engine import Engine
from dualflow.engine.outputs import FinishEvent, TokenEvent
from dualflow.evaluate.tables import NOTHING, Table

POLICIES = ("off", "on", "exact")

LOAD = 0.7
"""Share of the engine's capacity that traffic makes up where no rate is given."""

QUICK = TraceSizes(requests=40, prompt_tokens=16, new_tokens=8, longest=128, segments=2)

_CALIBRATION = 32

_METRICS = tuple(f"{name}_p{p}_ms" for name in ("ttft", "tbt") for p in (50, 90, 99))

COLUMNS = (
    "suite", "model", "variant", "aux", "sampling", "weights", "kv_dtype", "backend", "requests",
    "rate", "seed", "finished", "aborted", "lost", "failed", "pages_leaked", *_METRICS,
    "new_tokens", "tokens_per_second", "aux_share", "preemptions", "seconds", *MACHINE_COLUMNS,
)  # fmt: skip


@dataclass(eq=False)
class Outcome:
    """What one policy made of the traffic.

    lost:          requests without exactly one end, or without the tokens they asked for.
    failed:        requests that ended in an error.
    pages_leaked:  pages that were neither free nor kept for later prompts when nothing ran.
    first_token, between: seconds, of all requests together.
    """

    policy: str
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    lost: int = 0
    failed: int = 0
    pages_leaked: int = 0
    new_tokens: int = 0
    aux_positions: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    first_token: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing was lost, failed or leaked."""
        return not (self.lost or self.failed or self.pages_leaked)

    def row(
        self, described: dict[str, str], sizes: TraceSizes, rate: float, machine: Machine
    ) -> Row:
        """The outcome as a row, with the machine it was taken on."""
        times = [*percentiles(self.first_token), *percentiles(self.between)]
        milliseconds = [None if value is None else rounded(value * 1e3) for value in times]
        row: Row = {
            "suite": "serve-trace",
            "variant": "dual",
            "aux": self.policy,
            "sampling": "sampled",
            **described,
            "rate": rounded(rate),
            "seed": sizes.seed,
            **{
                name: getattr(self, name)
                for name in (
                    "requests", "finished", "aborted", "lost", "failed", "pages_leaked",
                    "new_tokens", "preemptions",
                )
            },
            **dict(zip(_METRICS, milliseconds, strict=True)),
            "tokens_per_second": rounded(self.new_tokens / self.seconds) if self.seconds else None,
            "aux_share": rounded(self.aux_positions / self.new_tokens) if self.new_tokens else None,
            "seconds": rounded(self.seconds),
            **asdict(machine),
        }  # fmt: skip
        assert row.keys() == set(COLUMNS), row.keys() ^ set(COLUMNS)
        return {column: row[column] for column in COLUMNS}


@dataclass(frozen=True, kw_only=True)
class TraceResult:
    """Outcomes of all policies, and what they were measured with."""

    outcomes: tuple[Outcome, ...]
    described: dict[str, str]
    sizes: TraceSizes
    rate: float

    def rows(self, machine: Machine) -> list[Row]:
        """A row for every policy."""
        return [o.row(self.described, self.sizes, self.rate, machine) for o in self.outcomes]


def measure_serve_trace(
    settings: Settings, sizes: TraceSizes | None = None, watcher: Watcher = SILENT
) -> TraceResult:
    """Replay the traffic with every policy, segment by segment in turns."""
    sizes = sizes or TraceSizes()
    pair = ModelPair(settings)
    pair.require_positions(sizes.longest)
    engine = pair.engine("dual", tokens=sizes.longest, running=32, prefix_cache=True)
    rate = sizes.rate
    if rate is None:
        rate = LOAD * capacity(engine, pair, sizes)
        watcher.note(f"{rate:.3g} requests per second, {LOAD:.0%} of what the engine manages")
    outcomes = {policy: Outcome(policy) for policy in POLICIES}
    segments = make_trace(sizes, rate)
    prompts = iter(pair.prompts(*(r.prompt_tokens for segment in segments for r in segment)))
    for index, segment in enumerate(segments):
        own = list(islice(prompts, len(segment)))
        first = index % len(POLICIES)
        for done, policy in enumerate((*POLICIES[first:], *POLICIES[:first])):
            at = index * len(POLICIES) + done
            watcher.at(f"serve-trace: aux {policy}", at, len(segments) * len(POLICIES))
            replay(engine, segment, own, outcomes[policy], seed=sizes.seed)
    watcher.at("serve-trace", len(segments) * len(POLICIES), len(segments) * len(POLICIES))
    return TraceResult(
        outcomes=tuple(outcomes.values()), described=described(pair, engine), sizes=sizes, rate=rate
    )


def capacity(engine: Engine, pair: ModelPair, sizes: TraceSizes) -> float:
    """Requests per second that the engine manages when they all come at once, auxiliary on."""
    count = min(_CALIBRATION, sizes.requests)
    prompts = pair.prompts(*[sizes.prompt_tokens] * count)
    params = params_of(Side(variant="dual", aux="on", sampling="sampled"), sizes.new_tokens)
    run_together(engine, prompts[:2], params)  # what only the first run pays
    started = time.perf_counter()
    tracks = run_together(engine, prompts, params)
    return len(tracks) / (time.perf_counter() - started)


def replay(
    engine: Engine,
    requests: Sequence[TraceRequest],
    prompts: Sequence[Sequence[int]],
    outcome: Outcome,
    *,
    seed: int = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Send ``requests`` when they are due and add what becomes of them to ``outcome``.

    Each policy has a prefix cache of its own, as if it ran alone.
    """
    run = _Replay(engine, outcome, seed)
    waiting = list(zip(requests, prompts, strict=True))[::-1]
    started = time.perf_counter()
    while waiting or engine.has_work:
        now = time.perf_counter() - started
        while waiting and waiting[-1][0].arrival <= now:
            run.send(*waiting.pop(), started=started)
        if engine.has_work:
            run.step()
        elif waiting:
            sleep(max(0.0, waiting[-1][0].arrival - (time.perf_counter() - started)))
    outcome.seconds += time.perf_counter() - started
    run.settle()


class _Replay:
    """Requests on their way."""

    def __init__(self, engine: Engine, outcome: Outcome, seed: int) -> None:
        self._engine, self._outcome, self._seed = engine, outcome, seed
        self._requests: dict[str, TraceRequest] = {}
        self._due: dict[str, float] = {}
        self._times: dict[str, list[float]] = {}
        self._ends: dict[str, list[FinishEvent]] = {}

    def send(self, request: TraceRequest, prompt: Sequence[int], *, started: float) -> None:
        policy = self._outcome.policy
        side = Side(variant="dual", aux=policy, sampling="sampled")
        params = dataclasses.replace(
            params_of(side, request.new_tokens), seed=self._seed + request.number
        )
        name = self._engine.add(
            prompt, params, request_id=f"{policy}-{request.number}", tenant=policy
        )
        self._requests[name] = request
        self._due[name] = started + request.arrival
        self._times[name], self._ends[name] = [], []
        if request.abort_after == 0:
            self._engine.abort(name)

    def step(self) -> None:
        events = self._engine.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, TokenEvent):
                times = self._times[event.request_id]
                times.append(now)
                if len(times) == self._requests[event.request_id].abort_after:
                    self._engine.abort(event.request_id)
            elif isinstance(event, FinishEvent):
                self._ends[event.request_id].append(event)

    def settle(self) -> None:
        """Count what became of all that was sent; nothing runs any more."""
        o = self._outcome
        for name, request in self._requests.items():
            times, ends = self._times[name], self._ends[name]
            o.requests += 1
            o.new_tokens += len(times)
            if times:
                o.first_token.append(times[0] - self._due[name])
                o.between += [b - a for a, b in pairwise(times)]
            if len(ends) != 1 or not _as_asked(request, len(times), ends[0]):
                o.lost += 1
                continue
            usage, reason = ends[0].usage, ends[0].reason
            o.aux_positions += usage.aux_positions
            o.preemptions += usage.preemptions
            o.failed += reason == "error"
            o.aborted += reason == "abort"
            o.finished += reason == "length"
        stats = self._engine.stats()
        o.pages_leaked += stats.pages_used
        o.lost += stats.waiting + stats.running


def _as_asked(request: TraceRequest, tokens: int, end: FinishEvent) -> bool:
    if end.reason == "length":
        return tokens == request.new_tokens == end.usage.new_tokens
    return end.reason == "error" or (end.reason == "abort" and request.abort_after is not None)


def _tables(rows: Sequence[Row]) -> list[Table]:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(_key(row), []).append(row)
    return [_table(own) for own in groups.values()]


def _key(row: Row) -> tuple[object, ...]:
    return (row["model"], row["weights"], row["kv_dtype"], row["backend"])


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    columns = ("aux", "first token (ms) p50", "p90", "p99", "between tokens (ms) p50", "p90", "p99")
    return Table(
        title=f"{first['model']}: {first['weights']} weights, {first['kv_dtype']} cache, backend "
        f"{first['backend']}: {first['requests']} requests, {first['rate']:.3g} per second",
        columns=(*columns, "tokens/s", "auxiliary", "finished", "aborted", "lost", "pages leaked"),
        rows=tuple(_cells(row) for row in rows),
        caption="Poisson arrivals, log-normal lengths. auxiliary: positions per new token.",
    )


def _cells(row: Row) -> tuple[str, ...]:
    times = (NOTHING if row[name] is None else number(row[name]) for name in _METRICS)
    return (
        row["aux"],
        *times,
        NOTHING if row["tokens_per_second"] is None else number(row["tokens_per_second"]),
        NOTHING if row["aux_share"] is None else f"{row['aux_share']:.0%}",
        str(row["finished"]),
        str(row["aborted"]),
        str(row["lost"] + row["failed"]),
        str(row["pages_leaked"]),
    )


def _summary(row: Row) -> str:
    times = [NOTHING if row[name] is None else number(row[name]) for name in _METRICS]
    first, between = " / ".join(times[:3]), " / ".join(times[3:])
    return (
        f"serve-trace, aux {row['aux']}: first token {first} ms, between tokens {between} ms "
        f"(p50 / p90 / p99); {row['lost'] + row['failed']} lost, {row['pages_leaked']} pages leaked"
    )


SUITE = Suite(
    name="serve-trace",
    title="Traffic: auxiliary off, on and exact",
    about=(
        "The same made-up traffic for every policy, in segments that take turns; requests are "
        "sampled at temperature 1. The first token's time counts from when the request was due. "
        "Lost: without an end, or with other tokens than it asked for."
    ),
    columns=COLUMNS,
    key=_key,
    tables=_tables,
    summary=_summary,
)
