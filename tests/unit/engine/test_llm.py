"""``LLM``: order, refusals before anything runs, streams that share steps, Ctrl-C."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualflow.checkpoint import save_model
from dualflow.config import ConfigError
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.engine import (
    LLM,
    Event,
    FinishEvent,
    PromptEvent,
    RequestError,
    RequestParams,
    TokenEvent,
)
from dualflow.model import CausalLM
from dualflow.testing import tiny_config
from dualflow.testing.engines import LETTERS
from dualflow.testing.tensors import tiny_model

GREEDY = RequestParams(temperature=0, max_tokens=6)
LONG = RequestParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return tiny_model(tiny_config("dual", vocab_size=259))


@pytest.fixture
def llm(model: CausalLM) -> Iterator[LLM]:
    with LLM(model, bytes_tokenizer(), backend="torch", num_pages=100, page_size=8) as llm:
        yield llm
        assert not llm.engine.has_work
        llm.engine.check_idle()


def count_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets an entry with every step."""
    steps: list[int] = []
    step = llm.engine.step

    def counted() -> list[Event]:
        steps.append(1)
        return step()

    monkeypatch.setattr(llm.engine, "step", counted)
    return steps


class TestGenerate:
    def test_outputs_are_in_the_order_of_the_prompts(self, llm: LLM) -> None:
        prompts = ["a long prompt that is read in the end", "b", "", [99, 100], "b"]
        params = [replace(GREEDY, max_tokens=9 - i) for i in range(5)]
        together = llm.generate(prompts, params)
        for prompt, of_prompt, output in zip(prompts, params, together, strict=True):
            (alone,) = llm.generate([prompt], of_prompt)
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids
            assert output.text == alone.text
            assert output.prompt == (prompt if isinstance(prompt, str) else None)
        assert together[2].prompt_ids == (bytes_tokenizer().eos_id,)
        assert together[3].prompt_ids == (99, 100)

    def test_equal_prompts_are_requests_of_their_own(self, llm: LLM) -> None:
        params = [RequestParams(seed=seed, max_tokens=8) for seed in (1, 1, 2)]
        one, same, other = llm.generate(["x"] * 3, params)
        assert one.outputs[0].token_ids == same.outputs[0].token_ids
        assert one.outputs[0].token_ids != other.outputs[0].token_ids
        assert len({output.request_id for output in (one, same, other)}) == 3

    def test_no_prompts_no_outputs(self, llm: LLM) -> None:
        assert llm.generate([]) == []

    @pytest.mark.parametrize(
        "prompt",
        ["text", [97, 98], np.array([97, 98]), list(np.array([97, 98])), torch.tensor([97, 98])],
    )
    def test_one_prompt_need_not_be_in_a_list(self, llm: LLM, prompt: Any) -> None:
        assert len(llm.generate(prompt, GREEDY)) == 1

    @pytest.mark.parametrize("prompts", [None, 5, b"text", {"prompt": "text"}])
    def test_what_is_no_prompt_is_refused(self, llm: LLM, prompts: Any) -> None:
        with pytest.raises(RequestError, match="expected a text"):
            llm.generate(prompts, GREEDY)

    def test_n_outputs_are_in_order(self, llm: LLM) -> None:
        (output,) = llm.generate("ab", RequestParams(n=4, seed=3, max_tokens=5))
        assert [one.index for one in output.outputs] == [0, 1, 2, 3]
        (third,) = llm.generate("ab", RequestParams(seed=5, max_tokens=5))
        assert output.outputs[2].token_ids == third.outputs[0].token_ids

    @pytest.mark.parametrize(
        ("prompts", "params", "message"),
        [
            (["good", "x" * 129], GREEDY, r"^prompt 1: .*129 tokens"),
            (["good", [97], [300]], GREEDY, r"^prompt 2: .*token id 300"),
            (["good", []], GREEDY, r"^prompt 1: .*no tokens"),
            (["a", "b"], [GREEDY, replace(GREEDY, stop_ids=frozenset({999}))], r"^prompt 1: "),
            (["a", "b"], [GREEDY], "1 params for 2 prompts"),
        ],
    )
    def test_a_bad_prompt_is_named_before_anything_runs(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch, prompts: Any, params: Any, message: str
    ) -> None:
        steps = count_steps(llm, monkeypatch)
        with pytest.raises(RequestError, match=message):
            llm.generate(prompts, params)
        assert not steps

    def test_a_prompt_larger_than_the_cache_is_named_before_anything_runs(
        self, model: CausalLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.warns(UserWarning, match="the cache holds"):
            llm = LLM(model, num_pages=4, page_size=8, backend="torch")
        steps = count_steps(llm, monkeypatch)
        with pytest.raises(RequestError, match=r"^prompt 1: .*33 tokens.* 5 pages"):
            llm.generate([[97], [97] * 33, [98]], GREEDY)
        assert not steps
        assert not llm.engine.has_work
        llm.engine.check_idle()

    def test_outputs_come_as_soon_as_they_are_whole(self, llm: LLM) -> None:
        outputs = llm.generate_as_completed(["a", "b"], [LONG, GREEDY])
        assert next(outputs)[0] == 1
        assert llm.engine.stats().running == 1
        outputs.close()  # type: ignore[attr-defined]

    def test_an_unknown_setting_is_named(self, model: CausalLM) -> None:
        with pytest.raises(ConfigError, match="page_sise"):
            LLM(model, page_sise=8)


class TestStream:
    def test_pieces_make_the_text(self, llm: LLM) -> None:
        params = RequestParams(seed=1, max_tokens=20, allowed_ids=LETTERS, stop=("abc",))
        events = list(llm.stream("start", params))
        (output,) = llm.generate("start", params)
        pieces = [event.text for event in events if not isinstance(event, PromptEvent)]
        assert "".join(pieces) == output.text
        assert isinstance(events[-1], FinishEvent)
        assert events[-1].usage.new_tokens == len(events) - 1

    def test_two_streams_share_their_steps(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        alone = [ids(llm.stream(prompt, GREEDY)) for prompt in ("a", "bb")]
        steps = count_steps(llm, monkeypatch)
        one, two = llm.stream("a", GREEDY), llm.stream("bb", GREEDY)
        both = list(zip(one, two, strict=True))
        assert [ids(event[i] for event in both) for i in (0, 1)] == alone
        assert len(steps) < 10

    def test_leaving_a_stream_ends_its_request(self, llm: LLM) -> None:
        for event in llm.stream("a", LONG):
            assert isinstance(event, TokenEvent)
            break
        assert llm.engine.stats().running == 0

    def test_what_is_wrong_is_told_by_the_call(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="no tokens"):
            llm.stream([], GREEDY)

    def test_a_request_goes_on_in_other_requests_steps(self, llm: LLM) -> None:
        stream = llm.stream("a", GREEDY)
        first = next(stream)
        llm.generate("b", LONG)
        assert ids([first, *stream]) == ids(llm.stream("a", GREEDY))


class TestInterrupts:
    def test_ctrl_c_in_a_step_leaves_the_engine_empty_and_usable(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (reference,) = llm.generate("a", GREEDY)
        runner_steps = 0
        run = llm.engine._runner.run

        def interrupted(plan: Any) -> Any:
            nonlocal runner_steps
            runner_steps += 1
            if runner_steps == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return run(plan)

        monkeypatch.setattr(llm.engine._runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], replace(LONG, n=2))
        assert runner_steps == 3
        assert not llm.engine.has_work
        llm.engine.check_idle()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert llm.generate("a", GREEDY)[0].text == reference.text

    def test_a_second_ctrl_c_does_not_wait_for_the_step(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def hangs(plan: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the second one was not heard")

        monkeypatch.setattr(llm.engine._runner, "run", hangs)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], LONG)
        assert not llm.engine.has_work
        llm.engine.check_idle()


class TestFolders:
    def test_a_model_folder_brings_its_tokenizer(self, model: CausalLM, tmp_path: Path) -> None:
        save_model(model, tmp_path / "m", tokenizer_json=bytes_tokenizer().to_json())
        with LLM(tmp_path / "m", backend="torch", num_pages=20) as llm:
            assert llm.generate("a", GREEDY)[0].text
        with pytest.raises(ValueError, match="brings its own tokenizer"):
            LLM(tmp_path / "m", bytes_tokenizer())

    def test_a_folder_without_tokenizer_takes_ids(self, model: CausalLM, tmp_path: Path) -> None:
        save_model(model, tmp_path / "m")
        with LLM(tmp_path / "m", backend="torch", num_pages=20) as llm:
            assert len(llm.generate([97], GREEDY)[0].outputs[0].token_ids) == 6

    def test_a_conversation_is_rendered_by_the_folders_template(
        self, model: CausalLM, tmp_path: Path
    ) -> None:
        pytest.importorskip("transformers")
        save_model(model, tmp_path / "m", tokenizer_json=bytes_tokenizer().to_json())
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}bot:"
        (tmp_path / "m/chat_template.jinja").write_text(template, encoding="utf-8")
        messages = [{"role": "user", "content": "hi"}]
        with LLM(tmp_path / "m", backend="torch", num_pages=20) as llm:
            ids = llm.encode_chat(messages)
            assert bytes(ids) == b"user: hi\nbot:"
            answer = llm.chat(messages, GREEDY)
            assert answer.prompt_ids == tuple(ids)
            assert answer.text == llm.generate(ids, GREEDY)[0].text

    def test_a_model_without_template_cannot_chat(self, llm: LLM, model: CausalLM) -> None:
        with pytest.raises(ValueError, match="no chat template"):
            llm.chat([{"role": "user", "content": "hi"}])

    def test_what_is_closed_stays_closed(self, model: CausalLM) -> None:
        llm = LLM(model, backend="torch", num_pages=20)
        llm.close()
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate([97])


def ids(events: Any) -> list[int]:
    return [event.choice.token_id for event in events if isinstance(event, TokenEvent)]
