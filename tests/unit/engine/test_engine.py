"""Requests through the engine: how they end and what is reported."""

import json
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
    RequestParams,
    StructuredOutput,
    TokenEvent,
    build_engine,
)
from dualflow.model import CausalLM
from dualflow.testing.engines import ends_of, tiny_engine
from dualflow.testing.steps import whole_sequence
from tests.unit.engine.requests_of import GREEDY, PROMPT, WRITING, run


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
