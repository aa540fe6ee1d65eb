"""Model folders: bit for bit there and back, strict, and clear about what cannot be read."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dualflow.checkpoint import (
    load_model,
    load_tensors,
    load_tokenizer_of,
    read_metrics,
    save_model,
    save_tensors,
)
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.model import CausalLM, build_model
from dualflow.spec import AuxConfig, ModelConfig, ReadoutConfig

BASE = ModelConfig(
    vocab_size=40, real_vocab_size=37, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
    intermediate_size=24, max_position=32,
)  # fmt: skip
CONFIGS: dict[str, ModelConfig] = {
    "standard": BASE,
    "standard_tied": dataclasses.replace(BASE, tie_embeddings=True),
    "gpt2_like": dataclasses.replace(
        BASE, norm="layernorm", position="learned", mlp="gelu", attention_bias=True, mlp_bias=True,
        qk_norm=True,
    ),
    "dual": dataclasses.replace(BASE, variant="dual"),
    "dual_tied_head": dataclasses.replace(BASE, variant="dual", tie_embeddings=True),
    "dual_tied_flow": dataclasses.replace(
        BASE, variant="dual", aux=AuxConfig(embedding="tied", couplings=())
    ),
    "dual_two_flows": dataclasses.replace(
        BASE, variant="dual",
        aux=AuxConfig(num_flows=2, flow_norms="separate", owns=("mlp", "lm_head")),
    ),
    "dual_lora": dataclasses.replace(
        BASE, variant="dual", aux=AuxConfig(owns=("q_proj", "o_proj"), lora_rank=3),
        readout=ReadoutConfig(primary_loss_weight=0.3),
    ),
    "phd2": dataclasses.replace(BASE, variant="phd2"),
    "two_softmax": dataclasses.replace(BASE, variant="two_softmax"),
}  # fmt: skip


def build(config: ModelConfig, dtype: torch.dtype = torch.float32) -> CausalLM:
    """Nothing keeps its initial value, so that a tensor that was not loaded shows."""
    model = build_model(config, seed=3, dtype=dtype)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))
    return model


def assert_same(one: CausalLM, other: CausalLM) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved dual model."""
    save_model(build(CONFIGS["dual"]), tmp_path / "model", metrics={"val_loss": 1.5})
    return tmp_path / "model"


def rewrite(path: Path, change: Any) -> None:
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_variant_comes_back_bit_for_bit(tmp_path, name, dtype):
    model = build(CONFIGS[name], dtype)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert loaded.config == model.config
    assert not loaded.training
    assert_same(model, loaded)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_primary_stands_alone_and_the_auxiliary_beside_it(tmp_path, name):
    save_model(build(CONFIGS[name]), tmp_path)
    primary = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert not [tensor for tensor in primary if ".aux." in tensor]
    assert "model.layers.1.self_attn.q_proj.weight" in primary
    assert ("lm_head.weight" in primary) == (not CONFIGS[name].tie_embeddings)
    extra = tmp_path / "aux.safetensors"
    if extra.exists():
        assert all(".aux." in tensor for tensor in safetensors.torch.load_file(extra))
    assert extra.exists() == bool([n for n in build(CONFIGS[name]).state_dict() if ".aux." in n])


@pytest.mark.parametrize("name", ["standard_tied", "dual_tied_head"])
def test_a_tied_head_is_one_tensor_after_loading_and_moving(tmp_path, name):
    save_model(build(CONFIGS[name]), tmp_path / "model")
    for dtype in (None, torch.bfloat16):
        model = load_model(tmp_path / "model", dtype=dtype)
        for moved in (model, model.to(torch.float64)):
            head, embedding = moved.lm_head.weight, moved.model.embed_tokens.weight
            assert head is embedding
            assert head.data_ptr() == embedding.data_ptr()


def test_a_format_can_be_asked_for(folder):
    stored = load_model(folder)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model = load_model(folder, dtype=dtype)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, stored.state_dict()[name].to(dtype)), name


def test_tensors_kept_in_another_format_stay_in_it(tmp_path):
    model = build(CONFIGS["dual"], torch.bfloat16)
    model.model.norm.to(torch.float32)
    save_model(model, tmp_path / "model")
    assert_same(model, load_model(tmp_path / "model"))


def test_values_too_large_for_the_format_asked_for_are_refused(tmp_path):
    model = build(CONFIGS["standard"])
    with torch.no_grad():
        dict(model.named_parameters())["model.norm.weight"][0] = 1e5
        dict(model.named_parameters())["model.norm.weight"][1] = math.inf
    save_model(model, tmp_path / "model")
    bf16 = load_model(tmp_path / "model", dtype=torch.bfloat16).state_dict()
    assert bf16["model.norm.weight"][0] == 99840
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight: 1 of 16 values are too large.*1e\+05"
    ):
        load_model(tmp_path / "model", dtype=torch.float16)


def test_tokenizer_and_metrics_come_along(tmp_path):
    tokenizer = bytes_tokenizer()
    metrics = {"val_loss": 2.5, "val_loss_p": math.nan, "val_loss_q": None}
    save_model(build(BASE), tmp_path / "a", tokenizer_json=tokenizer.to_json(), metrics=metrics)
    assert load_tokenizer_of(tmp_path / "a").to_json() == tokenizer.to_json()
    assert read_metrics(tmp_path / "a") == {"val_loss": 2.5, "val_loss_p": None, "val_loss_q": None}
    save_model(build(BASE), tmp_path / "b", tokenizer_json=tmp_path / "a" / "tokenizer.json")
    assert load_tokenizer_of(tmp_path / "b").to_json() == tokenizer.to_json()
    assert read_metrics(tmp_path / "b") == {}


def test_a_path_passed_as_tokenizer_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected the text of a tokenizer\.json, or its Path"):
        save_model(build(BASE), tmp_path / "model", tokenizer_json="runs/tokenizer.json")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_or_damaged_tokenizer_is_named(folder):
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing in .*model"):
        load_tokenizer_of(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer_of(folder)


class Wrapped(torch.nn.Module):
    """What DistributedDataParallel does to names, without processes."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrapped_models_are_saved_under_the_same_names(tmp_path):
    plain = build(CONFIGS["dual"])
    inner = build(CONFIGS["dual"])
    inner.model.layers[0] = torch.compile(inner.model.layers[0])  # type: ignore[call-overload]
    forms = {
        "compiled": torch.compile(plain),
        "wrapped": Wrapped(plain),
        "both": torch.compile(Wrapped(plain)),
        "inner": inner,
    }
    for name, form in forms.items():
        save_model(form, tmp_path / name)  # type: ignore[arg-type]
        assert_same(plain, load_model(tmp_path / name))


def test_saving_something_else_is_refused(tmp_path):
    with pytest.raises(TypeError, match="got a Linear"):
        save_model(torch.nn.Linear(2, 2), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


# Strictness: every tensor is accounted for.


def test_missing_tensors_are_named(folder):
    rewrite(folder / "model.safetensors", lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    rewrite(folder / "aux.safetensors", lambda t: t.pop("model.layers.0.aux.0.query_coupling"))
    with pytest.raises(ValueError) as caught:
        load_model(folder)
    assert "model.safetensors: missing model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "aux.safetensors: missing model.layers.0.aux.0.query_coupling" in str(caught.value)


def test_unexpected_tensors_are_named(folder):
    rewrite(
        folder / "model.safetensors", lambda t: t.update({"model.extra.weight": torch.zeros(1)})
    )
    with pytest.raises(ValueError, match=r"model\.safetensors: unexpected model\.extra\.weight"):
        load_model(folder)


def test_a_tensor_in_the_wrong_file_is_unexpected(folder):
    rewrite(folder / "aux.safetensors", lambda t: t.update({"model.norm.weight": torch.zeros(16)}))
    with pytest.raises(ValueError, match=r"aux\.safetensors: unexpected model\.norm\.weight"):
        load_model(folder)


def test_other_shapes_are_named_with_both(folder):
    rewrite(
        folder / "model.safetensors", lambda t: t.update({"model.norm.weight": torch.zeros(8, 2)})
    )
    with pytest.raises(ValueError, match=r"model\.norm\.weight \[8, 2\], expected \[16\]"):
        load_model(folder)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_number_formats_that_are_no_weights_are_named(folder, dtype):
    rewrite(
        folder / "model.safetensors",
        lambda t: t.update({"model.norm.weight": torch.zeros(16).to(dtype)}),
    )
    with pytest.raises(ValueError, match=r"not one of .*F32.*model\.norm\.weight"):
        load_model(folder)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_names_with_a_wrappers_prefix_are_an_error_that_says_so(folder, prefix):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    rewrite(folder / "model.safetensors", change)
    with pytest.raises(ValueError, match="put there by a wrapper") as caught:
        load_model(folder)
    assert repr(prefix.split(".")[0] + ".") in str(caught.value)


def test_a_missing_auxiliary_file_is_named(folder):
    (folder / "aux.safetensors").unlink()
    with pytest.raises(ValueError, match=r"aux\.safetensors is missing \(with .*query_coupling"):
        load_model(folder)


def test_auxiliary_tensors_of_a_standard_model_are_unexpected(folder, tmp_path):
    save_model(build(BASE), tmp_path / "standard")
    (folder / "aux.safetensors").rename(tmp_path / "standard" / "aux.safetensors")
    with pytest.raises(ValueError, match=r"aux\.safetensors: unexpected"):
        load_model(tmp_path / "standard")


def test_long_lists_of_tensors_stay_one_short_line(folder):
    rewrite(folder / "model.safetensors", lambda t: [t.pop(name) for name in list(t)[1:]])
    with pytest.raises(ValueError, match=r"and \d+ more") as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1500


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_fields(folder: Path, **changes: Any) -> None:
    edit_config(folder, config=json.loads((folder / "config.json").read_text())["config"] | changes)


@pytest.mark.parametrize(
    "fields",
    [{"hidden_size": 10**9}, {"vocab_size": 2**62}, {"num_layers": 10**12}],
    ids=str,
)
def test_a_config_that_lies_about_sizes_costs_nothing(folder, fields):
    edit_fields(folder, **fields)
    with pytest.raises(ValueError, match="model"):
        load_model(folder)


def test_an_unknown_or_wrong_field_is_named(folder):
    edit_fields(folder, hidden_sise=3)
    with pytest.raises(
        ValueError,
        match=r"config\.json: config\.hidden_sise: unknown key; did you mean 'hidden_size'",
    ):
        load_model(folder)


# Run folders.


def test_a_run_folder_gives_its_final_model_else_its_newest_checkpoint(tmp_path):
    run = tmp_path / "run"
    first, second, final = (build_model(BASE, seed=seed) for seed in (1, 2, 3))
    run.mkdir()
    (run / "config.json").write_text('{"name": "run"}')
    (run / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="without a finished model or a checkpoint"):
        load_model(run)
    save_model(second, run / "checkpoints" / "step-00000020")
    save_model(first, run / "checkpoints" / "step-00000003")
    assert_same(load_model(run), second)
    (run / "checkpoints" / "latest").write_text("step-00000003\n")
    assert_same(load_model(run), first)
    save_model(final, run / "model", metrics={"val_loss": 3.0})
    assert_same(load_model(run), final)
    assert read_metrics(run) == {"val_loss": 3.0}


@pytest.mark.parametrize(
    "name", ["../../elsewhere", "/etc", "..", "", "a\x00b", "step-00000009", "a/b", "x" * 10_000]
)
def test_the_pointer_to_the_newest_checkpoint_stays_inside_the_run(tmp_path, name):
    run = tmp_path / "run"
    save_model(build(BASE), tmp_path / "elsewhere")
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "latest").write_text(name)
    with pytest.raises(ValueError, match="latest names"):
        load_model(run)


# Tensors on their own.


def test_tensors_of_any_layout_come_back(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "whole": base, "again": base, "row": base[1], "turned": base.T, "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7), "state": torch.Generator().get_state(), "bf16": base.bfloat16(),
        "flag": torch.tensor([True]),
    }  # fmt: skip
    save_tensors(tmp_path / "state.safetensors", tensors, {"step": "3"})
    loaded = load_tensors(tmp_path / "state.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].dtype == tensor.dtype


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path):
    path = tmp_path / "t.safetensors"
    save_tensors(path, {"x": torch.ones(4096)})
    loaded = load_tensors(path)["x"]
    with path.open("r+b") as file:
        file.seek(-4096, 2)
        file.write(bytes(4096))
    assert loaded.sum() == 4096
