"""Our engine: ours_worker.py FOLDER float32|bfloat16|int8|int4.

Known prompts are in the prefix cache: only their last token runs again. Text is made of the
tokens, too, as for a user.
"""

import sys

from worker import THREADS, Clock, Reading, Task, serve

from dualflow import __version__
from dualflow.engine import Engine, EngineConfig, RequestParams, TokenEvent

PAGES = 512
"""Room for all prompts and what follows them, and for one text of the model's full length."""


class Ours:
    """One model in one number format."""

    def __init__(self, folder: str, precision: str) -> None:
        self.versions = {"dualflow": __version__}
        config = EngineConfig(
            weights=precision,  # type: ignore[arg-type]
            threads=THREADS,
            num_pages=PAGES,
            max_running=32,
            device="cpu",
        )
        self._engine = Engine.load(folder, config)
        self._known: list[list[int]] = []

    def run(self, task: Task) -> Reading:
        """Do the task once."""
        if task.known and self._known != task.prompts:
            self._generate(task.prompts, 1)
            self._known = task.prompts
        return self._generate(task.prompts, task.new_tokens)

    def _generate(self, prompts: list[list[int]], new_tokens: int) -> Reading:
        params = RequestParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        clock = Clock(len(prompts))
        place = {self._engine.add(prompt, params): i for i, prompt in enumerate(prompts)}
        while self._engine.has_work:
            events = self._engine.step()
            clock.tokens(
                [
                    (place[event.request_id], [event.choice.token_id])
                    for event in events
                    if isinstance(event, TokenEvent)
                ]
            )
        return clock.reading()


if __name__ == "__main__":
    serve(lambda: Ours(sys.argv[1], sys.argv[2]))
