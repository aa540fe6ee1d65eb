"""What data a run reads and how it becomes windows of token ids. No torch here."""

from dataclasses import dataclass
from typing import Literal

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens of every tokenizer made here, in id order after the bytes."""

SMALLEST_BPE = 256 + len(SPECIAL_TOKENS)
LARGEST_BPE = 1_000_000


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, the tokenizer and the windows of a run.

    source:               ``python-stdlib`` (the running interpreter's own standard library source),
                          or the path of a text file, a ``.jsonl`` or ``.parquet`` file, a folder of
                          such files, or a folder written by ``datasets.save_to_disk``.
    tokenizer:            ``bytes``, ``bpe:N`` (a byte-level BPE of exactly N ids trained on the
                          training split), or the path of a ``tokenizer.json`` or of the folder that
                          holds one.
    sequence_length:      positions per window.
    document_mask:        whether a position sees only its own document. A document's first token is
                          then no target, because nothing it could be predicted from is visible.
    validation_fraction:  share of the text held out for validation; whole documents where there are
                          several.
    validation_source:    a source of its own for validation; ``validation_fraction`` is then not
                          used.
    split:                which split of a saved dataset with several is trained on.
    validation_split:     which split of it is held out, where it is there.
    text_key, messages_key:  columns of JSONL, Parquet and saved datasets; a row with messages is a
                             chat.
    eos_token:            end-of-text token of a tokenizer file that does not say it.
    tokenizer_sample:     characters of text a BPE is trained on at most.
    on_end:               after the last window: ``repeat`` in a new order, or ``stop``.
    cache_dir:            where token shards are kept; None: ``$DUALFLOW_CACHE``, else
                          ``~/.cache/dualflow``.
    """

    source: str = "python-stdlib"
    tokenizer: str = "bpe:1024"
    sequence_length: int = 256
    document_mask: bool = False
    validation_fraction: float = 0.05
    validation_source: str | None = None
    split: str = "train"
    validation_split: str = "validation"
    text_key: str = "text"
    messages_key: str = "messages"
    eos_token: str | None = None
    tokenizer_sample: int = 50_000_000
    on_end: Literal["repeat", "stop"] = "repeat"
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        for field in ("source", "tokenizer", "split", "text_key", "messages_key"):
            _require(bool(getattr(self, field)), f"{field} is empty")
        _require(
            self.sequence_length >= 1,
            f"sequence_length is {self.sequence_length}; expected at least 1",
        )
        _require(
            0.0 <= self.validation_fraction < 1.0,
            f"validation_fraction is {self.validation_fraction}; expected 0 (none) or more, and "
            "less than 1",
        )
        _require(
            self.tokenizer_sample >= 1,
            f"tokenizer_sample is {self.tokenizer_sample}; expected at least 1",
        )
        _require(
            self.on_end in ("repeat", "stop"),
            f"on_end is {self.on_end!r}; expected 'repeat' or 'stop'",
        )
        _require(
            self.tokenizer != "bpe", "tokenizer is 'bpe'; expected a size with it, such as bpe:1024"
        )
        bpe_size(self.tokenizer)


def bpe_size(tokenizer: str) -> int | None:
    """N of ``bpe:N``, None for any other tokenizer; ``ValueError`` where N is not possible."""
    kind, colon, size = tokenizer.partition(":")
    if kind != "bpe" or not colon:
        return None
    _require(
        size.isascii() and size.isdigit(),
        f"tokenizer {tokenizer!r}: expected a whole number, such as bpe:1024",
    )
    _require(
        len(size) <= 12 and int(size) <= LARGEST_BPE,
        f"tokenizer {tokenizer[:40]!r}: expected at most bpe:{LARGEST_BPE}",
    )
    _require(
        int(size) >= SMALLEST_BPE,
        f"tokenizer {tokenizer!r}: expected at least bpe:{SMALLEST_BPE} (256 bytes and "
        f"{len(SPECIAL_TOKENS)} control tokens)",
    )
    return int(size)
