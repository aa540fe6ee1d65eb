"""Small Hugging Face folders for tests, and what tests change in them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from dualflow.checkpoint.export import export_huggingface
from dualflow.model import CausalLM
from dualflow.testing import family_config
from dualflow.testing.tensors import tiny_model

Tensors = dict[str, torch.Tensor]


def write_folder(folder: Path, family: str = "llama", **changes: Any) -> CausalLM:
    """A folder of one of ``testing.FAMILIES``; returns the model in it, float32."""
    model = tiny_model(family_config(family, **changes), dtype=torch.float32)
    export_huggingface(model, folder)
    return model


def read_tensors(folder: Path) -> Tensors:
    return safetensors.torch.load_file(folder / "model.safetensors")


def change_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Let ``change`` alter the tensors of a folder in place."""
    tensors = {name: tensor.clone() for name, tensor in read_tensors(folder).items()}
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
