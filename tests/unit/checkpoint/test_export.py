"""The primary alone as a stock Hugging Face folder: what is written, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dualflow.checkpoint.export import export_huggingface
from dualflow.checkpoint.families import canonical
from dualflow.checkpoint.huggingface import import_huggingface
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.model import quantise_model
from dualflow.spec import PRESETS, ReadoutConfig, standard_twin
from dualflow.testing import tiny_config
from dualflow.testing.tensors import same, tiny_model
from tests.unit.checkpoint.huggingface_folders import read_tensors, write_folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_a_dual_model_leaves_its_auxiliary_behind(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("dual"), dtype=torch.float32)
    export_huggingface(model, tmp_path)
    imported = import_huggingface(tmp_path).model
    assert imported.config == standard_twin(model.config)
    state = model.state_dict()
    assert all(same(state[name], tensor) for name, tensor in imported.state_dict().items())
    assert len(read_tensors(tmp_path)) == len(imported.state_dict())


def test_the_config_it_came_with_is_written_word_for_word(tmp_path: Path) -> None:
    write_folder(tmp_path / "source")
    given = {
        **config_of(tmp_path / "source"),
        "_name_or_path": "x",
        "task_specific_params": {"a": 1},
    }
    model = import_huggingface(tmp_path / "source").model
    export_huggingface(model, tmp_path / "target", primary_config=given)
    assert config_of(tmp_path / "target") == given


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 32), ("bfloat16", 16), ("float16", 16)])
def test_the_number_format_is_what_config_json_says(tmp_path: Path, dtype: Any, bits: int) -> None:
    write_folder(tmp_path / "source")
    imported = import_huggingface(tmp_path / "source")
    export_huggingface(
        imported.model, tmp_path / "target", primary_config=imported.primary_config, dtype=dtype
    )
    assert config_of(tmp_path / "target")["torch_dtype"] == dtype
    tensors = read_tensors(tmp_path / "target")
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    size = sum(tensor.numel() for tensor in tensors.values()) * bits // 8
    assert 0 <= (tmp_path / "target" / "model.safetensors").stat().st_size - size < 8192
    state = imported.model.state_dict()
    assert all(same(state[name].to(tensor.dtype), tensor) for name, tensor in tensors.items())


def test_protected_tensors_keep_their_format_where_none_is_asked_for(tmp_path: Path) -> None:
    model = tiny_model(tiny_config(), dtype=torch.bfloat16)
    model.model.norm.float()
    export_huggingface(model, tmp_path)
    tensors = read_tensors(tmp_path)
    assert tensors.pop("model.norm.weight").dtype == torch.float32
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert config_of(tmp_path)["torch_dtype"] == "bfloat16"


def test_values_too_large_for_the_format_leave_no_folder(tmp_path: Path) -> None:
    model = tiny_model(tiny_config(), dtype=torch.float32)
    with torch.no_grad():
        model.state_dict()["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e5
    with pytest.raises(
        ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: 1 of 1,408 valu"
    ):
        export_huggingface(model, tmp_path / "target", dtype="float16")
    assert not list(tmp_path.iterdir())


def test_quantised_matrices_are_refused_with_advice(tmp_path: Path) -> None:
    model = quantise_model(
        tiny_model(tiny_config(intermediate_size=64), dtype=torch.float32), "int8"
    )
    with pytest.raises(ValueError, match="are int8, which .*; export the float model"):
        export_huggingface(model, tmp_path / "target")


def test_a_primary_that_predicts_nothing_is_refused(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("dual", readout=ReadoutConfig(kind="aux_only")))
    with pytest.raises(ValueError, match="its primary alone is no language model"):
        export_huggingface(model, tmp_path / "target")


def test_a_switch_that_no_family_has_is_named(tmp_path: Path) -> None:
    model = tiny_model(tiny_config(qk_norm=True, mlp="relu2"))
    with pytest.raises(ValueError, match="mlp is 'relu2', in qwen3 'swiglu'"):
        export_huggingface(model, tmp_path / "target")


def test_a_config_that_says_something_else_than_the_model_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "source")
    imported = import_huggingface(tmp_path / "source")
    given = {**(imported.primary_config or {}), "rope_theta": 5000.0}
    with pytest.raises(ValueError, match=r"rope_theta is 10000\.0, in config\.json 5000\.0"):
        export_huggingface(imported.model, tmp_path / "target", primary_config=given)
    with pytest.raises(ValueError, match=r"came with: it has model_type 'foo'"):
        export_huggingface(
            imported.model, tmp_path / "target", primary_config={"model_type": "foo"}
        )


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and holds something else"):
        export_huggingface(tiny_model(tiny_config()), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_model_trained_here_is_read_by_transformers_with_its_tokenizer(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    tokenizer = bytes_tokenizer()
    model = tiny_model(tiny_config("dual", vocab_size=tokenizer.vocab_size), dtype=torch.float32)
    export_huggingface(model, tmp_path, companions={"tokenizer.json": tokenizer.to_json()})
    config = config_of(tmp_path)
    assert (config["eos_token_id"], config["bos_token_id"]) == (tokenizer.eos_id, None)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = "  Grüße,\r\n\tworld 123 你好 🙂"
    assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert type(loaded).__name__ == "LlamaForCausalLM"


def test_padding_rows_are_written_too(tmp_path: Path) -> None:
    model = tiny_model(tiny_config(vocab_size=64, real_vocab_size=53), dtype=torch.float32)
    export_huggingface(model, tmp_path)
    assert config_of(tmp_path)["vocab_size"] == 64
    assert same(read_tensors(tmp_path)["lm_head.weight"], model.lm_head.weight.data)


def test_a_preset_comes_back_as_it_was(tmp_path: Path) -> None:
    export_huggingface(tiny_model(PRESETS["demo"], dtype=torch.float32), tmp_path)
    assert canonical(import_huggingface(tmp_path).model.config) == canonical(PRESETS["demo"])
