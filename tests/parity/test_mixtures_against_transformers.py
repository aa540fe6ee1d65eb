"""Every family of mixtures of experts: a tiny random transformers model is saved in both of its
forms, imported, compared position by position past the length its rotation was first made for,
exported, and loaded by transformers again.

transformers' plain loop over the experts is what is compared with.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.parity.test_families_against_transformers import (
    LENGTH,
    LLAMA3,
    SHORT,
    SIZES,
    WIDE,
    YARN,
    Case,
    cached_logits,
    our_logits,
    randomise,
    their_logits,
)

transformers: Any = pytest.importorskip("transformers")

from dualflow.checkpoint.export import export_huggingface  # noqa: E402
from dualflow.checkpoint.huggingface import import_huggingface  # noqa: E402

WINDOWS = {"use_sliding_window": True, **SHORT}
NORMALISED = {"norm_topk_prob": True}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
SHARED = {**MOE, "shared_expert_intermediate_size": 56}
PLAIN = {"num_experts": 7, "num_experts_per_tok": 3}
LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 2}

CASES = [
    Case("Qwen2Moe", SHARED, "qwen2-moe"),
    Case("Qwen2Moe", {**SHARED, **NORMALISED, "mlp_only_layers": [1], "qkv_bias": False},
         "qwen2-moe-normalised-dense-layer"),
    Case("Qwen2Moe", {**SHARED, **WINDOWS, "max_window_layers": 3, "decoder_sparse_step": 2,
                      "tie_word_embeddings": True}, "qwen2-moe-windows-sparse-step-tied"),
    Case("Qwen2Moe", {**SHARED, "rope_parameters": YARN, "num_experts_per_tok": 6},
         "qwen2-moe-yarn-all-experts"),
    Case("Qwen3Moe", {**MOE, **WIDE, **NORMALISED}, "qwen3-moe-normalised"),
    Case("Qwen3Moe", {**MOE, "decoder_sparse_step": 2, "attention_bias": True},
         "qwen3-moe-sparse-step-biases"),
    Case("Qwen3Moe", {**MOE, **WINDOWS, "mlp_only_layers": [0, 9], "rope_parameters": YARN},
         "qwen3-moe-window-dense-layer-yarn"),
    Case("Qwen3Moe", {**MOE, "mlp_only_layers": [0, 1, 2]}, "qwen3-moe-all-dense"),
    Case("Mixtral", LOCAL, "mixtral"),
    Case("Mixtral", {**LOCAL, **SHORT, **WIDE, "num_experts_per_tok": 1}, "mixtral-window"),
    Case("Mixtral", {**LOCAL, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
         "mixtral-llama3-tied"),
    Case("Olmoe", PLAIN, "olmoe"),
    Case("Olmoe", {**PLAIN, **NORMALISED, "attention_bias": True, "rope_parameters": LLAMA3},
         "olmoe-normalised-biases-llama3"),
]  # fmt: skip

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def build(case: Case) -> Any:
    config = getattr(transformers, f"{case.family}Config")(**(SIZES | case.changes))
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER)
    randomise(model)
    return model.eval()


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def load(folder: Path) -> Any:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True, **EAGER
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def tokens() -> torch.Tensor:
    return torch.randint(101, (LENGTH,), generator=torch.Generator().manual_seed(1))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_import_and_export_agree_with_transformers(tmp_path: Path, case: Case) -> None:
    theirs = build(case)
    theirs.save_pretrained(tmp_path / "source")
    imported = import_huggingface(tmp_path / "source")
    expected = their_logits(theirs, tokens())
    assert expected.std() > 0.1
    ours = our_logits(imported.model, tokens())
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    cached = cached_logits(imported.model, tokens(), 60)
    torch.testing.assert_close(cached, expected, rtol=0, atol=1e-5)

    export_huggingface(imported.model, tmp_path / "target", primary_config=imported.primary_config)
    source, target = tensors_of(tmp_path / "source"), tensors_of(tmp_path / "target")
    assert source.keys() == target.keys()
    assert all(torch.equal(source[name], target[name]) for name in source)
    configs = [json.loads((tmp_path / p / "config.json").read_text()) for p in ("source", "target")]
    assert configs[0] == configs[1]
    assert torch.equal(their_logits(load(tmp_path / "target"), tokens()), expected)


@pytest.mark.parametrize("name", [
    "qwen2-moe-normalised-dense-layer", "qwen2-moe-windows-sparse-step-tied",
    "qwen3-moe-window-dense-layer-yarn", "mixtral", "olmoe",
])  # fmt: skip
def test_stacks_are_the_same_model_as_experts_apart(tmp_path: Path, name: str) -> None:
    theirs = build(case_of(name))
    theirs.save_pretrained(tmp_path / "apart")
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert any(key.endswith(".experts.gate_up_proj") for key in tensors_of(tmp_path / "stacked"))
    apart, stacked = (import_huggingface(tmp_path / place).model for place in ("apart", "stacked"))
    assert apart.config == stacked.config
    state = apart.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in stacked.state_dict().items())
    export_huggingface(stacked, tmp_path / "target")
    source, target = tensors_of(tmp_path / "apart"), tensors_of(tmp_path / "target")
    assert source.keys() == target.keys()
    assert all(torch.equal(source[key], target[key]) for key in source)


@pytest.mark.parametrize("name", [
    "qwen2-moe-normalised-dense-layer", "qwen2-moe-windows-sparse-step-tied",
    "qwen3-moe-normalised", "qwen3-moe-sparse-step-biases", "mixtral-window",
    "olmoe-normalised-biases-llama3",
])  # fmt: skip
def test_a_config_made_here_says_what_the_model_is(tmp_path: Path, name: str) -> None:
    theirs = build(case_of(name))
    theirs.save_pretrained(tmp_path / "source")
    model = import_huggingface(tmp_path / "source").model
    export_huggingface(model, tmp_path / "made")
    made = load(tmp_path / "made")
    assert type(made) is type(theirs)
    assert torch.equal(their_logits(made, tokens()), their_logits(theirs, tokens()))
    assert import_huggingface(tmp_path / "made").model.config == model.config


def test_shards_that_part_a_layers_experts_are_read(tmp_path: Path) -> None:
    theirs = build(case_of("mixtral"))
    theirs.save_pretrained(tmp_path / "source", max_shard_size="100KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 5
    imported = import_huggingface(tmp_path / "source")
    expected = their_logits(theirs, tokens())
    torch.testing.assert_close(our_logits(imported.model, tokens()), expected, rtol=0, atol=1e-5)
    export_huggingface(imported.model, tmp_path / "target", file_bytes=100_000)
    assert torch.equal(their_logits(load(tmp_path / "target"), tokens()), expected)


def test_half_precision_is_kept_bit_by_bit(tmp_path: Path) -> None:
    theirs = build(case_of("qwen2-moe")).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "source")
    imported = import_huggingface(tmp_path / "source")
    assert {p.dtype for p in imported.model.parameters()} == {torch.bfloat16}
    export_huggingface(imported.model, tmp_path / "target", primary_config=imported.primary_config)
    source, target = tensors_of(tmp_path / "source"), tensors_of(tmp_path / "target")
    assert source.keys() == target.keys()
    assert all(torch.equal(source[name], target[name]) for name in source)
