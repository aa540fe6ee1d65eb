"""What an output took, in one line for people and as plain values for machines."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualflow.engine.engine import Engine
    from dualflow.engine.outputs import FinishEvent


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one output. Seconds are wall-clock, bytes those of the KV cache.

    cached_tokens:    prompt tokens that did not have to be computed.
    prefill_seconds:  from the request to its first new token.
    cache_bytes:      of the pages that its keys and values lie in; shared ones count whole.
    cache_bytes_allocated: of the engine's whole cache.
    aux_positions:    positions at which the auxiliary flow ran; all others ran the primary alone.
    drafted, accepted: tokens guessed ahead, and how many of the guesses held.
    backend:          ``native``, our kernels, or ``torch``.
    """

    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    cache_bytes: int
    cache_bytes_allocated: int
    aux_positions: int
    drafted: int
    accepted: int
    backend: str

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens computed per second."""
        return _rate(self.prompt_tokens - self.cached_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """New tokens per second, the first (prefill's) left out; None: there was no other."""
        return _rate(self.new_tokens - 1, self.decode_seconds)

    def record(self) -> dict[str, Any]:
        """The figures and both rates."""
        rates = {
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
        }
        return {**asdict(self), **rates}


def figures_of(engine: "Engine", end: "FinishEvent") -> Figures:
    """The figures of an output that ``engine`` has just finished."""
    usage, stats = end.usage, engine.stats()
    first = usage.first_token_seconds
    # The last token needs no position of its own.
    positions = usage.prompt_tokens + max(usage.new_tokens - 1, 0)
    num_pages = stats.pages_free + stats.pages_cached + stats.pages_used
    pages = -(-positions // engine.config.page_size)
    return Figures(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        new_tokens=usage.new_tokens,
        prefill_seconds=usage.seconds if first is None else first,
        decode_seconds=0.0 if first is None else usage.seconds - first,
        cache_bytes=pages * stats.cache_bytes // num_pages,
        cache_bytes_allocated=stats.cache_bytes,
        aux_positions=usage.aux_positions,
        drafted=usage.drafted,
        accepted=usage.accepted,
        backend=engine.config.backend,
    )


def figures_line(f: Figures, reason: str) -> str:
    """The figures of an output that ended for ``reason``."""
    prefill, decode = f.prefill_tokens_per_second, f.decode_tokens_per_second
    cached = f", {f.cached_tokens} of the prompt known" if f.cached_tokens else ""
    parts = [
        f"{f.prompt_tokens} prompt + {f.new_tokens} new tokens ({reason})",
        f"prefill {f.prefill_seconds:.3f} s"
        + (f", {prefill:,.0f} tokens/s" if prefill else "")
        + cached,
        f"decode {decode:,.1f} tokens/s" if decode else "no decode steps",
        f"KV cache {f.cache_bytes / 1024:,.1f} KiB",
    ]
    if f.drafted:  # it ran at guesses that did not hold, too: at such positions more than once
        parts.append(f"auxiliary ran {f.aux_positions} times")
        parts.append(f"{f.accepted} of {f.drafted} guesses held")
    else:
        positions = f.prompt_tokens + f.new_tokens - 1
        parts.append(f"auxiliary at {f.aux_positions} of {positions} positions")
    if f.backend != "native":
        parts.append(f"backend {f.backend}")
    return " | ".join(parts)


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None
