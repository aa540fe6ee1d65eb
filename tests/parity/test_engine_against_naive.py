"""The engine gives the naive generator's tokens, whatever shares its steps, cache and pages.

float64 throughout, so that two orders of a sum never decide between two tokens. Every batch mixes
greedy and seeded requests of many lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import pytest

from dualflow.engine import AuxPolicy, Engine, EngineConfig, FinishEvent, RequestParams, TokenEvent
from dualflow.engine.build import build_engine
from dualflow.model import CausalLM
from dualflow.model.generate import GenerationParams, generate
from dualflow.model.generate import TokenEvent as NaiveToken
from dualflow.model.sampling import SamplingParams
from dualflow.spec import AuxConfig, ModelConfig
from dualflow.testing import flow_config, tiny_config
from dualflow.testing.configs import mixture_config
from dualflow.testing.tensors import random_tokens, tiny_model

CONFIGS: dict[str, ModelConfig] = {
    "standard": tiny_config("standard"),
    "dual": tiny_config("dual", vocab_size=64, real_vocab_size=53),
    "two flows": tiny_config("dual", aux=AuxConfig(num_flows=2)),
    "phd2": tiny_config("phd2"),
    "two_softmax": tiny_config("two_softmax"),
    "aux_only": flow_config("minimal"),
    "experts": mixture_config("qwen2_moe", "dual", aux=AuxConfig(experts_per_token=3)),
    "replayed experts": mixture_config(
        "olmoe", "dual", aux=AuxConfig(routing="replay", expert_couplings=True)
    ),
}
pytestmark = pytest.mark.filterwarnings("ignore:the cache holds")

LENGTHS = (9, 23, 1, 4, 16, 31, 2, 12)
PAGE = 4


@cache
def model_of(name: str) -> CausalLM:
    return tiny_model(CONFIGS[name])


def prompts_of(name: str, batch: int) -> list[tuple[int, ...]]:
    """Prompts of mixed lengths; every third begins as the first long one does."""
    ids = random_tokens(CONFIGS[name], batch, max(LENGTHS)).tolist()
    prompts = [tuple(row[: LENGTHS[i % len(LENGTHS)]]) for i, row in enumerate(ids)]
    common = tuple(ids[0][:9])
    return [common + p[9:] if i % 3 == 0 and len(p) > 9 else p for i, p in enumerate(prompts)]


def params_of(batch: int, factor: int) -> list[RequestParams]:
    """Greedy and seeded by turns, of different lengths."""
    kinds = (
        RequestParams(temperature=0, max_tokens=8 * factor),
        RequestParams(seed=5, max_tokens=6 * factor),
        RequestParams(temperature=0, max_tokens=4 * factor),
        RequestParams(temperature=0.7, top_p=0.8, seed=6, max_tokens=7 * factor),
    )
    return [kinds[i % len(kinds)] for i in range(batch)]


def naive(name: str, prompt: tuple[int, ...], params: RequestParams) -> tuple[NaiveToken, ...]:
    """What the naive generator gives for the same request."""
    sampling = SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p,
        seed=params.seed,
    )  # fmt: skip
    aux = "off" if params.aux.kind == "off" else "on"
    return _naive(
        name, prompt, GenerationParams(max_tokens=params.max_tokens, sampling=sampling, aux=aux)
    )


@cache
def _naive(name: str, prompt: tuple[int, ...], params: GenerationParams) -> tuple[NaiveToken, ...]:
    events = generate(model_of(name), prompt, params)
    return tuple(event for event in events if isinstance(event, NaiveToken))


def new_engine(name: str, **settings: object) -> Engine:
    fields: dict[str, object] = {"page_size": PAGE, "num_pages": 400, "backend": "torch"}
    return build_engine(model_of(name), None, EngineConfig(**(fields | settings)))  # type: ignore[arg-type]


def run(
    engine: Engine, aborts: Sequence[tuple[int, str]] = ()
) -> dict[str, list[list[TokenEvent]]]:
    """Every request's tokens by output, once nothing is left to do; ``aborts`` are (step, id)."""
    tokens: dict[str, list[list[TokenEvent]]] = {}
    step = 0
    while engine.has_work:
        for _, request_id in (abort for abort in aborts if abort[0] == step):
            assert engine.abort(request_id)
        for event in engine.step():
            if isinstance(event, TokenEvent):
                outputs = tokens.setdefault(event.request_id, [])
                while len(outputs) <= event.index:
                    outputs.append([])
                outputs[event.index].append(event)
            if isinstance(event, FinishEvent):
                assert event.error is None
        step += 1
        assert step < 20_000
    engine.check_idle()
    return tokens


def assert_equal(got: Sequence[TokenEvent], expected: Sequence[NaiveToken]) -> None:
    """Equal tokens, and equal distributions to rounding."""
    assert [event.choice.token_id for event in got] == [token.token_id for token in expected]
    for event, token in zip(got, expected, strict=True):
        for name in ("log_r", "log_p", "log_q"):
            value, wanted = getattr(event.choice, name), getattr(token, name)
            assert (value is None) == (wanted is None), name
            assert value is None or value == pytest.approx(wanted, abs=1e-9), name


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison. ``rounds`` above 1 runs the batch again: every prompt is cached.
    ``abort`` adds requests that end before their time.
    """

    name: str
    batch: int
    chunk: int
    prefix_cache: bool = False
    rounds: int = 1
    pages: int = 400
    abort: bool = False


CASES = [
    Case("standard", 1, 1),
    Case("standard", 2, 7, prefix_cache=True),
    Case("standard", 8, 2, pages=16, abort=True),
    Case("standard", 32, 512, prefix_cache=True, rounds=2),
    Case("standard", 32, 16, pages=24, prefix_cache=True, abort=True),
    Case("dual", 1, 512, prefix_cache=True, rounds=2),
    Case("dual", 2, 1, prefix_cache=True, rounds=2),
    Case("dual", 8, 7, pages=16, prefix_cache=True, abort=True),
    Case("dual", 8, 1, abort=True),
    Case("dual", 8, 2, prefix_cache=True),
    Case("dual", 32, 16, pages=24, abort=True),
    Case("dual", 32, 512, pages=30, prefix_cache=True, rounds=2),
    Case("two flows", 2, 2),
    Case("two flows", 8, 16, prefix_cache=True, rounds=2, abort=True),
    Case("two flows", 32, 7, pages=24, abort=True),
    Case("two_softmax", 8, 7, pages=16, prefix_cache=True),
    Case("aux_only", 8, 16, pages=16, prefix_cache=True),
    Case("experts", 8, 7, pages=16, prefix_cache=True, abort=True),
    Case("experts", 32, 16, pages=24, prefix_cache=True),
    Case("replayed experts", 8, 16, pages=16, prefix_cache=True, rounds=2),
    Case("phd2", 2, 2, prefix_cache=True),
    Case("phd2", 8, 512, pages=16, prefix_cache=True, rounds=2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_those_of_the_naive_generator(case: Case) -> None:
    engine = new_engine(
        case.name, num_pages=case.pages, max_step_tokens=case.chunk, prefix_cache=case.prefix_cache
    )
    short_of_pages = case.pages < 100
    prompts = prompts_of(case.name, case.batch)
    params = params_of(case.batch, 3 if short_of_pages else 1)
    for _ in range(case.rounds):
        ids = [engine.add(p, q) for p, q in zip(prompts, params, strict=True)]
        aborts: list[tuple[int, str]] = []
        if case.abort:
            for step in (0, 3, 9):
                doomed = replace(params[0], max_tokens=40)
                aborts.append((step, engine.add(prompts[2 % case.batch], doomed)))
        tokens = run(engine, aborts)
        for name, prompt, of_prompt in zip(ids, prompts, params, strict=True):
            assert_equal(tokens[name][0], naive(case.name, prompt, of_prompt))
    stats = engine.stats()
    assert (stats.preemptions > 0) == short_of_pages
    assert stats.prefix_hits > 0 or case.rounds == 1


@pytest.mark.parametrize("name", ["standard", "dual", "phd2"])
def test_every_output_of_n_has_a_seed_of_its_own(name: str) -> None:
    prompts = prompts_of(name, 8)[3:6]
    params = RequestParams(n=3, seed=11, max_tokens=8)
    engine = new_engine(name, max_step_tokens=16)
    ids = [engine.add(prompt, params) for prompt in prompts]
    tokens = run(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        for index in range(3):
            alone = replace(params, n=1, seed=11 + index)
            assert_equal(tokens[request_id][index], naive(name, prompt, alone))


@pytest.mark.parametrize("pages", [16, 400])
def test_outputs_of_n_stay_apart_where_pages_run_out(pages: int) -> None:
    prompts = prompts_of("dual", 6)
    params = RequestParams(n=4, seed=3, max_tokens=14)
    engine = new_engine("dual", max_step_tokens=7, num_pages=pages)
    ids = [engine.add(prompt, params) for prompt in prompts]
    tokens = run(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        for index in range(4):
            alone = replace(params, n=1, seed=3 + index)
            assert_equal(tokens[request_id][index], naive("dual", prompt, alone))


def test_the_last_position_of_the_model_can_be_reached() -> None:
    config = CONFIGS["dual"]
    prompt = tuple(random_tokens(config, config.max_position - 3).tolist())
    params = RequestParams(temperature=0)
    engine = new_engine("dual")
    request_id = engine.add(prompt, params)
    got = run(engine)[request_id][0]
    assert len(got) == 4
    assert_equal(got, naive("dual", prompt, params))


def test_a_prompt_that_is_cached_as_a_whole_computes_one_position() -> None:
    prompt = prompts_of("dual", 8)[4]
    assert len(prompt) % PAGE == 0
    params = RequestParams(temperature=0, max_tokens=1)
    engine = new_engine("dual")
    for computed in (len(prompt), len(prompt) + 1):
        request_id = engine.add(prompt, params)
        assert_equal(run(engine)[request_id][0], naive("dual", prompt, params))
        assert engine.stats().computed_tokens == computed


@pytest.mark.parametrize("name", ["standard", "dual"])
def test_off_reads_the_primary_alone(name: str) -> None:
    params = RequestParams(temperature=0, max_tokens=6, aux=AuxPolicy("off"))
    engine = new_engine(name)
    prompts = prompts_of(name, 4)
    ids = [engine.add(prompt, params) for prompt in prompts]
    tokens = run(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert_equal(tokens[request_id][0], naive(name, prompt, params))
    assert engine.stats().aux_positions == 0


@pytest.mark.parametrize("name", ["dual", "two flows"])
def test_exact_gives_the_tokens_of_on_greedily(name: str) -> None:
    engine = new_engine(name)
    params = RequestParams(temperature=0, max_tokens=9)
    prompts = prompts_of(name, 8)
    ids = [engine.add(prompt, replace(params, aux=AuxPolicy("exact"))) for prompt in prompts]
    tokens = run(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        got = [event.choice.token_id for event in tokens[request_id][0]]
        assert got == [token.token_id for token in naive(name, prompt, params)]


@pytest.mark.parametrize("drafts", ["ngram", "primary"])
def test_guesses_change_no_greedy_token(drafts: Literal["ngram", "primary"]) -> None:
    engine = new_engine("dual", max_step_tokens=24)
    params = RequestParams(temperature=0, max_tokens=20)
    prompts = [p * 2 for p in prompts_of("dual", 6)]
    ids = [engine.add(p, replace(params, drafts=drafts, num_drafts=3)) for p in prompts]
    tokens = run(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        got = [event.choice.token_id for event in tokens[request_id][0]]
        assert got == [token.token_id for token in naive("dual", prompt, params)]
    assert engine.stats().accepted > 0
