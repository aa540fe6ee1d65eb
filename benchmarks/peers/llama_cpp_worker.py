"""llama.cpp through llama-cpp-python's bindings of its C interface: llama_cpp_worker.py GGUF.

The loop is as small as llama-batched-bench's: one llama_decode a step for all sequences, greedy
by an argmax over the logits. A known prompt stays in the cache: only its last token runs again.
"""

import ctypes
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from worker import THREADS, Clock, Reading, Task, serve

POSITIONS = 32 * 256
"""Of all sequences together; they share the cache."""

ROWS = 512
"""Rows of one step, llama.cpp's default."""


class LlamaCpp:
    """One GGUF file, its cache and its batch."""

    def __init__(self, path: Path) -> None:
        self.versions = {"llama-cpp-python": llama_cpp.__version__}
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = POSITIONS
        params.n_batch = params.n_ubatch = ROWS
        params.n_seq_max = 32
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = THREADS
        if "f32" in path.name:  # keys and values are else float16
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._model or not self._context:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self._batch = llama_cpp.llama_batch_init(ROWS, 0, 1)
        self._cached: list[list[int]] = []

    def run(self, task: Task) -> Reading:
        """Do the task once."""
        if not (task.known and self._cached == task.prompts):
            llama_cpp.llama_memory_clear(self._memory, False)
            self._cached = []
            if task.known:
                self._prefill(task.prompts)
                self._cached = task.prompts
        count = len(task.prompts)
        start = [0] * count
        if task.known:
            start = [len(prompt) - 1 for prompt in task.prompts]
            for index in range(count):
                llama_cpp.llama_memory_seq_rm(self._memory, index, start[index], -1)
        clock = Clock(count)
        last = self._prefill(task.prompts, start)
        clock.tokens([(index, [token]) for index, token in enumerate(last)])
        for done in range(task.new_tokens - 1):
            rows = [
                (token, len(prompt) + done, index, True)
                for index, (token, prompt) in enumerate(zip(last, task.prompts, strict=True))
            ]
            last = self._step(rows)
            clock.tokens([(index, [token]) for index, token in enumerate(last)])
        return clock.reading()

    def _prefill(self, prompts: list[list[int]], start: list[int] | None = None) -> list[int]:
        """Run the prompts from ``start`` on; returns the token after each."""
        rows = [
            (token, position, index, position == len(prompt) - 1)
            for index, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
            if position >= (start[index] if start else 0)
        ]
        after: list[int] = []
        for begin in range(0, len(rows), ROWS):
            after += self._step(rows[begin : begin + ROWS])
        return after

    def _step(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run (token, position, sequence, wanted) rows; returns the best id after wanted ones."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = wanted
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        return [self._best(row) for row, (*_, wanted) in enumerate(rows) if wanted]

    def _best(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        array = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self._vocab_size)).contents
        return int(np.frombuffer(array, dtype=np.float32).argmax())


if __name__ == "__main__":
    serve(lambda: LlamaCpp(Path(sys.argv[1])))
