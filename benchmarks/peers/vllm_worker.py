"""vLLM on the CPU, bfloat16 compiled or float32 eager: vllm_worker.py FOLDER bfloat16|float32.

Its engine is stepped here, in this process, and tokens are timed after each step. Prompts are
computed anew each time, all in one step, so that all their first tokens come together.
"""

import itertools
import os
import sys

from worker import THREADS, Clock, Reading, Task, serve

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Its cache of whole compiled models does not load again; without it a second start is quick.
os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")

POSITIONS = 2048
ROWS = 32 * 128


class Vllm:
    """One model."""

    def __init__(self, folder: str, precision: str) -> None:
        import torch
        import vllm

        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self._vllm = vllm
        self._llm = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype=precision,
            enforce_eager=precision == "float32",
            max_model_len=POSITIONS,
            max_num_batched_tokens=ROWS,
            max_num_seqs=32,
            enable_prefix_caching=False,
        )
        self._names = itertools.count()

    def run(self, task: Task) -> Reading:
        """Do the task once."""
        params = self._vllm.SamplingParams(
            temperature=0.0,
            max_tokens=task.new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )
        engine = self._llm.llm_engine
        clock = Clock(len(task.prompts))
        place = {}
        for index, prompt in enumerate(task.prompts):
            name = str(next(self._names))
            place[name] = index
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            clock.tokens(
                [
                    (place[output.request_id], output.outputs[0].token_ids)
                    for output in engine.step()
                ]
            )
        return clock.reading()


if __name__ == "__main__":
    serve(lambda: Vllm(sys.argv[1], sys.argv[2]))
