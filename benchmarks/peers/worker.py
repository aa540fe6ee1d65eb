"""What an engine's process and run.py say to each other: one JSON object a line. Standard library
only, since every engine has an environment of its own.

run.py writes a ``Task``'s fields; the process answers a ``Reading``'s fields, or ``{"error": …}``.
The first line that a process writes says that it is ready, and its versions.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

THREADS = 2


@dataclass(frozen=True)
class Task:
    """Continue all prompts together, greedily, by ``new_tokens`` each, whatever they are.

    known: the prompts will come again unchanged, and only what follows is timed: their keys and
           values may be kept.
    """

    prompts: list[list[int]]
    new_tokens: int
    known: bool


@dataclass(frozen=True)
class Reading:
    """When tokens came.

    outputs:       the new ids of every prompt.
    first_seconds: from handing over the prompts until the last prompt has its first token.
    rest_seconds:  from then until the last token.
    rest_tokens:   how many tokens, of all prompts, came in that time.
    """

    outputs: list[list[int]]
    first_seconds: float
    rest_seconds: float
    rest_tokens: int


class PeerEngine(Protocol):
    """An engine that has loaded its model."""

    versions: dict[str, str]

    def run(self, task: Task) -> Reading:
        """Do the task once."""
        ...


class Clock:
    """Makes a ``Reading`` from tokens as they come, in whatever groups."""

    def __init__(self, sequences: int) -> None:
        self.outputs: list[list[int]] = [[] for _ in range(sequences)]
        self.started = time.perf_counter()
        self.first: float | None = None
        self.last = self.started
        self._before = 0

    def tokens(self, new: Sequence[tuple[int, Sequence[int]]]) -> None:
        """These ids of these sequences are known now."""
        self.last = time.perf_counter()
        for index, ids in new:
            self.outputs[index].extend(ids)
        if self.first is None and all(self.outputs):
            self.first = self.last
            self._before = sum(len(ids) for ids in self.outputs)

    def reading(self) -> Reading:
        """What came. Raises ``RuntimeError`` where a prompt got no token."""
        if self.first is None:
            raise RuntimeError("a prompt got no token")
        return Reading(
            outputs=self.outputs,
            first_seconds=self.first - self.started,
            rest_seconds=self.last - self.first,
            rest_tokens=sum(len(ids) for ids in self.outputs) - self._before,
        )


def serve(load: Callable[[], PeerEngine]) -> None:
    """Load the engine and do tasks until standard input ends."""
    # Libraries print as they like: what this process prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields: object) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        engine = load()
    except Exception as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")
        return
    answer(ready=True, versions=engine.versions)
    for line in sys.stdin:
        try:
            answer(**asdict(engine.run(Task(**json.loads(line)))))
        except Exception as error:
            traceback.print_exc()
            answer(error=f"{type(error).__name__}: {error}")
