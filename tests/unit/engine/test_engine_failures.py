"""Requests that fail or are refused, and that nobody else notices."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.engine import (
    AuxPolicy,
    Engine,
    EngineConfig,
    RequestError,
    RequestParams,
    StructuredOutput,
)
from dualflow.engine.executor import Readout, StepRows
from dualflow.engine.torch_executor import TorchExecutor
from dualflow.model import CausalLM
from dualflow.testing import tiny_config
from dualflow.testing.engines import ends_of, run_all, tiny_engine
from dualflow.testing.tensors import tiny_model
from tests.unit.engine.requests_of import GREEDY, PROMPT, WRITING, run


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
