"""Requests through the engine: ends, reports, failures, and what it refuses."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.engine import (
    AuxPolicy,
    Engine,
    EngineConfig,
    PromptEvent,
    RequestError,
    RequestOutput,
    RequestParams,
    StructuredOutput,
    TokenEvent,
    build_engine,
)
from dualflow.engine.executor import Readout, StepRows
from dualflow.engine.torch_executor import TorchExecutor
from dualflow.model import CausalLM
from dualflow.testing import tiny_config
from dualflow.testing.engines import LETTERS, ends_of, run_all, tiny_engine
from dualflow.testing.steps import whole_sequence
from dualflow.testing.tensors import tiny_model

PROMPT = [97, 98, 99, 100, 101, 97, 98]
GREEDY = RequestParams(temperature=0, max_tokens=6)
WRITING = RequestParams(seed=1, max_tokens=40, allowed_ids=LETTERS)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    """A random dual-flow model over bytes, in float64."""
    return tiny_model(tiny_config("dual", vocab_size=264, real_vocab_size=259))


@pytest.fixture
def engine(model: CausalLM) -> Engine:
    return tiny_engine(model, bytes_tokenizer())


def run(engine: Engine, params: RequestParams, prompt: Sequence[int] = PROMPT) -> RequestOutput:
    name = engine.add(prompt, params)
    return run_all(engine, [name])[name]


class TestStopStrings:
    def text_of(self, engine: Engine, **changes: Any) -> str:
        return run(engine, replace(WRITING, **changes)).text

    def test_end_the_text_before_the_first_one_wherever_tokens_end(self, engine: Engine) -> None:
        whole = self.text_of(engine)
        assert len(whole) == 40  # a letter each
        for length in (1, 2, 5):
            for start in (3, 11, 30):
                stop = whole[start : start + length]
                output = run(engine, replace(WRITING, stop=(stop, "zzz")))
                (only,) = output.outputs
                assert output.text == whole[: whole.index(stop)]
                assert (only.finish_reason, only.stop) == ("stop", stop)
                assert only.usage.new_tokens == len(output.text) + length

    def test_do_not_count_before_min_tokens(self, engine: Engine) -> None:
        whole = self.text_of(engine)
        stop = whole[4]
        after = whole.index(stop, 20)
        output = run(engine, replace(WRITING, stop=(stop,), min_tokens=20))
        assert output.text == whole[:after]
        assert output.outputs[0].usage.new_tokens == after + 1

    def test_drop_what_was_accepted_after_them_in_the_same_step(self, engine: Engine) -> None:
        params = replace(WRITING, temperature=0, drafts="ngram", num_drafts=6)
        whole = run(engine, params)
        assert whole.outputs[0].usage.accepted > 5
        stop = whole.text[25:28]
        output = run(engine, replace(params, stop=(stop,)))
        assert output.text == whole.text[: whole.text.index(stop)]
        assert output.outputs[0].usage.new_tokens == len(output.text) + 3

    def test_a_beginning_that_comes_to_nothing_is_told_at_the_end(self, engine: Engine) -> None:
        whole = self.text_of(engine)
        output = run(engine, replace(WRITING, stop=(whole[-2:] + "q",)))
        assert output.text == whole
        assert output.outputs[0].finish_reason == "length"


class TestEnds:
    def test_a_stop_id_gives_no_text_and_is_reported(self, engine: Engine) -> None:
        whole = run(engine, WRITING)
        token = whole.outputs[0].token_ids[9]
        first = whole.outputs[0].token_ids.index(token)
        (only,) = run(engine, replace(WRITING, stop_ids=frozenset({token}))).outputs
        assert only.finish_reason == "stop"
        assert only.stop is None
        assert only.token_ids == whole.outputs[0].token_ids[: first + 1]
        assert only.text == whole.text[:first]

    def test_no_stop_id_comes_before_min_tokens(self, engine: Engine) -> None:
        params = replace(WRITING, stop_ids=frozenset({97, 98, 99}), min_tokens=12, max_tokens=60)
        for seed in range(4):
            (only,) = run(engine, replace(params, seed=seed)).outputs
            assert len(only.token_ids) > 12
            assert not {97, 98, 99} & set(only.token_ids[:12])
            assert only.finish_reason == "stop"

    def test_the_end_of_text_id_counts_unless_it_is_to_be_ignored(self, engine: Engine) -> None:
        eos = bytes_tokenizer().eos_id
        params = RequestParams(temperature=0, max_tokens=4, logit_bias={eos: 100.0})
        assert run(engine, params).outputs[0].token_ids == (eos,)
        ignoring = run(engine, replace(params, ignore_eos=True)).outputs[0]
        assert ignoring.token_ids == (eos,) * 4
        assert ignoring.text == ""

    def test_a_text_of_the_models_length_ends_with_context(self, engine: Engine) -> None:
        prompt = [97] * 126
        (only,) = run(engine, RequestParams(temperature=0, max_tokens=99), prompt).outputs
        assert (only.finish_reason, len(only.token_ids)) == ("context", 3)

    def test_half_a_character_is_told_at_the_end(self, engine: Engine) -> None:
        params = RequestParams(max_tokens=2, allowed_ids=frozenset({0xE6}))
        assert run(engine, params).text == "\N{REPLACEMENT CHARACTER}" * 2


class TestReports:
    def expected(self, model: CausalLM, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            out = whole_sequence(model, torch.tensor(ids))
            return model.log_probs(out.primary_TD, out.aux_FAD).r

    @pytest.mark.parametrize("chunk", [1, 3, 512])
    def test_logprobs_of_prompt_and_output_are_those_of_the_model(
        self, model: CausalLM, chunk: int
    ) -> None:
        engine = tiny_engine(model, max_step_tokens=chunk)
        output = run(engine, replace(GREEDY, logprobs=3, prompt_logprobs=2))
        (only,) = output.outputs
        ids = [*PROMPT, *only.token_ids]
        log_r_TV = self.expected(model, ids)
        assert output.prompt_choices is not None
        choices = [*output.prompt_choices, *only.choices]
        assert [choice.token_id for choice in choices] == ids[1:]
        for position, choice in enumerate(choices):
            row_V = log_r_TV[position]
            best = row_V.topk(len(choice.top))
            assert len(choice.top) == (2 if position < len(PROMPT) - 1 else 3)
            assert choice.log_r == pytest.approx(float(row_V[choice.token_id]), abs=1e-9)
            assert [token for token, _ in choice.top] == best.indices.tolist()
            assert [log for _, log in choice.top] == pytest.approx(best.values.tolist(), abs=1e-9)

    def test_a_prompt_is_reported_once_before_the_first_token(self, engine: Engine) -> None:
        engine.add(PROMPT, replace(GREEDY, prompt_logprobs=0, n=3))
        events = []
        while engine.has_work:
            events += engine.step()
        kinds = [type(event) for event in events]
        assert kinds.count(PromptEvent) == 1
        assert kinds.index(PromptEvent) < kinds.index(TokenEvent)
        assert [end.last for end in ends_of(events)] == [False, False, True]

    def test_a_prompt_of_one_token_has_nothing_to_report(self, engine: Engine) -> None:
        assert run(engine, replace(GREEDY, prompt_logprobs=1), [97]).prompt_choices == ()
        assert run(engine, GREEDY).prompt_choices is None

    def test_usage_counts_this_output_alone(self, engine: Engine) -> None:
        first = run(engine, GREEDY).outputs[0].usage
        assert (first.prompt_tokens, first.new_tokens, first.aux_positions) == (7, 6, 6)
        assert first.cached_tokens == 0
        assert first.first_token_seconds is not None
        assert 0 < first.first_token_seconds < first.seconds
        assert first.tokens_per_second is not None
        again = run(engine, replace(GREEDY, aux=AuxPolicy("off"), max_tokens=1)).outputs[0].usage
        assert (again.cached_tokens, again.aux_positions) == (4, 0)
        assert again.tokens_per_second is None
        stats = engine.stats()
        assert (stats.new_tokens, stats.prompt_tokens, stats.cached_tokens) == (7, 14, 4)
        assert stats.finished == {"length": 2}


class FaultyExecutor:
    """A ``TorchExecutor`` that can be told to go wrong."""

    def __init__(self, model: CausalLM, num_pages: int, page_size: int) -> None:
        self._inner = TorchExecutor(model, num_pages, page_size)
        self.not_a_number_after: int | None = None
        self.error: BaseException | None = None

    @property
    def cache_bytes(self) -> int:
        return self._inner.cache_bytes

    def step(self, rows: StepRows) -> Readout:
        if self.error is not None:
            raise self.error
        readout = self._inner.step(rows)
        for row, position in enumerate(rows.read):
            if rows.tokens[position] == self.not_a_number_after:
                readout.r = readout.r.clone()
                readout.r[row] = torch.nan
        return readout

    def add_aux(self, rows: StepRows, readout: Readout, aux: Sequence[int]) -> Readout:
        return self._inner.add_aux(rows, readout, aux)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        self._inner.copy_pages(copies)


class TestFailures:
    @pytest.fixture
    def executor(self, model: CausalLM) -> FaultyExecutor:
        return FaultyExecutor(model, num_pages=64, page_size=4)

    @pytest.fixture
    def engine(self, executor: FaultyExecutor, model: CausalLM) -> Engine:
        config = EngineConfig(num_pages=64, page_size=4)
        return Engine(executor, model.config, bytes_tokenizer(), config)

    def test_one_request_fails_and_the_others_go_on(
        self, engine: Engine, executor: FaultyExecutor
    ) -> None:
        params = replace(WRITING, max_tokens=5)
        reference = run(engine, params).outputs[0].token_ids
        executor.not_a_number_after = 200
        names = [engine.add(p, params) for p in (PROMPT, [97, 200], PROMPT)]
        done = run_all(engine, names)
        good, bad, also_good = (done[name].outputs[0] for name in names)
        assert bad.finish_reason == "error"
        assert bad.error is not None
        assert "not numbers" in bad.error
        assert good.token_ids == also_good.token_ids == reference

    def test_one_fails_after_a_token_of_the_same_step_and_the_others_go_on(
        self, engine: Engine, executor: FaultyExecutor
    ) -> None:
        """The first guess holds, and the row after it is not numbers."""
        prompt, letters = [1, 2, 98, 99, 5, 1, 2], frozenset({98, 99})
        params = RequestParams(max_tokens=9, allowed_ids=letters, drafts="ngram", logprobs=0)
        seeded = (replace(params, seed=seed) for seed in range(100))
        params = next(p for p in seeded if run(engine, p, prompt).text.startswith("bc"))
        reference = run(engine, GREEDY).outputs[0].token_ids
        executor.not_a_number_after = 99
        names = [engine.add(prompt, params), engine.add(PROMPT, GREEDY)]
        done = run_all(engine, names)
        bad, good = (done[name].outputs[0] for name in names)
        assert (bad.finish_reason, len(bad.token_ids)) == ("error", 1)
        assert good.token_ids == reference

    def test_one_whose_shape_takes_no_further_token_fails_alone(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("llguidance")

        def accept(self: object, token_id: int) -> None:
            raise RequestError("the structured output cannot go on")

        monkeypatch.setattr("dualflow.engine.structured.ShapedText.accept", accept)
        reference = run(engine, GREEDY).outputs[0].token_ids
        shaped = replace(WRITING, structured=StructuredOutput("regex", "[a-e]+"))
        names = [engine.add(PROMPT, params) for params in (shaped, GREEDY)]
        bad, good = (output.outputs[0] for output in run_all(engine, names).values())
        assert (bad.finish_reason, bad.error) == ("error", "the structured output cannot go on")
        assert good.token_ids == reference

    @pytest.mark.parametrize("error", [MemoryError("no memory"), KeyboardInterrupt()])
    def test_a_step_that_fails_ends_its_requests_and_leaves_the_engine_in_order(
        self, engine: Engine, executor: FaultyExecutor, error: BaseException
    ) -> None:
        reference = run(engine, GREEDY).outputs[0].token_ids
        engine.add(PROMPT, replace(GREEDY, n=2))
        engine.step()
        engine.step()
        engine.add([5, 6, 7, 8, 9], GREEDY)
        executor.error = error
        with pytest.raises(type(error)):
            engine.step()
        executor.error = None
        ends = ends_of(engine.step())
        assert [end.reason for end in ends] == ["error"] * 3
        assert all("the step failed" in (end.error or "") for end in ends)
        engine.check_idle()
        assert run(engine, GREEDY).outputs[0].token_ids == reference

    def test_nothing_of_a_failed_step_is_in_the_prefix_cache(
        self, engine: Engine, executor: FaultyExecutor
    ) -> None:
        executor.error = MemoryError()
        engine.add(PROMPT, GREEDY)
        with pytest.raises(MemoryError):
            engine.step()
        executor.error = None
        assert run(engine, GREEDY).outputs[0].usage.cached_tokens == 0


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompt", "params", "message"),
        [
            ([], GREEDY, "no tokens"),
            ([97] * 129, GREEDY, "129 tokens, but the model has 128 positions"),
            ([259], GREEDY, "token id 259, but the vocabulary ends at 258"),
            ([-1], GREEDY, "token id -1"),
            (["a"], GREEDY, "no list of token ids"),
            ([97.0], GREEDY, "no list of token ids"),
            ([True, False], GREEDY, "there is a bool in it"),
            (b"ab", GREEDY, "of type bytes"),
            ({97: 98}, GREEDY, "of type dict"),
            ("ab\ud83d", GREEDY, r"position 2, but half of a surrogate pair \(U\+D83D\)"),
            (PROMPT, {"max_tokens": 3}, "expected RequestParams"),
            (PROMPT, replace(GREEDY, stop_ids=frozenset({300})), "stop_ids .* 300"),
            (PROMPT, replace(GREEDY, allowed_ids=frozenset({259})), "allowed_ids .* 259"),
            (PROMPT, replace(GREEDY, logit_bias={400: 1.0}), "logit_bias .* 400"),
        ],
    )
    def test_what_the_model_cannot_do(
        self, engine: Engine, prompt: Any, params: RequestParams, message: str
    ) -> None:
        with pytest.raises(RequestError, match=message):
            engine.add(prompt, params)
        assert not engine.has_work

    @pytest.mark.parametrize("fields", [{"tenant": None}, {"tenant": 5}, {"request_id": 5}])
    def test_what_is_no_text_and_would_fail_in_the_step_of_all(
        self, engine: Engine, fields: Any
    ) -> None:
        with pytest.raises(RequestError, match="expected a text"):
            engine.add(PROMPT, GREEDY, **fields)

    def test_texts_without_a_tokenizer(self, model: CausalLM) -> None:
        engine = tiny_engine(model)
        with pytest.raises(RequestError, match="has no tokenizer"):
            engine.add("text", GREEDY)
        with pytest.raises(RequestError, match="stop needs a tokenizer"):
            engine.add(PROMPT, replace(GREEDY, stop=("a",)))

    def test_off_where_there_is_no_trained_p(self) -> None:
        engine = tiny_engine(tiny_model(tiny_config("phd2")))
        with pytest.raises(RequestError, match="no trained p"):
            engine.add([1], replace(GREEDY, aux=AuxPolicy("off")))

    def test_an_id_that_is_in_use_and_no_other(self, engine: Engine) -> None:
        engine.add(PROMPT, GREEDY, request_id="a")
        with pytest.raises(RequestError, match="'a' is in use"):
            engine.add(PROMPT, GREEDY, request_id="a")
        engine.add(PROMPT, GREEDY, request_id="a.0")
        engine.abort("a")
        engine.add(PROMPT, GREEDY, request_id="a")
        done = run_all(engine, ["a.0"])
        assert done["a.0"].outputs[0].finish_reason == "length"

    def test_a_full_queue_takes_none_of_a_requests_outputs(self, model: CausalLM) -> None:
        engine = tiny_engine(model, max_waiting=0, max_running=1)
        engine.add(PROMPT, GREEDY)
        engine.step()
        with pytest.raises(RequestError, match="try again later"):
            engine.add(PROMPT, replace(GREEDY, n=3))
        assert engine.stats().waiting == 0
        engine.abort_all()
        engine.check_idle()


def test_an_empty_text_starts_from_the_end_of_text_id(engine: Engine) -> None:
    assert engine.encode("") == [bytes_tokenizer().eos_id]
    assert engine.encode("ab") == [97, 98]


def test_off_warns_once_with_both_losses(model: CausalLM) -> None:
    engine = build_engine(
        model, None, EngineConfig(num_pages=64, backend="torch"),
        metrics={"val_loss": 1.25, "val_loss_p": 1.5},
    )  # fmt: skip
    off = replace(GREEDY, aux=AuxPolicy("off"))
    with pytest.warns(UserWarning, match=r"1\.5000 .* 1\.2500") as caught:
        engine.add(PROMPT, off)
        engine.add(PROMPT, off)
    assert len(caught) == 1


def test_numbers_of_any_integer_type_are_ids(engine: Engine) -> None:
    prompts: list[Any] = [PROMPT, torch.tensor(PROMPT), np.array(PROMPT, np.uint16)]
    tokens = [run(engine, GREEDY, prompt).outputs[0].token_ids for prompt in prompts]
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_json_schema_shapes_the_text_of_each_output(engine: Engine) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    shape = StructuredOutput("json_schema", json.dumps(schema))
    output = run(engine, RequestParams(seed=1, n=3, max_tokens=300, structured=shape))
    for one in output.outputs:
        assert one.finish_reason == "stop"
        assert isinstance(json.loads(one.text)["ok"], bool)
    with pytest.raises(RequestError, match="not JSON"):
        engine.add(PROMPT, replace(GREEDY, structured=StructuredOutput("json_schema", "{")))
    with pytest.raises(RequestError, match="ignore_eos"):
        engine.add(PROMPT, replace(GREEDY, structured=shape, ignore_eos=True))


@pytest.mark.parametrize("stop_ids", [frozenset(), frozenset({98})])
def test_the_end_of_a_shape_ends_the_output_whatever_min_tokens(
    engine: Engine, stop_ids: frozenset[int]
) -> None:
    """And it is the end of the shape that does, not a stop id which the shape asks for."""
    pytest.importorskip("llguidance")
    shape = StructuredOutput("regex", "abc")
    params = RequestParams(min_tokens=20, max_tokens=30, structured=shape, stop_ids=stop_ids)
    output = run(engine, params).outputs[0]
    assert (output.text, output.finish_reason) == ("abc" if not stop_ids else "ac", "stop")
    assert len(output.token_ids) == 4
