"""Tokens under every auxiliary policy, grouped and lazy: what is exact is exact."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dualflow.checkpoint.retrofit import add_aux
from dualflow.engine.request import AuxPolicy, RequestError
from dualflow.engine.step_plan import SequencePlan, StepPlan
from dualflow.model import CausalLM
from dualflow.model.generate import GenerationParams, TokenEvent, generate
from dualflow.model.sampling import SamplingParams
from dualflow.plan.roofline import Machine
from dualflow.spec import AuxConfig, ReadoutConfig
from dualflow.testing import tiny_config
from dualflow.testing.tensors import random_tokens, tiny_model
from tests.unit.engine.steps import Bench, chi_square_limit, expected

GROUPED = {"machine": Machine(seconds_per_pass=1.0)}
LAZY = {"machine": Machine(seconds_per_pass=0.0, bytes_per_second=1e30)}
EXACT, OFF = AuxPolicy("exact"), AuxPolicy("off")


def sharp_model(variant: Any = "dual", head: float = 6.0, **changes: Any) -> CausalLM:
    """A model that is now sure and now unsure of the next token, so that α takes all values."""
    model = tiny_model(tiny_config(variant, **changes))
    with torch.no_grad():
        model.lm_head.weight.mul_(head)
    return model


def prompts(model: CausalLM, count: int) -> list[list[int]]:
    return [random_tokens(model.config, 3 + i % 7, seed=i).tolist() for i in range(count)]


def naive(
    model: CausalLM, prompt: Sequence[int], count: int, aux: Any = "on", **sampling: Any
) -> list[TokenEvent]:
    """Tokens of the generator that is the oracle."""
    params = GenerationParams(max_tokens=count, sampling=SamplingParams(**sampling), aux=aux)
    events = generate(model, prompt, params)
    return [event for event in events if isinstance(event, TokenEvent)]


def ids(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token_id for event in events]


@pytest.mark.parametrize("aux", ["on", "off"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 5}, {"top_k": 9, "seed": 6}])
@pytest.mark.parametrize("variant", ["dual", "standard", "two_softmax"])
def test_on_and_off_are_the_naive_generators(
    aux: Any, sampling: dict[str, Any], variant: Any
) -> None:
    model = sharp_model(variant)
    bench = Bench(model, 5)
    texts = prompts(model, 5)
    for prompt in texts:
        bench.add(prompt, aux=AuxPolicy(aux), max_tokens=12, **sampling)
    want = [ids(naive(model, prompt, 12, aux, **sampling)) for prompt in texts]
    assert bench.generate(12) == want


@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("aux", ["on", "off"])
def test_choices_say_what_the_model_thought(logprobs: int | None, aux: Any) -> None:
    model = sharp_model()
    bench = Bench(model, 2)
    texts = prompts(model, 2)
    for prompt in texts:
        bench.add(prompt, aux=AuxPolicy(aux), temperature=0.0, logprobs=logprobs)
    plans = [bench.plan(request) for request in bench.requests.values()]
    for prompt, result in zip(texts, bench.step(*plans), strict=True):
        (choice,) = result.tokens
        (event,) = naive(model, prompt, 1, aux, temperature=0)
        got = (choice.log_r, choice.log_p, choice.log_q)
        assert got == pytest.approx((event.log_r, event.log_p, event.log_q), abs=1e-9)
        whole = expected(model, prompt)
        assert whole.p is not None
        alpha = float(whole.p[-1].exp().square().sum().clamp(0.5, 1))
        assert choice.alpha == pytest.approx(alpha, abs=1e-9)
        assert len(choice.top) == (logprobs or 0)
        assert result.aux_positions == (aux == "on")


@pytest.mark.parametrize("options", [GROUPED, LAZY], ids=["grouped", "lazy"])
@pytest.mark.parametrize("masks", [{}, {"allowed_ids": frozenset(range(7, 30))}], ids=str)
def test_exact_greedy_gives_the_tokens_of_on(options: Any, masks: Any) -> None:
    model = sharp_model(aux=AuxConfig(num_flows=2))
    texts = prompts(model, 12)
    runs = []
    for aux, how in ((AuxPolicy("on"), {}), (EXACT, options)):
        bench = Bench(model, 12, how)
        for prompt in texts:
            bench.add(prompt, temperature=0.0, aux=aux, **masks)
        ran = 0
        for _ in range(12):
            ran += sum(
                result.aux_positions
                for result in bench.step(*(bench.plan(r) for r in bench.requests.values()))
            )
        runs.append(([r.output_ids for r in bench.requests.values()], ran))
    assert runs[0][0] == runs[1][0]
    skipped = runs[0][1] - runs[1][1]
    assert runs[0][1] == 12 * 12
    assert skipped > 20 if options is LAZY else skipped == 0


@pytest.mark.parametrize("options", [GROUPED, LAZY], ids=["grouped", "lazy"])
@pytest.mark.parametrize("padding", [0, 3])
def test_exact_sampling_has_the_distribution_of_r(options: Any, padding: int) -> None:
    size, count = 6, 1500
    model = sharp_model(head=2.0, vocab_size=size + padding, real_vocab_size=size, max_position=8)
    for prompt in ([1, 2, 3], [5, 0], [4]):
        bench = Bench(model, count, options)
        for seed in range(count):
            bench.add(prompt, seed=seed, aux=EXACT)
        results = bench.step(*(bench.plan(r) for r in bench.requests.values()))
        counts = Counter(result.tokens[0].token_id for result in results)
        r = expected(model, prompt).r[-1].exp()
        assert sum(counts.values()) == count and max(counts) < size
        statistic = sum((counts[i] - count * r[i]) ** 2 / (count * r[i]) for i in range(size))
        assert statistic < chi_square_limit(size - 1)
        if not padding:  # much of this model's p lies on it
            assert sum(result.aux_positions for result in results) < 0.65 * count


@pytest.mark.parametrize("padding", [0, 11])
def test_exact_sampling_is_the_same_grouped_and_lazy(padding: int) -> None:
    model = sharp_model(head=2.0, vocab_size=53, real_vocab_size=53 - padding)
    texts = prompts(model, 20)
    runs = []
    for options in (GROUPED, LAZY):
        bench = Bench(model, 20, options)
        for seed, prompt in enumerate(texts):
            bench.add(prompt, seed=seed, aux=EXACT)
        runs.append(bench.generate(8))
        if not padding:
            assert bench.last.execution == ("grouped" if options is GROUPED else "lazy")
    assert runs[0] == runs[1]


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8}], ids=str)
@pytest.mark.parametrize("logprobs", [None, 2])
def test_threshold_reads_p_where_alpha_reaches_it(
    threshold: float, sampling: dict[str, Any], logprobs: int | None
) -> None:
    model = sharp_model(vocab_size=64, real_vocab_size=53)
    texts = prompts(model, 10)
    runs = []
    for options in (GROUPED, LAZY):
        bench = Bench(model, 10, options)
        for seed, prompt in enumerate(texts):
            aux = AuxPolicy("threshold", threshold)
            bench.add(prompt, seed=seed, aux=aux, logprobs=logprobs, **sampling)
        for _ in range(6):
            known = {r.id: [*r.prompt_ids, *r.output_ids] for r in bench.requests.values()}
            for result in bench.step(*(bench.plan(r) for r in bench.requests.values())):
                (choice,) = result.tokens
                on = expected(model, known[result.request_id])
                off = expected(model, known[result.request_id], aux=False)
                assert choice.alpha is not None
                skipped = choice.alpha >= threshold
                want = (off if skipped else on).r[-1, choice.token_id]
                assert choice.log_r == pytest.approx(float(want), abs=1e-9)
                assert (choice.log_q is None) == skipped
                assert choice.source == ("p" if skipped else None)
        runs.append([r.output_ids for r in bench.requests.values()])
    assert runs[0] == runs[1]


def test_what_depends_on_r_itself_runs_the_auxiliary_under_exact() -> None:
    model = sharp_model()
    every: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 0.0, "frequency_penalty": 0.5},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"logprobs": 2},
        {"drafts": "primary"},
    ]
    for params in every:
        bench = Bench(model, 1, LAZY)
        request = bench.add([1, 2, 3], aux=EXACT, **params)
        for _ in range(6):
            assert bench.step(bench.plan(request))[0].aux_positions == 1
            assert bench.last.execution == "grouped"


@pytest.mark.parametrize("kind", ["aux_only", "primary_only"])
def test_exact_and_threshold_are_on_where_r_is_no_mixture(kind: Any) -> None:
    model = sharp_model(readout=ReadoutConfig(kind=kind))
    runs = []
    for aux in (AuxPolicy("on"), EXACT, AuxPolicy("threshold", 0.5)):
        bench = Bench(model, 1, LAZY)
        bench.add([1, 2, 3], temperature=0.0, aux=aux)
        runs.append(bench.generate(8))
        assert bench.last.sequences[0].aux_positions == 1
    assert runs[0] == runs[1] == runs[2]


def test_a_primary_that_stands_alone_gives_the_tokens_of_the_model_without_flows() -> None:
    prompt = [1, 2, 3]
    dual = add_aux(tiny_model(tiny_config()), readout=ReadoutConfig(kind="aux_only"))
    with torch.no_grad():
        dual.get_parameter("model.aux.0.embed_tokens.weight").neg_()
    runs = []
    for model, aux in ((tiny_model(tiny_config()), AuxPolicy("on")), (dual, OFF), (dual, None)):
        bench = Bench(model)
        bench.add(prompt, temperature=0.0, aux=aux or AuxPolicy("on"))
        runs.append(bench.generate(8))
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("params", [{"aux": OFF}, {"drafts": "primary"}], ids=str)
def test_what_needs_a_trained_p_is_refused_where_there_is_none(params: Any) -> None:
    for model in (
        tiny_model(tiny_config("phd2")),
        tiny_model(tiny_config("dual", readout=ReadoutConfig(kind="aux_only"))),
    ):
        with pytest.raises(RequestError, match="no trained p"):
            Bench(model).add([1], **params)


def test_chunks_of_a_prompt_run_no_auxiliary_and_policies_mix_in_a_step() -> None:
    model = sharp_model()
    bench = Bench(model, 4, LAZY)
    chunk = bench.add(random_tokens(model.config, 20).tolist(), temperature=0.0)
    others = [bench.add([7, 8], temperature=0.0, aux=aux) for aux in (AuxPolicy("on"), OFF, EXACT)]
    first = SequencePlan("0", chunk.prompt_ids[:9], 0, tuple(chunk.pages), 0, 0, False)
    result = bench.runner.run(StepPlan((first, *(bench.plan(r) for r in others))))
    assert [len(s.tokens) for s in result.sequences] == [0, 1, 1, 1]
    assert [s.aux_positions for s in result.sequences[:3]] == [0, 1, 0]
    last = SequencePlan("0", chunk.prompt_ids[9:], 9, tuple(chunk.pages), 9, 1, True)
    (result,) = bench.runner.run(StepPlan((last,))).sequences
    assert result.tokens[0].token_id == naive(model, chunk.prompt_ids, 1, temperature=0)[0].token_id
    assert result.aux_positions == 1


@pytest.mark.parametrize("aux", ["on", "off"])
def test_prompt_rows_report_the_prompts_own_next_token(aux: Any) -> None:
    model = sharp_model()
    bench = Bench(model)
    prompt = random_tokens(model.config, 11).tolist()
    request = bench.add(prompt, temperature=0.0, prompt_logprobs=2, aux=AuxPolicy(aux))
    pages = tuple(request.pages)
    first = SequencePlan("0", tuple(prompt[:6]), 0, pages, 0, 6, False)
    last = SequencePlan("0", tuple(prompt[6:]), 6, pages, 6, 5, True)
    choices = []
    for plan in (first, last):
        (result,) = bench.runner.run(StepPlan((plan,))).sequences
        choices += result.prompt
        assert result.aux_positions == (plan.num_read if aux == "on" else 0)
    assert len(result.tokens) == 1
    want = expected(model, prompt, aux=aux == "on").r
    assert [choice.token_id for choice in choices] == prompt[1:]
    for position, choice in enumerate(choices):
        assert choice.log_r == pytest.approx(float(want[position, prompt[position + 1]]), abs=1e-9)
        top = want[position].topk(2)
        assert [token for token, _ in choice.top] == top.indices.tolist()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 3}, {"aux": EXACT}], ids=str)
def test_a_sequence_that_is_not_numbers_fails_alone(params: Any) -> None:
    model = sharp_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = math.nan
    bench = Bench(model, 2, LAZY)
    bad, good = bench.add([1, 9, 2], **params), bench.add([1, 2, 3], temperature=0.0)
    want = ids(naive(model, [1, 2, 3], 4, temperature=0))
    for token in want:
        plans = (bench.plan(bad), bench.plan(good))
        failed, result = bench.runner.run(StepPlan(plans)).sequences
        assert failed.error is not None and "not numbers" in failed.error and not failed.tokens
        assert [choice.token_id for choice in result.tokens] == [token]
        bench.apply(good, result)


def test_pages_of_a_failed_sequence_serve_the_next() -> None:
    model = sharp_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = math.nan
    bench = Bench(model, 1)
    bad = bench.add([9] * 8, temperature=0.0)
    assert bench.runner.run(StepPlan((bench.plan(bad),))).sequences[0].error is not None
    bench.pages.append(bench.pages[0])
    bench.runner.drop(bad.id)
    good = bench.add([1, 2, 3], temperature=0.0)
    for token in ids(naive(model, [1, 2, 3], 6, temperature=0)):
        assert bench.step(bench.plan(good))[0].tokens[0].token_id == token


def test_dropping_twice_or_what_was_never_there_is_fine() -> None:
    bench = Bench(sharp_model())
    bench.add([1])
    for name in ("0", "0", "no such request"):
        bench.runner.drop(name)


def test_copies_are_made_before_the_step() -> None:
    model = sharp_model()
    bench = Bench(model, 2)
    one, two = bench.add([1, 2, 3, 4, 5, 6], temperature=0.0), bench.add([1, 2, 3, 4, 5, 6])
    bench.step(bench.plan(one))
    copies = tuple(zip(one.pages[:2], two.pages[:2], strict=True))
    plan = SequencePlan("1", (6,), 5, tuple(two.pages), 5, 1, True)
    result = bench.runner.run(StepPlan((plan,), copies)).sequences[0]
    want = expected(model, [1, 2, 3, 4, 5, 6]).r[-1]
    assert result.tokens[0].log_r == pytest.approx(float(want[result.tokens[0].token_id]), abs=1e-9)


def test_cache_bytes_are_the_standard_twins() -> None:
    sizes = {Bench(tiny_model(tiny_config(v)), 3).executor.cache_bytes for v in (
        "standard", "dual", "phd2", "two_softmax"
    )}  # fmt: skip
    assert len(sizes) == 1
