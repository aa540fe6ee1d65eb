"""transformers' ``generate``, eager: transformers_worker.py FOLDER float32|bfloat16.

Tokens are timed by the streamer that ``generate`` calls after each step. A known prompt's cache is
kept: only its last token runs again.
"""

import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation.streamers import BaseStreamer
from worker import THREADS, Clock, Reading, Task, serve


class Watch(BaseStreamer):
    """Hands each step's ids to the clock; the first call holds the prompts."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Take the ids of one step, [B]."""
        if self._seen_prompt:
            self._clock.tokens([(index, [token]) for index, token in enumerate(value.tolist())])
        self._seen_prompt = True

    def end(self) -> None:
        """Nothing is left to do."""


class Transformers:
    """One model and the caches of its known prompts."""

    def __init__(self, folder: str, precision: str) -> None:
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        torch.set_num_threads(THREADS)
        transformers.logging.set_verbosity_error()
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, precision), local_files_only=True
        ).eval()
        self._model.generation_config.eos_token_id = None  # ``new_tokens``, whatever they are
        self._prompts: list[list[int]] = []
        self._cache: DynamicCache | None = None

    @torch.inference_mode()
    def run(self, task: Task) -> Reading:
        """Do the task once; all prompts have one length."""
        ids_BN = torch.tensor(task.prompts)
        cache = self._known(task, ids_BN) if task.known else None
        clock = Clock(len(task.prompts))
        self._model.generate(
            ids_BN,
            # Without it the model masks whatever equals the padding id.
            attention_mask=torch.ones_like(ids_BN),
            cache=cache,
            do_sample=False,
            max_new_tokens=task.new_tokens,
            pad_token_id=0,
            streamer=Watch(clock),
        )
        return clock.reading()

    def _known(self, task: Task, ids_BN: torch.Tensor) -> DynamicCache:
        """A cache of all but the last token of the prompts."""
        if self._cache is None or self._prompts != task.prompts:
            self._cache = DynamicCache(config=self._model.config)
            self._model(ids_BN[:, :-1], cache=self._cache, logits_to_keep=1)
            self._prompts = task.prompts
        kept = ids_BN.shape[1] - 1
        if surplus := self._cache.get_seq_length() - kept:
            self._cache.crop(-surplus)
        return self._cache


if __name__ == "__main__":
    serve(lambda: Transformers(sys.argv[1], sys.argv[2]))
