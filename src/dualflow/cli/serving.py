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
        llm = LLM(folder, **settings)
    if settings.get("backend", "auto") == "auto" and settings.get("device") == "cpu":
        _tell_missing_kernels(llm)
    return llm


def _tell_missing_kernels(llm: "LLM") -> None:
    """Say so where PyTorch computes for want of kernels that could be there."""
    from dualflow.ops.native.library import why_missing

    if llm.engine.config.backend == "torch" and (reason := why_missing()) is not None:
        print(
            f"note: {reason.partition(';')[0]}; PyTorch computes, which may be several times slower"
            " (dualflow doctor says how to mend it)",
            file=sys.stderr,
        )


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
