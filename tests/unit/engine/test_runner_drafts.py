"""Guesses change how many tokens a step gives, never which."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from dualflow.engine.request import AuxPolicy, Request
from dualflow.engine.step_plan import StepPlan
from dualflow.model import CausalLM
from dualflow.testing import tiny_config
from dualflow.testing.tensors import tiny_model
from tests.unit.engine.steps import Bench, chi_square_limit, expected
from tests.unit.engine.test_runner import GROUPED, LAZY, prompts, sharp_model

POLICIES = [AuxPolicy.parse(text) for text in ("on", "off", "exact", "threshold=0.8")]
SAMPLING = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 20, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 4},
]


def generated(
    model: CausalLM, texts: Sequence[Sequence[int]], options: Any, guess: Any = None, **params: Any
) -> list[list[int]]:
    bench = Bench(model, len(texts), options)
    for seed, prompt in enumerate(texts):
        bench.add(prompt, seed=seed, max_tokens=40, **params)
    return bench.generate(16, guess)


def oracle_of(want: Sequence[Sequence[int]], wrong_every: int):
    """Guesses from the tokens that come without any, every so many of them wrong."""

    def guess(request: Request) -> list[int]:
        done = len(request.output_ids)
        right = want[int(request.id)][done : done + 3]
        return [(t + 1) % 50 if (done + i) % wrong_every == 0 else t for i, t in enumerate(right)]

    return guess


@pytest.mark.parametrize("aux", POLICIES, ids=str)
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("options", [GROUPED, LAZY], ids=["grouped", "lazy"])
def test_verified_guesses_give_the_tokens_of_no_guesses(
    aux: AuxPolicy, sampling: Any, options: Any
) -> None:
    model = sharp_model(head=3.0)
    texts = prompts(model, 5)
    want = generated(model, texts, options, aux=aux, **sampling)
    for wrong_every in (2, 5, 100):
        guess = oracle_of(want, wrong_every)
        assert generated(model, texts, options, guess, aux=aux, **sampling) == want


def test_steps_report_what_was_guessed_and_what_held() -> None:
    model = sharp_model()
    bench = Bench(model)
    request = bench.add([1, 2, 3], temperature=0.0)
    (first,) = bench.step(bench.plan(request))
    assert (first.drafted, first.accepted, len(first.tokens)) == (0, 0, 1)
    want = generated(model, [[1, 2, 3]], GROUPED, temperature=0.0)[0]
    wrong = [want[1], want[2], (want[3] + 1) % 50, want[4]]
    (result,) = bench.step(bench.plan(request, wrong))
    assert (result.drafted, result.accepted, result.aux_positions) == (4, 2, 5)
    assert [choice.token_id for choice in result.tokens] == want[1:4]
    (result,) = bench.step(bench.plan(request, want[4:7]))
    assert (result.drafted, result.accepted) == (3, 3)
    assert [choice.token_id for choice in result.tokens] == want[4:8]


def test_nothing_is_guessed_past_a_stop_id() -> None:
    model = sharp_model()
    bench = Bench(model)
    want = generated(model, [[1, 2, 3]], GROUPED, temperature=0.0)[0]
    request = bench.add([1, 2, 3], temperature=0.0)
    bench.step(bench.plan(request))
    request.stop_ids = frozenset({want[2]})
    (result,) = bench.step(bench.plan(request, want[1:4]))
    assert [choice.token_id for choice in result.tokens] == want[1:3]
    assert result.accepted == 2


@pytest.mark.parametrize("aux", ["on", "exact", "off"])
@pytest.mark.parametrize("count", [1, 4])
def test_greedy_with_the_primarys_guesses_gives_the_tokens_of_none(aux: str, count: int) -> None:
    model = sharp_model()
    texts = prompts(model, 5)
    policy = AuxPolicy(aux)  # type: ignore[arg-type]
    want = generated(model, texts, LAZY, temperature=0.0, aux=policy)
    bench = Bench(model, 5, LAZY)
    for prompt in texts:
        bench.add(prompt, temperature=0.0, aux=policy, drafts="primary")
    drafted = accepted = 0
    while any(len(r.output_ids) < 16 for r in bench.requests.values()):
        # The last one gets fewer: guesses of several sequences are of different length.
        plans = [
            bench.plan(r, primary=1 if r.id == "4" else count) for r in bench.requests.values()
        ]
        for result in bench.step(*plans):
            drafted, accepted = drafted + result.drafted, accepted + result.accepted
    assert [r.output_ids[:16] for r in bench.requests.values()] == want
    assert accepted == drafted if aux == "off" else 0 < accepted < drafted


@pytest.mark.parametrize("aux", ["on", "exact", "threshold=0.6"])
def test_seeded_tokens_do_not_depend_on_how_many_guesses_a_step_has_room_for(aux: str) -> None:
    model = sharp_model(head=2.0)
    texts = prompts(model, 5)
    params: dict[str, Any] = {
        "aux": AuxPolicy.parse(aux), "drafts": "primary", "temperature": 0.9, "top_p": 0.95,
    }  # fmt: skip
    want = generated(model, texts, LAZY, **params)
    for count in (1, 2, 5):
        assert generated(model, texts, GROUPED, lambda _, count=count: count, **params) == want


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.6, "top_k": 4}, {"aux": AuxPolicy("exact")}],
    ids=str,
)
def test_sampling_with_the_primarys_guesses_has_the_distribution_of_r(params: Any) -> None:
    """Pairs of tokens, the first of which was guessed, and the second guessed or free."""
    size, count, prompt = 5, 2000, [1, 3]
    model = tiny_model(tiny_config("dual", vocab_size=size, max_position=8))
    bench = Bench(model, count)
    for seed in range(count):
        bench.add(prompt, seed=seed, drafts="primary", **params)
    pairs: Counter[tuple[int, ...]] = Counter()
    plans = [bench.plan(r, primary=1) for r in bench.requests.values()]
    accepted = sum(result.accepted for result in bench.step(*plans))
    short = [r for r in bench.requests.values() if len(r.output_ids) < 2]
    assert 0 < len(short) == count - accepted < count
    bench.step(*(bench.plan(r) for r in short))
    pairs.update(tuple(r.output_ids) for r in bench.requests.values())

    sampler = next(iter(bench.runner._states.values())).sampler
    statistic, cells = 0.0, 0
    first = sampler.shape(expected(model, prompt).r[-1], []).exp().tolist()
    for one in range(size):
        if first[one] == 0:
            continue
        second = sampler.shape(expected(model, [*prompt, one]).r[-1], [one]).exp().tolist()
        for other in range(size):
            want = count * first[one] * second[other]
            if want:
                statistic += (pairs.pop((one, other), 0) - want) ** 2 / want
                cells += 1
    assert not pairs
    assert statistic < chi_square_limit(cells - 1)


def test_guesses_of_one_sequence_beside_plain_rows_of_others() -> None:
    model = sharp_model()
    texts = prompts(model, 3)
    want = generated(model, texts, GROUPED, temperature=0.0)
    bench = Bench(model, 3)
    one, two, three = (
        bench.add(prompt, temperature=0.0, drafts=drafts)
        for prompt, drafts in zip(texts, ("primary", "ngram", "off"), strict=True)
    )
    result = bench.runner.run(
        StepPlan((bench.plan(one, primary=2), bench.plan(two, want[1][:2]), bench.plan(three)))
    )
    for text, sequence in zip(want, result.sequences, strict=True):
        tokens = [choice.token_id for choice in sequence.tokens]
        assert tokens == text[: len(tokens)]
    assert [s.drafted for s in result.sequences] == [2, 2, 0]
    assert len(result.sequences[1].tokens) == 3
