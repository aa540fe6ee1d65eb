"""Model folders on disk: safetensors and JSON alone, written atomically and read strictly."""

from dualflow.checkpoint.atomic import atomic_folder
from dualflow.checkpoint.locate import find_model_folder
from dualflow.checkpoint.store import (
    load_model,
    load_tokenizer_of,
    read_config,
    read_metrics,
    read_quantised,
    save_model,
    write_model,
)
from dualflow.checkpoint.tensors import load_tensors, read_header, save_tensors

__all__ = [
    "atomic_folder",
    "find_model_folder",
    "load_model",
    "load_tensors",
    "load_tokenizer_of",
    "read_config",
    "read_header",
    "read_metrics",
    "read_quantised",
    "save_model",
    "save_tensors",
    "write_model",
]
