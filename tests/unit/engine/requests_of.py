"""What the tests of the engine ask for."""

from collections.abc import Sequence

from dualflow.engine import Engine, RequestOutput, RequestParams
from dualflow.testing.engines import LETTERS, run_all

PROMPT = [97, 98, 99, 100, 101, 97, 98]
GREEDY = RequestParams(temperature=0, max_tokens=6)
WRITING = RequestParams(seed=1, max_tokens=40, allowed_ids=LETTERS)


def run(engine: Engine, params: RequestParams, prompt: Sequence[int] = PROMPT) -> RequestOutput:
    name = engine.add(prompt, params)
    return run_all(engine, [name])[name]
