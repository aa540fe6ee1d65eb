"""Tiny GGUF files of the Llama family, written with the ``gguf`` package as llama.cpp's converter
would: names, query and key rows interleaved, a byte-level tokenizer of 256 bytes and a few merges.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor

from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.spec import ModelConfig, RopeScaling

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<think>",)
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "i n", "Ċ Ċ")

TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def tiny_vocabulary() -> list[str]:
    """Control and user-defined tokens, the 256 bytes, what the merges make."""
    byte_ids: dict[str, int] = json.loads(bytes_tokenizer().to_json())["model"]["vocab"]
    letters = sorted(byte_ids, key=lambda letter: byte_ids[letter])
    return [*CONTROL, *USER_DEFINED, *letters, *(merge.replace(" ", "") for merge in MERGES)]


VOCAB_SIZE = len(CONTROL) + len(USER_DEFINED) + 256 + len(MERGES)


FAMILY_SWITCHES: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_scaling": RopeScaling(kind="llama3", factor=8.0, original_max_position=32),
        "tie_embeddings": True,
    },
    "qwen2": {
        "attention_bias": True,
        "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_position=32),
    },
    "qwen3": {"qk_norm": True, "head_dim": 16, "rope_theta": 1e6},
    "gemma": {"mlp": "geglu", "scale_embeddings": True, "tie_embeddings": True,
              "norm_offset": True, "head_dim": 12},
    "gemma2": {"mlp": "geglu", "scale_embeddings": True, "tie_embeddings": True,
               "norm_offset": True, "norm_placement": "both", "sliding_window": 20,
               "sliding_layers": (0, 2), "attention_softcap": 50.0, "final_softcap": 30.0},
    "gemma3": {"mlp": "geglu", "scale_embeddings": True, "tie_embeddings": True,
               "norm_offset": True, "norm_placement": "both", "qk_norm": True, "head_dim": 16,
               "sliding_window": 20, "sliding_layers": (0, 1, 2, 3, 4), "num_layers": 6,
               "rope_theta": 1e6, "local_rope_theta": 10000.0,
               "rope_scaling": RopeScaling(kind="linear", factor=8.0)},
    "gpt2": {"norm": "layernorm", "position": "learned", "mlp": "gelu", "tie_embeddings": True,
             "attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "olmo2": {"norm_placement": "post", "qk_norm": True, "qk_norm_span": "row"},
}  # fmt: skip
"""By llama.cpp's name of the architecture: what its models have beside sizes."""


def family_config(architecture: str, heads: int = 8, kv_heads: int = 2) -> ModelConfig:
    """A tiny model of one of llama.cpp's architectures, with most of what it can have."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 8 * heads, "num_layers": 3, "num_heads": heads,
        "num_kv_heads": None if architecture == "gpt2" else kv_heads, "intermediate_size": 96,
        "max_position": 128, "norm_eps": 1e-5,
    }  # fmt: skip
    return ModelConfig(**{**sizes, **FAMILY_SWITCHES[architecture]})


def gguf_metadata(config: ModelConfig) -> dict[str, Any]:
    """The keys of a file for ``config``, whose vocabulary has ``VOCAB_SIZE`` ids or more: those
    beyond are padding.
    """
    metadata = {
        "general.name": "tiny",
        "general.file_type": 0,
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_position,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "llama.rope.freq_base": config.rope_theta,
        "llama.rope.dimension_count": config.head_size,
        "llama.vocab_size": config.vocab_size,
        **tokenizer_metadata(config.vocab_size - VOCAB_SIZE),
    }
    if config.head_dim is not None:
        metadata["llama.attention.key_length"] = config.head_dim
        metadata["llama.attention.value_length"] = config.head_dim
    return metadata


def tokenizer_metadata(padding: int = 0) -> dict[str, Any]:
    """The tokenizer's keys; the last ``padding`` ids only fill the vocabulary up."""
    kinds = [3] * len(CONTROL) + [4] * len(USER_DEFINED) + [1] * (256 + len(MERGES)) + [5] * padding
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*tiny_vocabulary(), *(f"[PAD{i}]" for i in range(padding))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def gguf_tensors(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tensors of a model of Hugging Face's names under llama.cpp's, as float32 arrays."""
    tensors: dict[str, Any] = {}
    for name, tensor in state.items():
        if config.tie_embeddings and name == "lm_head.weight":
            continue
        module, _, kind = name.rpartition(".")
        values = tensor.float().numpy()
        if module in _NAMES:
            tensors[f"{_NAMES[module]}.{kind}"] = values
            continue
        layer, _, inner = module.removeprefix("model.layers.").partition(".")
        heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.kv_heads}
        if inner in heads:
            halves = values.reshape(heads[inner], 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        tensors[f"blk.{layer}.{_NAMES[inner]}.{kind}"] = values
    return tensors


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    matrix_format: str = "F32",
    architecture: str = "llama",
) -> Path:
    """Write a GGUF file. Matrices are stored as ``matrix_format``; vectors as float32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType[matrix_format if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny_gguf(
    path: Path,
    config: ModelConfig,
    state: Mapping[str, Tensor],
    matrix_format: str = "F32",
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """A whole file for a model; ``changes`` sets keys of the metadata, None removes one."""
    metadata = {**gguf_metadata(config), **(changes or {})}
    kept = {key: value for key, value in metadata.items() if value is not None}
    return write_gguf(path, kept, gguf_tensors(config, state), matrix_format)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
