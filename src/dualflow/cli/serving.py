"""One engine in this process, for the verbs that generate."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualflow.engine.llm import LLM
    from dualflow.engine.outputs import Event
    from dualflow.engine.request import RequestParams


def load_llm(folder: Path, *, chats: bool = False, **settings: Any) -> "LLM":
    """The model in ``folder``, with the given fields of ``EngineConfig``.

    chats: whether it needs a chat template.

    Raises ``ValueError``: the model cannot be loaded, or has no tokenizer or template, or a setting
    is not possible.
    """
    from dualflow.checkpoint import find_model_folder, load_tokenizer_of
    from dualflow.engine.llm import LLM

    # What is missing is told before the weights are read.
    tokenizer = load_tokenizer_of(folder)
    if chats:
        from dualflow.data.chat import load_chat_template

        load_chat_template(find_model_folder(folder), tokenizer)
    with warnings_as_lines():
        return LLM(folder, **settings)


def stream(llm: "LLM", prompt_ids: Sequence[int], params: "RequestParams") -> "Iterator[Event]":
    """Run one request; the call itself raises what is wrong with it. Leaving the iterator ends the
    request.
    """
    with warnings_as_lines():
        return llm.stream(prompt_ids, params)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """While entered, warnings for users are collected; each becomes a line of standard error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
