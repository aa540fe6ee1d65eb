"""What users of comparable engines have met, tried on ours from prompt to text."""

import random
import warnings
from collections import Counter
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest
import torch

from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.engine import LLM, Engine, RequestError, RequestOutput, RequestParams
from dualflow.model import CausalLM
from dualflow.testing import tiny_config
from dualflow.testing.engines import LETTERS, ends_of, run_all, tiny_engine
from dualflow.testing.tensors import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:the cache holds")

PREFIX = "import os\nimport sys\n\n\ndef main(argv):\n    "
ENDINGS = ("return", "for name in argv:", "if not argv:\n        ", "print(", "path = os")


@pytest.fixture(scope="module")
def letters() -> CausalLM:
    """A random dual-flow model over bytes, in float64."""
    return tiny_model(tiny_config("dual", vocab_size=259, max_position=256))


def shipped(**settings: Any) -> LLM:
    with resources.as_file(resources.files("dualflow") / "assets" / "tiny") as folder:
        return LLM(folder, backend="torch", page_size=8, **settings)


def tokens_and_logs(output: RequestOutput) -> tuple[list[int], list[float]]:
    (only,) = output.outputs
    logs = [log for choice in only.choices for _, log in choice.top]
    return list(only.token_ids), logs


class TestPrefixCaching:
    def test_answers_are_the_same_with_and_without_and_every_time(self) -> None:
        params = RequestParams(temperature=0, max_tokens=12, logprobs=5)
        prompts = [PREFIX + ending for ending in ENDINGS]
        with shipped(num_pages=200, prefix_cache=False) as without:
            reference = [tokens_and_logs(output) for output in without.generate(prompts, params)]
        with shipped(num_pages=48) as llm:
            cached = 0
            for round_ in range(4):
                if round_ == 2:  # push everything out
                    llm.generate([[7 * i % 1000] * 300 for i in range(1, 3)], params)
                for prompt, (tokens, logs) in zip(prompts, reference, strict=True):
                    (output,) = llm.generate(prompt, params)
                    got_tokens, got_logs = tokens_and_logs(output)
                    assert got_tokens == tokens
                    assert got_logs == pytest.approx(logs, abs=1e-5)
                    cached += output.outputs[0].usage.cached_tokens
            assert cached > 0
            llm.engine.check_idle()

    def test_a_second_turn_reads_what_the_first_one_wrote(self) -> None:
        params = RequestParams(temperature=0, max_tokens=20, logprobs=5)
        answers = []
        for prefix_cache in (False, True):
            with shipped(num_pages=100, prefix_cache=prefix_cache) as llm:
                first = llm.engine.encode(PREFIX)
                (one,) = llm.generate(first, params)
                second = [*first, *one.outputs[0].token_ids, *llm.engine.encode("\n    return")]
                (two,) = llm.generate(second, params)
                answers.append((tokens_and_logs(one), tokens_and_logs(two)))
                used = two.outputs[0].usage.cached_tokens
                assert used > len(first) if prefix_cache else used == 0
        for without, with_cache in zip(*answers, strict=True):
            assert with_cache[0] == without[0]
            assert with_cache[1] == pytest.approx(without[1], abs=1e-5)

    def test_tenants_do_not_share_what_they_wrote(self, letters: CausalLM) -> None:
        engine = tiny_engine(letters)
        params = RequestParams(temperature=0, max_tokens=2)
        cached = []
        for tenant in ("a", "a", "b"):
            name = engine.add(list(range(97, 117)), params, tenant=tenant)
            cached.append(run_all(engine, [name])[name].outputs[0].usage.cached_tokens)
        assert cached == [0, 19, 0]


class TestPreemption:
    REQUESTS = (
        RequestParams(temperature=0, max_tokens=60, allowed_ids=LETTERS, logprobs=2),
        RequestParams(seed=4, max_tokens=50, allowed_ids=LETTERS, frequency_penalty=0.6),
        RequestParams(seed=9, max_tokens=40, allowed_ids=LETTERS, stop=("abca", "ddd"), n=2),
        RequestParams(seed=2, max_tokens=45, top_p=0.9, repetition_penalty=1.2, min_tokens=45),
        RequestParams(temperature=0, max_tokens=40, presence_penalty=1.0, prompt_logprobs=1),
    )

    def outputs(self, engine: Engine) -> list[RequestOutput]:
        names = [
            engine.add([97 + (i + k) % 9 for k in range(8 + 3 * i)], params)
            for i, params in enumerate(self.REQUESTS)
        ]
        done = run_all(engine, names)
        return [done[name] for name in names]

    def test_changes_no_token_no_text_and_no_count(self, letters: CausalLM) -> None:
        small = tiny_engine(letters, bytes_tokenizer(), num_pages=24, max_step_tokens=16)
        large = tiny_engine(letters, bytes_tokenizer(), num_pages=400)
        outputs, reference = self.outputs(small), self.outputs(large)
        assert small.stats().preemptions > 3
        assert large.stats().preemptions == 0
        for got, expected in zip(outputs, reference, strict=True):
            for a, b in zip(got.outputs, expected.outputs, strict=True):
                assert a.token_ids == b.token_ids
                assert (a.text, a.finish_reason, a.stop) == (b.text, b.finish_reason, b.stop)
                assert len(a.text) <= len(a.token_ids)
                assert a.usage.new_tokens == len(a.token_ids) == b.usage.new_tokens
                assert a.usage.prompt_tokens == b.usage.prompt_tokens
                assert a.usage.aux_positions >= a.usage.new_tokens
                for x, y in zip(a.choices, b.choices, strict=True):
                    assert x.log_r == pytest.approx(y.log_r, abs=1e-9)
                    assert [i for i, _ in x.top] == [i for i, _ in y.top]
            logs = [[c.log_r for c in o.prompt_choices or ()] for o in (got, expected)]
            assert logs[0] == pytest.approx(logs[1], abs=1e-9)
        assert sum(o.usage.preemptions for output in outputs for o in output.outputs) == (
            small.stats().preemptions
        )


class TestEverythingComesBack:
    def test_after_five_hundred_requests_and_aborts_in_every_state(self) -> None:
        model = tiny_model(tiny_config("dual", vocab_size=259, num_layers=1), dtype=torch.float32)
        engine = tiny_engine(
            model, bytes_tokenizer(), num_pages=36, max_step_tokens=48, max_running=24
        )
        draw = random.Random(0)
        names: list[str] = []
        aborted: list[str] = []
        live: set[str] = set()
        ends: Counter[str] = Counter()
        before = engine.stats()
        while live or len(names) < 500:
            for _ in range(draw.randrange(5) if len(names) < 500 else 0):
                names.append(engine.add(self.prompt(draw), self.params(draw)))
                live.add(names[-1])
            if live and draw.random() < 0.4:
                aborted.append(draw.choice(sorted(live)))
                assert engine.abort(aborted[-1])
            if aborted:  # a second time, soon or late
                assert not engine.abort(draw.choice((aborted[0], aborted[-1])))
            for end in ends_of(engine.step()):
                ends[end.request_id] += 1
                if end.last:
                    live.remove(end.request_id)
            now = engine.stats()
            for field in ("preemptions", "new_tokens", "computed_tokens", "aux_positions"):
                assert getattr(now, field) >= getattr(before, field), field
            before = now
        engine.check_idle()
        assert (before.waiting, before.running, before.pages_used) == (0, 0, 0)
        assert before.pages_free + before.pages_cached == 36
        assert ends.keys() == set(names)
        assert before.finished["abort"] > 50
        assert before.finished["length"] > 50
        assert before.preemptions > 0

    def prompt(self, draw: random.Random) -> list[int]:
        common = [97 + i % 7 for i in range(draw.choice((0, 8, 16)))]
        return [*common, *(draw.randrange(256) for _ in range(draw.randrange(1, 20)))]

    def params(self, draw: random.Random) -> RequestParams:
        return RequestParams(
            max_tokens=draw.randrange(1, 30), seed=draw.randrange(99), n=draw.choice((1, 1, 1, 3)),
            temperature=draw.choice((0.0, 1.0)), drafts=draw.choice(("off", "off", "ngram")),
            priority=draw.randrange(2),
        )  # fmt: skip

    def test_at_once_after_an_abort_without_another_step(self, letters: CausalLM) -> None:
        engine = tiny_engine(letters)
        name = engine.add(list(range(97, 117)), RequestParams(n=3, max_tokens=9))
        for _ in range(3):
            engine.step()
        assert engine.stats().pages_used > 0
        engine.abort(name)
        stats = engine.stats()
        assert (stats.waiting, stats.running, stats.pages_used) == (0, 0, 0)
        engine.check_idle()


class TestWhatCanNeverFit:
    """A cache of ten pages of four tokens, and a model with more positions."""

    SHORT = RequestParams(temperature=0, max_tokens=3)

    def engine(self, letters: CausalLM) -> Engine:
        return tiny_engine(letters, num_pages=10)

    def test_the_engine_warns_where_the_cache_is_smaller_than_the_model(
        self, letters: CausalLM
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match=r"holds 40 tokens, fewer than the model's 256"):
                self.engine(letters)

    def test_is_refused_with_numbers_and_blocks_nobody(self, letters: CausalLM) -> None:
        engine = self.engine(letters)
        with pytest.raises(RequestError, match=r"41 tokens.* 11 pages.* only 10 \(40 tokens\)"):
            engine.add([97] * 41, self.SHORT)
        assert engine.stats().waiting == 0
        name = engine.add([97, 98], self.SHORT)
        assert run_all(engine, [name])[name].outputs[0].finish_reason == "length"

    def test_growing_past_the_cache_ends_that_request_alone(self, letters: CausalLM) -> None:
        engine = self.engine(letters)
        large = engine.add([97] * 36, RequestParams(temperature=0, max_tokens=12))
        short = engine.add([98, 99], self.SHORT)
        done = run_all(engine, [large, short])
        (grown,) = done[large].outputs
        assert grown.finish_reason == "cache"
        assert len(grown.token_ids) == 40 - 36 + 1
        assert done[short].outputs[0].finish_reason == "length"

    def test_two_that_grow_together_past_the_cache_both_end(self, letters: CausalLM) -> None:
        engine = self.engine(letters)
        growing = [
            engine.add([97 + i] * 18, RequestParams(temperature=0, max_tokens=18)) for i in (0, 1)
        ]
        endless = engine.add([104] * 9, RequestParams(temperature=0, max_tokens=200))
        short = engine.add([98, 99], replace(self.SHORT, priority=1))
        done = run_all(engine, [*growing, endless, short])
        for name in growing:
            assert len(done[name].outputs[0].token_ids) == 18
        assert done[endless].outputs[0].finish_reason == "cache"
        assert done[short].outputs[0].finish_reason == "length"
        assert engine.stats().preemptions > 0
