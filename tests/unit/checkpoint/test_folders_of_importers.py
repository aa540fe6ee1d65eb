"""Model folders that others wrote, or that hold what an importer brought."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dualflow.checkpoint.store import (
    load_model,
    read_config,
    read_primary_config,
    save_model,
)
from dualflow.testing.configs import flow_config, tiny_config
from dualflow.testing.tensors import tiny_model

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32}


def in_one_file(folder: Path) -> None:
    """As transformers leaves a model: all tensors in model.safetensors, and keys of its own."""
    tensors: dict[str, torch.Tensor] = {}
    for name in ("model.safetensors", "aux.safetensors"):
        tensors |= safetensors.torch.load_file(folder / name)
        (folder / name).unlink()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change(folder, architectures=["DualFlowForCausalLM"], dtype="float64", vocab_size=53)


def change(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize("flow", ["full", "lora", "learned_alpha", "two_flows_own_mlp"])
def test_all_tensors_in_one_file_are_read_too(tmp_path: Path, flow: str) -> None:
    model = tiny_model(flow_config(flow))
    save_model(model, tmp_path / "model")
    in_one_file(tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert loaded.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_a_tensor_missing_from_the_one_file_is_named(tmp_path: Path) -> None:
    save_model(tiny_model(flow_config("full")), tmp_path / "model")
    in_one_file(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["model.layers.1.aux.0.query_coupling"]
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(ValueError, match=r"missing model\.layers\.1\.aux\.0\.query_coupling"):
        load_model(tmp_path / "model")


def test_the_familys_own_config_goes_along_word_for_word(tmp_path: Path) -> None:
    save_model(tiny_model(tiny_config()), tmp_path / "model", primary_config=LLAMA)
    assert read_primary_config(tmp_path / "model") == LLAMA
    assert read_config(tmp_path / "model") == tiny_config()


def test_a_model_of_our_own_has_no_other_config(tmp_path: Path) -> None:
    save_model(tiny_model(tiny_config()), tmp_path / "model")
    assert read_primary_config(tmp_path / "model") is None


def test_a_family_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    save_model(tiny_model(tiny_config()), tmp_path / "model")
    change(tmp_path / "model", primary_config=[1])
    with pytest.raises(ValueError, match=r"primary_config is \[1\]; expected an object"):
        read_primary_config(tmp_path / "model")
