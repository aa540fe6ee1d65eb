"""lm-eval (the LM Evaluation Harness) over our engine, so that its tasks measure r itself.

Needs the extra ``eval``. Texts are read as lm-eval's own Hugging Face model reads them: names of
control tokens in them are the tokens, and what the tokenizer puts before a text is put there.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from dualflow.checkpoint import find_model_folder
from dualflow.data.tokenizers import named_tokens
from dualflow.engine.llm import LLM
from dualflow.engine.outputs import RequestOutput
from dualflow.engine.request import AuxPolicy, RequestParams
from dualflow.engine.step_plan import Choice

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many requests are done, and of how many."""

Pair = tuple[Any, list[int], list[int]]
"""What is scored: whatever it was made from, the ids before, and the ids that are scored."""

_NEW_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_IGNORED = ("do_sample", "num_beams", "use_cache", "stop", "until")
_DEFAULT_NEW_TOKENS = 256


class DualFlowLM(TemplateLM):
    """A model of ours as lm-eval sees one. Requests of one call share the engine's steps.

    model:     a model folder or run folder with a tokenizer.
    aux:       ``on`` scores r; ``off`` the primary's p; ``exact`` is like ``on``, and cheaper where
               greedy tokens are generated; ``threshold=T`` approximate.
    add_bos:   whether the text's first token is the beginning-of-text token; None: as the
               tokenizer's own post-processor has it.
    progress:  told how far each kind of requests is.
    settings:  fields of ``EngineConfig``, such as ``device`` and ``weights``.

    Raises ``ValueError`` where the model or a setting cannot be used.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        aux: str = "on",
        add_bos: bool | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._folder = find_model_folder(model)
        self._aux = AuxPolicy.parse(aux)
        self._llm = LLM(self._folder, **settings)
        tokenizer = self._llm.engine.tokenizer
        if tokenizer is None:
            raise ValueError(
                f"tokenizer.json is missing in {self._folder}: tasks are texts, and there is "
                "nothing to read them with"
            )
        self._tokenizer = tokenizer
        self._bos_id = self._find_bos()
        self._before = self._put_before(add_bos)
        self._progress = progress or (lambda stage, done, total: None)

    @property
    def max_length(self) -> int:
        """Positions of the model."""
        return self._llm.engine.model_config.max_position

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it: the beginning-of-text token, else
        the one that ends a text.
        """
        return self._tokenizer.eos_id if self._bos_id is None else self._bos_id

    @property
    def tokenizer_name(self) -> str:
        """Where the tokenizer lies: lm-eval names its caches by it."""
        return str(self._folder).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of ``string``; what belongs before a text goes there unless it does already, or
        ``add_special_tokens`` is False.
        """
        ids = self._tokenizer.encode(string, special=True)
        if add_special_tokens is False or ids[: len(self._before)] == self._before:
            return ids
        return [*self._before, *ids]

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Σ log r of a continuation after its context, and whether greedy tokens would be it."""
        return super().loglikelihood(list(requests), disable_tqdm)

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log r of whole texts: each token once, with as many tokens before it as the model has
        positions for.
        """
        windows: list[Pair] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                self.tok_encode(request.args[0]),
                self.prefix_token_id,
                self.max_length,
                context_len=1,
            )
            for window in rolling:
                before, ids = make_disjoint_window(window)
                windows.append((None, before, ids))
                owners.append(index)
        sums = [0.0] * len(requests)
        scored = self._loglikelihood_tokens(windows)
        for index, (log_r, _) in zip(owners, scored, strict=True):
            sums[index] += log_r
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop string or the end of text, greedy unless a task samples."""
        prompts: list[list[int]] = []
        params: list[RequestParams] = []
        for request in requests:
            arguments: Any = request.args
            context, wanted = arguments
            of_request = generation_params(wanted, self._aux)
            assert of_request.max_tokens is not None
            room = self.max_length - of_request.max_tokens
            if room < 1:
                raise ValueError(
                    f"a task asks for {of_request.max_tokens} new tokens, the model has "
                    f"{self.max_length} positions for prompt and text; set max_gen_toks in its "
                    "generation_kwargs"
                )
            prompts.append(self.tok_encode(context)[-room:] or [self.prefix_token_id])
            params.append(of_request)
        texts = [output.text for output in self._run("generating", prompts, params)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Σ log r of the scored ids of each request, and whether each of them is the most probable.

        The last one is the only token allowed to follow the others, so that as many are scored as
        the model has positions, and one of a single token needs no other position's distribution.
        """
        prompts, params = [], []
        scored = [(index, pair) for index, pair in enumerate(requests) if pair[2]]
        for _, (_, before, ids) in scored:
            *prompt, last = ((before or [self.prefix_token_id]) + ids)[-(self.max_length + 1) :]
            if len(ids) > len(prompt):
                raise ValueError(
                    f"a continuation has {len(ids):,} tokens; the model has {self.max_length:,} "
                    "positions"
                )
            prompts.append(prompt)
            params.append(self._only(last, prompt_too=len(ids) > 1))
        results = [(0.0, True)] * len(requests)  # of nothing at all
        outputs = self._run("scoring", prompts, params)
        for (index, (_, _, ids)), output in zip(scored, outputs, strict=True):
            choices = (*(output.prompt_choices or ()), *output.outputs[0].choices)[-len(ids) :]
            assert [choice.token_id for choice in choices] == ids
            results[index] = sum(choice.log_r for choice in choices), all(map(_is_best, choices))
        for (text, _, _), result in zip(requests, results, strict=True):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, result)
        return results

    def _only(self, token: int, prompt_too: bool) -> RequestParams:
        return RequestParams(
            max_tokens=1, temperature=0, allowed_ids=frozenset({token}), ignore_eos=True,
            logprobs=1, prompt_logprobs=1 if prompt_too else None, aux=self._aux,
        )  # fmt: skip

    def _run(
        self, stage: str, prompts: list[list[int]], params: list[RequestParams]
    ) -> list[RequestOutput]:
        """All outputs, in the order of the prompts. Raises ``ValueError`` for one that failed."""
        done: dict[int, RequestOutput] = {}
        if prompts:
            for index, output in self._llm.generate_as_completed(prompts, params):
                (one,) = output.outputs
                if one.error is not None:
                    raise ValueError(f"a request of lm-eval failed: {one.error}")
                done[index] = output
                self._progress(stage, len(done), len(prompts))
        return [done[index] for index in range(len(prompts))]

    def _find_bos(self) -> int | None:
        name = named_tokens(self._folder).get("bos_token")
        return None if name is None else self._tokenizer.id_of(name)

    def _put_before(self, add_bos: bool | None) -> list[int]:
        """Ids before the text's own: those of the post-processor, or the one that is asked for."""
        if add_bos is None:
            return self._tokenizer.before_ids
        if add_bos and self._bos_id is None:
            raise ValueError(
                f"add_bos is set, but tokenizer_config.json in {self._folder} names no bos_token"
            )
        return [self.prefix_token_id] if add_bos else []


def generation_params(wanted: Mapping[str, Any], aux: AuxPolicy) -> RequestParams:
    """``generation_kwargs`` of a task as the engine takes them. Raises ``ValueError`` for one that
    it does not know.
    """
    known = {*_NEW_TOKENS, *_SAMPLING, *_IGNORED}
    if unknown := sorted(wanted.keys() - known):
        raise ValueError(
            f"generation_kwargs of a task name {', '.join(unknown)}; known: "
            f"{', '.join(sorted(known))}"
        )
    if wanted.get("num_beams", 1) != 1:
        raise ValueError(f"a task asks for num_beams {wanted['num_beams']}; only 1 is supported")
    limits = [wanted[name] for name in _NEW_TOKENS if wanted.get(name) is not None]
    sampling = {name: wanted[name] for name in _SAMPLING if wanted.get(name) is not None}
    if not wanted.get("do_sample", sampling.get("temperature", 0) > 0):
        if sampling.get("temperature"):
            warnings.warn("do_sample is false: its temperature is left out", stacklevel=2)
        penalty = sampling.get("repetition_penalty", 1.0)
        sampling = {"temperature": 0.0, "repetition_penalty": penalty}
    return RequestParams(
        max_tokens=int(limits[0]) if limits else _DEFAULT_NEW_TOKENS,
        stop=tuple(_stops(wanted)), aux=aux, **sampling,
    )  # fmt: skip


def _stops(wanted: Mapping[str, Any]) -> Iterable[str]:
    for name in ("until", "stop"):
        given = wanted.get(name) or ()
        yield from (text for text in ([given] if isinstance(given, str) else given) if text)


def _is_best(choice: Choice) -> bool:
    """Whether no token is more probable."""
    return choice.top[0][0] == choice.token_id or choice.top[0][1] <= choice.log_r
