"""What is not a model folder is refused in one line that says what was found."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from dualflow.checkpoint import load_model, read_config, save_model
from dualflow.testing import tiny_config
from dualflow.testing.tensors import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved dual model."""
    save_model(
        tiny_model(tiny_config("dual"), dtype=torch.float32),
        tmp_path / "model",
        metrics={"val_loss": 1.5},
    )
    return tmp_path / "model"


def one_line(caught: pytest.ExceptionInfo[ValueError]) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
         "model_type 'llama' (architectures ['LlamaFor"),
        ({"architectures": ["FooForCausalLM", "Bar"]},
         "no model_type (architectures ['FooForCausalLM', 'Bar'])"),
        ({}, "no model_type"),
        ({"model_type": "dualflow", "format_version": 2},
         "format_version 2; this dualflow reads 1; it was written by a newer"),
        ({"model_type": "dualflow", "format_version": "1"},
         "format_version '1'; this dualflow reads 1"),
        ({"model_type": "dualflow"}, "format_version None"),
    ],
)  # fmt: skip
def test_other_architectures_and_versions_are_named(tmp_path, config, found):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError) as caught:
        load_model(tmp_path)
    assert found in one_line(caught)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"a":' * 100_000, "\ufffe", " " * 2**25])
def test_a_damaged_config_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="utf-16" if text == "\ufffe" else "utf-8")
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"there is no folder .*nothing-here; supported: folders of model_type 'dualflow'",
    ):
        load_model(tmp_path / "nothing-here")


def test_what_looks_like_a_hub_name_says_that_nothing_is_downloaded():
    with pytest.raises(
        ValueError, match=r"no folder some-owner/some-model.*hub.*never the network"
    ):
        load_model("some-owner/some-model")


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json \(it is empty\)"):
        load_model(tmp_path)


def test_a_file_in_place_of_a_folder_is_named(folder):
    with pytest.raises(ValueError, match=r"model\.safetensors is a file; expected the folder"):
        load_model(folder / "model.safetensors")


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_pickled_weights_are_never_run(folder, tmp_path, name):
    marker = tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
    for target in (folder, folder / name):
        with pytest.raises(ValueError, match="safetensors"):
            load_model(target)
    if not name.endswith("safetensors"):
        with pytest.raises(ValueError, match=f"{name}, a pickled checkpoint.*use safetensors"):
            load_model(folder)
    assert not marker.exists()


def test_weights_that_are_missing_are_named(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ValueError,
        match=r"model\.safetensors is missing in .* \(it holds aux\.safetensors, config\.json",
    ):
        load_model(folder)


def test_a_truncated_file_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"model\.safetensors has a damaged .*may be cut short"):
        load_model(folder)


def test_read_config_needs_no_weights(folder):
    (folder / "model.safetensors").unlink()
    assert read_config(folder) == tiny_config("dual")


@pytest.mark.parametrize(
    ("flows", "told"),
    [(1000, "1,000 auxiliary flows, the files"), (10**9, "num_flows is 1000000000; expected")],
)
def test_many_flows_cost_nothing(folder, flows, told):
    table = json.loads((folder / "config.json").read_text())
    table["config"]["aux"] = {"num_flows": flows}
    (folder / "config.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match=told) as caught:
        load_model(folder)
    one_line(caught)


def test_code_beside_a_model_is_never_run(folder, tmp_path):
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    table = json.loads((folder / "config.json").read_text())
    table |= {"auto_map": {"AutoModel": "evil.Model", "AutoConfig": "evil.Config"}}
    (folder / "config.json").write_text(json.dumps(table | {"trust_remote_code": True}))
    load_model(folder)
    assert not marker.exists()
