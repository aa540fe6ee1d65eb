"""Folders that cannot be imported are refused in one line: what was found, where, what is meant."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dualflow.checkpoint.huggingface import import_huggingface
from tests.unit.checkpoint.huggingface_folders import (
    change_config,
    change_tensors,
    write_folder,
)


def refusal(folder: Any) -> str:
    with pytest.raises(ValueError) as caught:
        import_huggingface(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "hf")
    return tmp_path / "hf"


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "holds no config.json (it is empty); supported: llama" in refusal(tmp_path)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    assert "holds no config.json (it holds README.md)" in refusal(tmp_path)


def test_a_file_instead_of_a_folder(folder: Path) -> None:
    found = refusal(folder / "model.safetensors")
    assert "is a file; expected the folder that holds config.json" in found


def test_the_name_of_a_model_on_a_hub() -> None:
    found = refusal("some-org/some-model")
    assert (
        "there is no folder some-org/some-model; if this is the name of a model on a hub" in found
    )
    assert "never the network" in found


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ({"architectures": ["FooForCausalLM"], "model_type": "foo"}, "model_type 'foo'"),
        ({"architectures": ["LlamaForCausalLM", "FooModel"]}, "expected one"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "'bert'"),
        ({}, "neither model_type nor architectures"),
    ],
)
def test_another_architecture_names_the_file_and_what_is_supported(folder, table, found) -> None:
    (folder / "config.json").write_text(json.dumps(table))
    told = refusal(folder)
    assert found in told
    assert str(folder / "config.json") in told
    assert (
        "supported: llama, mistral, qwen2, qwen3, olmo2, gemma, gemma2, gemma3_text, gpt2" in told
    )


def test_a_key_that_is_not_supported_names_the_file(folder: Path) -> None:
    change_config(folder, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    told = refusal(folder)
    assert told.startswith(f"{folder / 'config.json'}: rope_scaling.rope_type = 'dynamic'")


def test_pickled_weights_are_refused_with_advice(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    told = refusal(folder)
    assert "holds pytorch_model.bin, a pickled checkpoint that can run code" in told
    assert "save_pretrained writes safetensors" in told


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert refusal(folder).endswith("holds no model.safetensors")


def test_shards_without_their_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(folder)


def test_tensors_that_are_missing_unexpected_or_misshapen_are_all_named(folder: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(44)
        tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(9, 32)
        tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 44, dtype=torch.int8)
        del tensors["model.layers.0.input_layernorm.weight"]

    change_tensors(folder, spoil)
    told = refusal(folder)
    assert "missing model.layers.0.input_layernorm.weight" in told
    assert "unexpected model.layers.0.mlp.up_proj.bias" in told
    assert "other shape: model.layers.1.self_attn.k_proj.weight [9, 32], expected [8, 32]" in told
    assert "not one of F16, BF16, F32, F64: model.layers.1.mlp.down_proj.weight (I8)" in told


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_biases_that_config_json_announces_must_be_there(folder: Path, key: str) -> None:
    change_config(folder, **{key: True})
    assert ".bias" in refusal(folder)


def test_biases_that_config_json_does_not_announce_are_not_dropped(tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen2")
    change_config(tmp_path, model_type="llama", architectures=["LlamaForCausalLM"])
    change_config(tmp_path, **dict.fromkeys(("use_sliding_window", "sliding_window")))
    change_config(tmp_path, **dict.fromkeys(("max_window_layers", "layer_types")))
    assert "unexpected model.layers.0.self_attn.k_proj.bias" in refusal(tmp_path)


def test_a_config_that_lies_about_its_size_costs_nothing(folder: Path) -> None:
    change_config(folder, num_hidden_layers=10**9)
    assert "1,000,000,000 layers, the files" in refusal(folder)
    change_config(folder, num_hidden_layers=2, vocab_size=10**12)
    assert "model.embed_tokens.weight [53, 32], expected [1000000000000, 32]" in refusal(folder)


def test_a_damaged_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert str(path) in refusal(folder)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_are_refused(folder: Path, value: float) -> None:
    change_tensors(folder, lambda tensors: tensors["model.norm.weight"].fill_(value))
    assert "model.norm.weight holds values that are not finite" in refusal(folder)


def test_a_config_with_what_json_does_not_have_is_refused_where_it_is_read(folder: Path) -> None:
    change_config(folder, pad_token_id=float("nan"))
    told = refusal(folder)
    assert f"{folder / 'config.json'} is not usable JSON: it has the value NaN" in told
