"""What the scheduler has to share, how much of it is in use, and whom it refuses at once.
No torch.
"""

from dataclasses import dataclass

from dualflow.engine.request import Request, RequestError, Status


class QueueFullError(RequestError):
    """Too many requests wait already; this one may be sent again later."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What there is to share.

    num_pages, page_size:  the KV cache.
    max_running:           sequences in a step at most.
    max_step_tokens:       primary rows in a step at most.
    max_chunk_tokens:      rows of one prompt in a step at most; None: as ``max_step_tokens``.
    max_waiting:           sequences that wait for others to end at most; None: no limit.
    prefix_cache:          whether pages of known prefixes are used again.
    model_key:             what the keys depend on beside tokens and tenant: the model, k_primary.
    """

    num_pages: int
    page_size: int = 32
    max_running: int = 64
    max_step_tokens: int = 512
    max_chunk_tokens: int | None = None
    max_waiting: int | None = None
    prefix_cache: bool = True
    model_key: str = ""

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size", "max_running", "max_step_tokens"):
            _require_count(name, getattr(self, name), 1)
        for name, least in (("max_chunk_tokens", 1), ("max_waiting", 0)):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name), least)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """How things stand; the last three only grow.

    pages_free, pages_cached, pages_used:  all pages together: empty, kept for prefixes and owned
                                           by nobody, owned.
    prefix_queries, prefix_hits:           tokens looked up in the prefix cache, and those that
                                           did not have to be computed.
    """

    waiting: int
    running: int
    pages_free: int
    pages_cached: int
    pages_used: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int


def check_request(request: Request, config: SchedulerConfig, *, taken: bool) -> None:
    """Raise ``RequestError`` for a request that can never be served."""
    prompt = len(request.prompt_ids)
    if taken:
        raise RequestError(f"the request id {request.id!r} is taken by a live request")
    if request.status is not Status.WAITING or request.pages:
        raise RequestError(f"request {request.id!r} is {request.status.value} already")
    if not prompt or request.max_tokens < 1:
        raise RequestError(
            f"request {request.id!r} has {prompt} prompt tokens and max_tokens "
            f"{request.max_tokens}; expected at least one of both"
        )
    pages = -(-prompt // config.page_size)
    if pages > config.num_pages:
        raise RequestError(
            f"the prompt has {prompt:,} tokens, which take {pages:,} pages of the cache, but it "
            f"has only {config.num_pages:,} ({config.num_pages * config.page_size:,} tokens); "
            "send a shorter prompt or give the engine a larger cache"
        )


def check_queue(num_waiting: int, config: SchedulerConfig) -> None:
    """Raise ``QueueFullError`` where ``num_waiting`` requests wait already and no more may."""
    if config.max_waiting is not None and num_waiting >= config.max_waiting:
        raise QueueFullError(
            f"{num_waiting:,} requests wait already, and {config.max_waiting:,} may; "
            "try again later"
        )


def _require_count(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}; expected a whole number from {least} up")
