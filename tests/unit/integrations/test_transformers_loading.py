"""Saving and loading through transformers: every tensor bit for bit, whichever class and folder,
and errors that name what does not fit.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualflow.checkpoint import load_model, load_tensors, read_header, save_model, save_tensors
from dualflow.checkpoint.store import read_primary_config
from dualflow.model import build_model, quantise_model
from dualflow.spec import AuxConfig, ModelConfig, ReadoutConfig
from dualflow.testing.configs import family_config, flow_config, tiny_config
from dualflow.testing.tensors import same, tiny_model

pytest.importorskip("transformers")

import transformers

from dualflow.integrations.transformers import DualFlowForCausalLM, DualFlowModel
from dualflow.integrations.transformers.export import CODE_FILES
from dualflow.testing.twins import twin_of

CASES: dict[str, ModelConfig] = {
    "tied": family_config("llama_mha_tied", "dual"),
    "untied": family_config("qwen2", "dual"),
    "standard": family_config("gpt2"),
    "lora": flow_config("lora"),
    "flows": flow_config("two_flows_own_mlp"),
    "gemma": family_config("gemma3", "dual", readout=ReadoutConfig(kind="learned")),
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()


def patterned(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    """A twin whose weights count on from tensor to tensor, so that no two are alike."""
    native = tiny_model(config, dtype=dtype)
    start = 0
    with torch.no_grad():
        for parameter in native.parameters():
            values = torch.arange(start, start + parameter.numel(), dtype=torch.float64)
            parameter.copy_((values / 7919).sin().view(parameter.shape))
            start += parameter.numel()
    return twin_of(native)


def assert_same_tensors(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not same(ours[name], theirs[name])] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_what_was_saved_is_loaded_bit_for_bit(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = patterned(CASES[case], dtype)
    model.save_pretrained(tmp_path)
    classes: Any = (DualFlowForCausalLM, transformers.AutoModelForCausalLM)
    for cls in classes:
        loaded, info = cls.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is DualFlowForCausalLM
        assert not any(info.values())
        assert_same_tensors(loaded, model)
    assert_same_tensors(load_model(tmp_path), model)


@pytest.mark.skipif(
    not hasattr(transformers.PretrainedConfig, "extra_files"), reason="this transformers is older"
)
@pytest.mark.parametrize("case", CASES)
def test_our_own_folders_are_loaded_bit_for_bit(case: str, tmp_path: Path) -> None:
    native = tiny_model(CASES[case], dtype=torch.float32)
    family = {"model_type": "llama", "eos_token_id": 5, "bos_token_id": 1}
    save_model(native, tmp_path / "ours", primary_config=family)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert_same_tensors(loaded, native)
    assert (loaded.config.eos_token_id, loaded.generation_config.bos_token_id) == (5, 1)
    loaded.save_pretrained(tmp_path / "theirs")
    assert_same_tensors(load_model(tmp_path / "theirs"), native)
    assert read_primary_config(tmp_path / "theirs") == family


def test_weights_spread_over_files_are_loaded(tmp_path: Path) -> None:
    model = patterned(CASES["untied"])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_same_tensors(DualFlowForCausalLM.from_pretrained(tmp_path), model)


def test_saving_over_a_folder_of_ours_leaves_no_old_auxiliary(tmp_path: Path) -> None:
    save_model(tiny_model(CASES["untied"], dtype=torch.float32), tmp_path)
    model = patterned(CASES["untied"])
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "aux.safetensors").exists()
    assert_same_tensors(DualFlowForCausalLM.from_pretrained(tmp_path), model)


def test_the_model_without_its_head_and_back(tmp_path: Path) -> None:
    model = patterned(CASES["untied"])
    model.save_pretrained(tmp_path / "whole")
    for cls in (DualFlowModel, transformers.AutoModel):
        base = cls.from_pretrained(tmp_path / "whole")
        assert type(base) is DualFlowModel
        assert_same_tensors(base, model.model)
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="does not fit its config.json: missing lm_head.weight"):
        DualFlowForCausalLM.from_pretrained(tmp_path / "base")
    _, info = DualFlowForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert info["missing_keys"] == {"lm_head.weight"}
    tied = patterned(CASES["tied"])
    tied.model.save_pretrained(tmp_path / "tied")
    assert_same_tensors(DualFlowForCausalLM.from_pretrained(tmp_path / "tied"), tied)


def rewritten(folder: Path, change: Any) -> None:
    tensors = load_tensors(folder / "model.safetensors")
    change(tensors)
    save_tensors(folder / "model.safetensors", tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.aux.0.embed_tokens.weight"),
            "missing model.aux.0.embed_tokens.weight",
        ),
        (
            lambda t: t.update({"model.layers.0.aux.0.query_coupling": torch.ones(3)}),
            "model.layers.0.aux.0.query_coupling",
        ),
        (lambda t: t.update({"model.extra": torch.ones(3)}), "unexpected model.extra"),
        (
            lambda t: t.update({name.replace("model.", "m."): t.pop(name) for name in list(t)}),
            "missing model",
        ),
    ],
    ids=["removed", "other shape", "unknown", "other prefix"],
)
def test_a_folder_that_does_not_fit_is_an_error(change: Any, message: str, tmp_path: Path) -> None:
    patterned(CASES["untied"]).save_pretrained(tmp_path)
    rewritten(tmp_path, change)
    for cls in (DualFlowForCausalLM, transformers.AutoModelForCausalLM):
        with pytest.raises((ValueError, RuntimeError)) as error:
            cls.from_pretrained(tmp_path)
        assert message in str(error.value)


def test_tied_weights_stay_one_through_moves_and_steps(tmp_path: Path) -> None:
    patterned(CASES["tied"]).save_pretrained(tmp_path)
    assert "lm_head.weight" not in read_header(tmp_path / "model.safetensors")
    model: Any = DualFlowForCausalLM.from_pretrained(tmp_path)
    model.to(torch.float64).train()
    ids = torch.tensor([[1, 2, 3, 4]])
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.grad.any()


def test_code_in_a_folder_does_not_run_unasked(tmp_path: Path) -> None:
    patterned(CASES["tied"]).save_pretrained(tmp_path)
    for name in CODE_FILES:
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is DualFlowForCausalLM
    assert not (tmp_path / "ran").exists()


def test_quantised_folders_are_refused_by_name(tmp_path: Path) -> None:
    save_model(quantise_model(build_model(tiny_config("dual")), "int4"), tmp_path)
    with pytest.raises(ValueError, match="this folder holds int4 weights"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_old_transformers_says_what_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(build_model(tiny_config("dual")), tmp_path)
    if hasattr(transformers.PretrainedConfig, "extra_files"):
        monkeypatch.delattr(transformers.PretrainedConfig, "extra_files")
    with pytest.raises(ValueError, match="dualflow export --format transformers"):
        DualFlowForCausalLM.from_pretrained(tmp_path)


def test_fresh_models_start_as_ours_do() -> None:
    changes: dict[str, Any] = {"aux": AuxConfig(owns=("q_proj", "mlp"), lora_rank=2)}
    config = tiny_config("dual", num_layers=8, qk_norm=True, norm_offset=True, **changes)
    fresh: Any = type(twin_of(build_model(config)))(twin_of(build_model(config)).config)
    ours: dict[str, Tensor] = dict(build_model(config).named_parameters())
    for name, parameter in fresh.named_parameters():
        if ours[name].dim() == 1 or not ours[name].any():
            assert torch.equal(parameter, ours[name]), name
        else:
            ratio = float(parameter.detach().std() / ours[name].detach().std())
            assert 0.6 < ratio < 1.6, name  # one of √(2 · 8 layers) would be outside
    assert not torch.equal(fresh.model.aux[0].embed_tokens.weight, fresh.model.embed_tokens.weight)
