"""Llama-family GGUF files (Llama, SmolLM2) into models of ours, with their tokenizer and template.

Nothing is guessed: a key of the metadata or a tensor that we do not know is refused by name, and so
is a tensor that is missing or of another shape.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dualflow.checkpoint.gguf_file import GGUFFile, read_gguf
from dualflow.checkpoint.gguf_tokenizer import TOKENIZER_KEYS, import_tokenizer
from dualflow.extras import require_extra
from dualflow.model import CausalLM, build_model
from dualflow.spec import ModelConfig

ARCHITECTURES = ("llama",)

_REQUIRED_KEYS = {
    "block_count": "num_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_heads",
    "context_length": "max_position",
}
_KNOWN_KEYS = {
    *_REQUIRED_KEYS, "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "vocab_size",
}  # fmt: skip

_NEUTRAL: dict[str, Any] = {
    "general.type": "model", "split.count": 1, "split.no": 0,
    "rope.scaling.type": "none", "rope.scaling.factor": 1.0, "attention.causal": True,
    "expert_count": 0, "expert_used_count": 0, "use_parallel_residual": False,
}  # fmt: skip
"""Keys that are allowed with the one value that changes nothing."""

_DESCRIPTIVE = ("general.", "quantize.")
"""Keys that begin so describe the file: names, licences, how it was quantised."""

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Progress = Callable[[int, int], None]
"""Called with the number of tensors read and their total."""


@dataclass(frozen=True)
class Import:
    """A model read from a file of another format, and the companion files of its folder."""

    model: CausalLM
    companions: dict[str, str]


def import_gguf(
    path: str | Path, dtype: torch.dtype | None = None, progress: Progress | None = None
) -> Import:
    """The model in a GGUF file of the Llama family, in eval mode, with its tokenizer.

    dtype: the floating-point format of every weight; None: bfloat16 where all matrices are stored
           in it, else float32, which holds whatever the supported formats do.

    Raises ``ValueError`` in one line that names the file and what is wrong with it: another
    architecture or tokenizer, an unknown key, a missing, unexpected or misshapen tensor, damage;
    ``MissingExtraError`` where the ``gguf`` package is not there.
    """
    require_extra("gguf", "gguf", "reading GGUF files")
    file = read_gguf(path)
    try:
        _check_architecture(file.metadata)
        companions, real = import_tokenizer(file.metadata)
        config = _config(file, real)
        names = _tensor_names(file, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    model = build_model(config, None, dtype=dtype or _stored_dtype(file))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for done, (theirs, ours) in enumerate(names.items()):
            if progress is not None:
                progress(done, len(names))
            values = file.read(theirs)
            if heads := _rotated_heads(ours, config):
                values = unpermute(values, heads)
            parameters[ours].copy_(_checked(values, parameters[ours].dtype, f"{path}: {theirs}"))
    if progress is not None:
        progress(len(names), len(names))
    return Import(model.eval(), companions)


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a query or key matrix, or its bias, in Hugging Face's order.

    llama.cpp turns neighbouring pairs where Hugging Face turns a head's first half with its second;
    its files have each head's rows interleaved to make up for it. ``heads`` counts the heads of
    this matrix: query heads for queries, kv heads for keys.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _rotated_heads(name: str, config: ModelConfig) -> int:
    """How many heads the rows of ``name`` are; 0: they are not turned by their position."""
    if ".q_proj." in name:
        return config.num_heads
    return config.kv_heads if ".k_proj." in name else 0


def _check_architecture(metadata: dict[str, Any]) -> None:
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture is {architecture!r}, which is not supported; supported: "
            f"{', '.join(map(repr, ARCHITECTURES))}"
        )


def _config(file: GGUFFile, real_vocab_size: int) -> ModelConfig:
    metadata = file.metadata
    prefix = f"{metadata['general.architecture']}."
    _check_keys(metadata, prefix)
    fields: dict[str, Any] = {
        ours: _integer(metadata, prefix + key) for key, ours in _REQUIRED_KEYS.items()
    }
    kv_heads = _integer(metadata, f"{prefix}attention.head_count_kv", fields["num_heads"])
    default = fields["hidden_size"] // fields["num_heads"]
    head_dim = _integer(metadata, f"{prefix}attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _integer(metadata, prefix + key, head_dim) != head_dim:
            raise ValueError(
                f"{prefix}{key} is {metadata[prefix + key]}, the head size {head_dim}; only equal "
                "ones are supported"
            )
    embedding = file.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding else 0
    for key, count in (
        (f"{prefix}vocab_size", _integer(metadata, f"{prefix}vocab_size", rows)),
        ("the number of tokens", len(metadata["tokenizer.ggml.tokens"])),
    ):
        if count != rows:
            raise ValueError(f"{key} is {count:,}, token_embd.weight has {rows:,} rows")
    # A crafted number of layers is refused before anything is built for it.
    if fields["num_layers"] > len(file.tensors):
        raise ValueError(
            f"{prefix}block_count is {fields['num_layers']:,}, the file has "
            f"{len(file.tensors):,} tensors"
        )
    has = file.tensors.__contains__
    return ModelConfig(
        vocab_size=rows,
        real_vocab_size=real_vocab_size if real_vocab_size < rows else None,
        **fields,
        num_kv_heads=kv_heads,
        head_dim=head_dim if head_dim != default else None,
        norm_eps=_number(metadata, f"{prefix}attention.layer_norm_rms_epsilon"),
        rope_theta=_number(metadata, f"{prefix}rope.freq_base", 10000.0),
        attention_bias=has("blk.0.attn_q.bias"),
        attention_output_bias=has("blk.0.attn_output.bias"),
        mlp_bias=has("blk.0.ffn_up.bias"),
        tie_embeddings=not has("output.weight"),
    )


def _check_keys(metadata: dict[str, Any], prefix: str) -> None:
    unknown = []
    for key, value in metadata.items():
        short = key.removeprefix(prefix)
        if short in _NEUTRAL:
            if value != _NEUTRAL[short]:
                raise ValueError(
                    f"{key} is {value!r}, which is not supported; expected {_NEUTRAL[short]!r}"
                )
        elif not (
            key.startswith(_DESCRIPTIVE)
            or key in TOKENIZER_KEYS
            or (short != key and short in _KNOWN_KEYS)
            or key == "split.tensors.count"
        ):
            unknown.append(f"{key} = {str(value)[:40]}")
    if unknown:
        raise ValueError(f"the metadata holds what is not supported: {', '.join(unknown[:8])}")


def _integer(metadata: dict[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if type(value) is not int or not 1 <= value < 2**31:
        found = "missing" if value is None else f"{str(value)[:40]}"
        raise ValueError(f"{key} is {found}; expected a whole number from 1 up")
    return value


def _number(metadata: dict[str, Any], key: str, default: float | None = None) -> float:
    value = metadata.get(key, default)
    if type(value) is not float or not 0 < value < float("inf"):
        raise ValueError(f"{key} is {value!r}; expected a number above 0")
    return value


def _tensor_names(file: GGUFFile, config: ModelConfig) -> dict[str, str]:
    """Our name of every tensor of the file: all of them, and nothing but what ``config`` needs."""
    theirs = {ours: name for name, ours in _OUTER.items()}
    for layer in range(config.num_layers):
        for name, ours in _INNER.items():
            theirs[f"model.layers.{layer}.{ours}"] = f"blk.{layer}.{name}"
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {}
    for ours, parameter in build_model(config, device="meta").named_parameters():
        module, _, kind = ours.rpartition(".")
        wanted[f"{theirs[module]}.{kind}"] = (ours, tuple(parameter.shape))
    problems = []
    if missing := sorted(wanted.keys() - file.tensors.keys()):
        problems.append(f"missing {_few(missing)}")
    if unexpected := sorted(file.tensors.keys() - wanted.keys()):
        problems.append(f"not supported {_few(unexpected)}")
    shapes = [
        f"{name} {list(file.tensors[name].shape)}, expected {list(shape)}"
        for name, (_, shape) in wanted.items()
        if name in file.tensors and file.tensors[name].shape != shape
    ]
    if shapes:
        problems.append(f"other shape: {_few(shapes)}")
    if problems:
        raise ValueError(f"the tensors are not those of a Llama: {'; '.join(problems)}")
    return {name: wanted[name][0] for name in file.tensors}


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _stored_dtype(file: GGUFFile) -> torch.dtype:
    formats = {tensor.format for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return torch.bfloat16 if formats == {"BF16"} else torch.float32


def _checked(values: NDArray[np.float32], dtype: torch.dtype, name: str) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} holds values that are not finite; the file is damaged")
    converted = tensor.to(dtype)
    if not bool(converted.isfinite().all()):
        raise ValueError(f"{name} holds values that are too large for {dtype}")
    return converted
