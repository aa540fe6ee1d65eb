"""GGUF files of every architecture against the transformers model that they were written from.

Files are written as llama.cpp's converter would: names by the ``gguf`` package's own table, its
changes to tensors by hand. 8 query heads on 2 kv heads show a wrong order of query and key rows;
positions go past windows and past the rotary original length.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualflow.model import BatchKV, CausalLM
from dualflow.spec import ModelConfig

transformers: Any = pytest.importorskip("transformers")
gguf: Any = pytest.importorskip("gguf")

from dualflow.checkpoint.gguf.importer import import_gguf  # noqa: E402
from dualflow.testing.gguf import VOCAB_SIZE, tokenizer_metadata, write_gguf  # noqa: E402

LENGTH = 64
SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "attn_implementation": "eager", "tie_word_embeddings": True,
}  # fmt: skip
WINDOW = {"sliding_window": 20, "query_pre_attn_scalar": 8}

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                            "original_max_position_embeddings": 16},
    }, {}),
    "qwen2": ("Qwen2", {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                            "original_max_position_embeddings": 16},
    }, {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}, {}),
    "gemma": ("Gemma", {"head_dim": 12}, {}),
    "gemma2": ("Gemma2", {
        "head_dim": 8, **WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    }, {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        "attention.sliding_window": 20}),
    "gemma3": ("Gemma3", {
        "head_dim": 8, **WINDOW, "num_hidden_layers": 6, "final_logit_softcapping": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    }, {"attention.sliding_window": 20, "rope.freq_base": 1e6, "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0}),
    "gpt2": ("GPT2", {}, {}),
    "olmo2": ("Olmo2", {"tie_word_embeddings": False}, {}),
}  # fmt: skip
"""By architecture: transformers' name, what its config has beside sizes, and those keys."""


def build(architecture: str) -> Any:
    """transformers' model with large random values everywhere."""
    name, own, _ = MODELS[architecture]
    if architecture == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCAB_SIZE, n_embd=64, n_layer=3, n_head=8, n_inner=96, n_positions=128,
            attn_implementation="eager",
        )  # fmt: skip
    else:
        suffix = "TextConfig" if architecture == "gemma3" else "Config"
        config = getattr(transformers, name + suffix)(**{**SIZES, **own})
    head = "GPT2LMHeadModel" if architecture == "gpt2" else f"{name}ForCausalLM"
    model = getattr(transformers, head)(config).eval()
    generator = torch.Generator().manual_seed(0)
    plain_gain = 0.0 if architecture.startswith("gemma") else 1.0
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Rounded as published weights are; see ``import_gguf`` about Gemma's gains.
            value = (noise * 0.1).bfloat16().float()
            parameter.copy_(value + plain_gain * (key.endswith("weight") and value.dim() == 1))
    return model


def written(architecture: str, model: Any, path: Path) -> Path:
    """The file that llama.cpp's converter would write."""
    config = model.config
    layers = config.num_hidden_layers
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, layers)
    tensors = {}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if key.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            values = np.ascontiguousarray(values.T)
        if architecture.startswith("gemma") and key.endswith("norm.weight"):
            values = values + 1
        if architecture == "llama" and (".q_proj." in key or ".k_proj." in key):
            heads = 8 if ".q_proj." in key else 2
            halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        tensors[names.get_name(key, try_suffixes=(".weight", ".bias"))] = values
    if architecture == "llama":
        tensors["rope_freqs.weight"] = llama3_factors(8, **config.rope_parameters)
    keys = {
        "block_count": layers, "context_length": 128, "embedding_length": 64,
        "feed_forward_length": 96, "attention.head_count": 8, **MODELS[architecture][2],
    }  # fmt: skip
    if architecture == "gpt2":
        keys["attention.layer_norm_epsilon"] = 1e-5
    else:
        keys |= {"attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    if getattr(config, "head_dim", None):
        keys |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
    return write_gguf(path, metadata | tokenizer_metadata(), tensors, architecture=architecture)


def llama3_factors(dim: int, **p: Any) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    factors = []
    for index in range(0, dim, 2):
        length = 2 * np.pi * p["rope_theta"] ** (index / dim)
        original, low, high = p["original_max_position_embeddings"], 1.0, 4.0
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(p["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / p["factor"] + smooth))
    return np.array(factors, np.float32)


@torch.no_grad()
def logits(model: CausalLM, tokens_T: torch.Tensor) -> torch.Tensor:
    kv = [BatchKV(1, len(tokens_T))] * model.config.num_layers
    return model.logits(model.step(tokens_T, torch.arange(len(tokens_T)), kv).primary_TD)


@pytest.mark.parametrize("architecture", MODELS)
def test_imported_logits_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    theirs = build(architecture)
    ours = import_gguf(written(architecture, theirs, tmp_path / "tiny.gguf")).model
    assert ours.config.norm_offset == architecture.startswith("gemma")
    tokens = torch.randint(VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    assert float(expected.abs().max()) > 0.5
    torch.testing.assert_close(logits(ours, tokens), expected, rtol=1e-5, atol=1e-5)


def test_what_the_files_leave_out_is_what_llama_cpp_fills_in(tmp_path: Path) -> None:
    files = {
        name: import_gguf(written(name, build(name), tmp_path / f"{name}.gguf")).model.config
        for name in ("gemma2", "gemma3", "gemma", "gpt2")
    }
    assert files["gemma2"].sliding_layers == (0, 2)
    assert files["gemma3"].sliding_layers == (0, 1, 2, 3, 4)
    assert files["gemma3"].local_rope_theta == 10000.0
    assert all(config.tie_embeddings for config in files.values())
    assert isinstance(files["gpt2"], ModelConfig) and files["gpt2"].mlp_bias
