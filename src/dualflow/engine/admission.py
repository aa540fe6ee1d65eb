"""What a request must satisfy before anything is computed for it. No torch."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set

from dualflow.engine.aux_rules import aux_rule
from dualflow.engine.request import FinishReason, RequestError, RequestParams
from dualflow.spec import ModelConfig


def check_prompt(prompt_ids: Sequence[int], config: ModelConfig) -> tuple[int, ...]:
    """The prompt's ids. Raises ``RequestError``: none, too many, or not in the vocabulary."""
    if isinstance(prompt_ids, bytes | bytearray | Mapping | Set):
        raise RequestError(
            f"the prompt is of type {type(prompt_ids).__name__}; expected a text or token ids"
        )
    try:
        given = list(prompt_ids)
        ids = tuple(map(operator.index, given))
    except TypeError as error:
        raise RequestError(f"the prompt is no list of token ids: {error}") from error
    if any(isinstance(token, bool) for token in given):
        raise RequestError("the prompt is no list of token ids: there is a bool in it")
    if not ids:
        raise RequestError(
            "the prompt has no tokens; start an empty text from the tokenizer's end-of-text id"
        )
    if len(ids) > config.max_position:
        raise RequestError(
            f"the prompt has {len(ids):,} tokens, "
            f"but the model has {config.max_position:,} positions"
        )
    _check_ids("the prompt", ids, config)
    return ids


def require_characters(text: str) -> None:
    """Raise ``RequestError`` for a text with half of a surrogate pair, as JSON's escapes can make
    it: no tokenizer has an id for that.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt has no character at position {error.start}, but half of a surrogate pair "
            f"(U+{ord(text[error.start]):04X})"
        ) from error


def check_kinds(params: object, request_id: object, tenant: object) -> None:
    """Raise ``RequestError`` where what comes with a prompt is of another type than it has to be:
    found later, it would fail the step of all requests.
    """
    if not isinstance(params, RequestParams):
        raise RequestError(f"params is {params!r}; expected RequestParams")
    if request_id is not None and not isinstance(request_id, str):
        raise RequestError(f"the request id is {request_id!r}; expected a text")
    if not isinstance(tenant, str):
        raise RequestError(f"tenant is {tenant!r}; expected a text")


def check_params(params: RequestParams, config: ModelConfig, *, has_tokenizer: bool) -> None:
    """Raise ``RequestError`` where the model cannot do what ``params`` asks."""
    for name in ("stop_ids", "allowed_ids", "logit_bias"):
        _check_ids(name, getattr(params, name) or (), config)
    aux_rule(params, config)
    if params.structured is not None and params.ignore_eos:
        raise RequestError(
            "structured output ends with the end-of-text id; ignore_eos would leave it without end"
        )
    for name in ("stop", "structured"):
        if getattr(params, name) and not has_tokenizer:
            raise RequestError(f"{name} needs a tokenizer, and this engine has none")


def new_tokens_limit(
    num_prompt: int, params: RequestParams, config: ModelConfig
) -> tuple[int, FinishReason]:
    """How many tokens may follow the prompt, and why no more: the last of them needs no position
    of its own.
    """
    room = config.max_position - num_prompt + 1
    if params.max_tokens is not None and params.max_tokens <= room:
        return params.max_tokens, "length"
    return room, "context"


def _check_ids(what: str, ids: Iterable[int], config: ModelConfig) -> None:
    outside = next((i for i in ids if not 0 <= i < config.num_real_tokens), None)
    if outside is not None:
        raise RequestError(
            f"{what} has the token id {outside}, "
            f"but the vocabulary ends at {config.num_real_tokens - 1}"
        )
