"""Text to token windows: sources, tokenizers, shards on disk, a resumable loader.

The loader needs torch and is imported when it is asked for; everything else does without.
"""

from typing import TYPE_CHECKING, Any

from dualflow.data.config import DataConfig
from dualflow.data.prepare import PreparedData, open_prepared, prepare
from dualflow.data.shards import ShardSet
from dualflow.data.tokenizers import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from dualflow.data.loader import Batch, BatchLoader

__all__ = [
    "Batch",
    "BatchLoader",
    "DataConfig",
    "PreparedData",
    "ShardSet",
    "Tokenizer",
    "load_tokenizer",
    "open_prepared",
    "prepare",
]


def __getattr__(name: str) -> Any:
    if name in ("Batch", "BatchLoader"):
        from dualflow.data import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
