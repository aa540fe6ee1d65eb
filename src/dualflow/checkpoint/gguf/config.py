"""GGUF metadata into a ``ModelConfig`` and back, by the tables of ``families``. No torch here.

Nothing is guessed: unknown keys are refused by name, and so is a model whose switches the
architecture cannot express.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from dualflow.checkpoint.gguf.families import Family
from dualflow.checkpoint.gguf.file import GGUFFile
from dualflow.checkpoint.gguf.rope import ROPE_FREQS, find_llama3, read_scaling, write_scaling
from dualflow.checkpoint.gguf.tokenizer import TOKENIZER_KEYS, TOKENIZER_PREFIXES
from dualflow.spec import ModelConfig

_SIZES = {
    "block_count": "num_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_heads",
    "context_length": "max_position",
}
_KNOWN_KEYS = {
    *_SIZES, "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "vocab_size",
}  # fmt: skip

_NEUTRAL: dict[str, Any] = {
    "general.type": "model", "split.count": 1, "split.no": 0, "attention.causal": True,
    "expert_count": 0, "expert_used_count": 0, "use_parallel_residual": False,
    "tensor_data_layout": "Meta AI original pth",
}  # fmt: skip
"""Keys that are allowed with the one value that changes nothing."""

_DESCRIPTIVE = ("general.", "quantize.", "split.tensors.count")
"""Keys that begin so describe the file: names, licences, how it was quantised."""

_FINETUNED = "rope.scaling.finetuned"
"""Says that scaled positions were trained on; nothing is computed from it."""


def read_gguf_config(file: GGUFFile, family: Family, real_vocab_size: int) -> ModelConfig:
    """What the metadata of a file describes; ``norm_offset`` is left False.

    real_vocab_size: ids from here on only pad the vocabulary.

    Raises ``ValueError``: a key is unknown, missing, out of range or asks for what is not
    supported, or sizes do not fit the tensors.
    """
    metadata, prefix = file.metadata, f"{family.architecture}."
    _check_keys(metadata, prefix, family)
    fields: dict[str, Any] = {
        ours: _integer(metadata, prefix + key) for key, ours in _SIZES.items()
    }
    # A crafted number of layers is refused before anything is built for it.
    if fields["num_layers"] > len(file.tensors):
        raise ValueError(
            f"{prefix}block_count is {fields['num_layers']:,}, the file has "
            f"{len(file.tensors):,} tensors"
        )
    default = fields["hidden_size"] // fields["num_heads"]
    head_size = _integer(metadata, f"{prefix}attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _integer(metadata, prefix + key, head_size) != head_size:
            raise ValueError(
                f"{prefix}{key} is {metadata[prefix + key]}, the head size {head_size}; only equal "
                "ones are supported"
            )
    kv_heads = _integer(metadata, f"{prefix}attention.head_count_kv", fields["num_heads"])
    grouped = family.grouped_heads or kv_heads != fields["num_heads"]
    rows = _check_rows(file, prefix)
    config = ModelConfig(
        vocab_size=rows,
        real_vocab_size=real_vocab_size if real_vocab_size < rows else None,
        **fields,
        **family.fixed,
        num_kv_heads=kv_heads if grouped else None,
        head_dim=head_size if head_size != default else None,
        norm_eps=_number(metadata, prefix + family.norm_eps_key),
        tie_embeddings=not _has_head(file, family),
        **_biases(file, family),
        **_rotary(file, family, prefix, head_size),
        **_windows(metadata, family, prefix, fields["num_layers"]),
        **_softcaps(metadata, family, prefix),
    )
    scale = family.attention_scale(config)
    return (
        config
        if scale == config.head_size**-0.5
        else dataclasses.replace(config, attention_scale=scale)
    )


def write_gguf_config(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys that describe ``config``, the architecture's name in front of each.

    Raises ``ValueError`` that names the switch that ``family`` cannot express.
    """
    check_expressible(config, family)
    keys: dict[str, Any] = {key: getattr(config, ours) for key, ours in _SIZES.items()}
    keys[family.norm_eps_key] = float(config.norm_eps)
    keys["vocab_size"] = config.vocab_size
    if family.grouped_heads:
        keys["attention.head_count_kv"] = config.kv_heads
    if family.own_head_size:
        keys["attention.key_length"] = keys["attention.value_length"] = config.head_size
    if config.position == "rotary":
        keys["rope.freq_base"] = float(config.rope_theta)
        keys["rope.dimension_count"] = config.head_size
        keys |= write_scaling(config.rope_scaling)
    if family.window_period and config.sliding_window is not None:
        keys["attention.sliding_window"] = config.sliding_window
        slides = [config.window_of(layer) is not None for layer in range(config.num_layers)]
        if slides != _pattern(family.window_period, config.num_layers):
            keys["attention.sliding_window_pattern"] = slides
        if "rope.freq_base_swa" in family.keys:
            local = config.local_rope_theta or config.rope_theta
            keys["rope.freq_base_swa"] = float(local)
    for field, key in _SOFTCAPS.items():
        if (cap := getattr(config, field)) is not None:
            keys[key] = float(cap)
    return {f"{family.architecture}.{key}": value for key, value in keys.items()}


def check_expressible(config: ModelConfig, family: Family) -> None:
    """Raise ``ValueError`` that names the first field of ``config`` that files of ``family`` cannot
    express, and what they can. ``norm_offset`` is no such field: files hold whole gains.
    """
    for field, fits, expected in (*_kinds(config, family), *_numbers(config, family)):
        if not fits:
            raise ValueError(
                f"{field} is {getattr(config, field)!r}, which a GGUF file of the architecture "
                f"{family.architecture!r} cannot express; it can express {expected}"
            )


def _kinds(config: ModelConfig, family: Family) -> Iterator[tuple[str, bool, str]]:
    """Fields that are one of a few things: whether each fits, and what would."""
    for field, value in {**_PLAIN, **family.fixed}.items():
        if field != "qk_norm_span" or config.qk_norm:
            yield field, getattr(config, field) == value, repr(value)
    for name in _BIASES:
        has, can = getattr(config, f"{name}_bias"), name in family.biases
        yield f"{name}_bias", has == can or (can and not family.required_biases), repr(can)
    yield "tie_embeddings", config.tie_embeddings in family.ties, repr(family.ties[0])
    scaling = config.rope_scaling
    llama3 = scaling is not None and scaling.kind == "llama3"
    yield "rope_scaling", not llama3 or family.rope_freqs, "linear and yarn"


def _numbers(config: ModelConfig, family: Family) -> Iterator[tuple[str, bool, str]]:
    """Fields that are numbers: whether each fits, and what would."""
    plain = config.head_size * config.num_heads == config.hidden_size
    yield "head_dim", family.own_head_size or plain, "hidden_size / num_heads"
    grouped = config.kv_heads != config.num_heads
    yield "num_kv_heads", family.grouped_heads or not grouped, f"num_heads, {config.num_heads}"
    window = config.sliding_window
    if not family.window_period:
        felt = window is not None and window < config.max_position and _slides(config)
        yield "sliding_window", not felt, "None, or as many keys as max_position"
    yield "sliding_window", window is not None or not family.window_needed, "a window"
    yield "local_rope_theta", _local_rope_fits(config, family), "the base of all other layers"
    for field, key in _SOFTCAPS.items():
        can, cap = key in family.keys, getattr(config, field)
        # Gemma 2 has caps where a file gives none.
        fits = can and not family.window_needed if cap is None else can
        yield field, fits or (cap is None and not can), "a cap" if can else "None"
    scale = family.attention_scale(config)
    own = config.attention_scale or config.head_size**-0.5
    yield "attention_scale", math.isclose(own, scale, rel_tol=1e-6), f"{scale:.8g}"


_PLAIN: dict[str, Any] = {
    "norm": "rmsnorm", "norm_placement": "pre", "position": "rotary", "qk_norm": False,
    "qk_norm_span": "head", "mlp": "swiglu", "scale_embeddings": False,
}  # fmt: skip
"""What a family has where its table does not say otherwise."""


_BIASES = {
    "attention": "self_attn.q_proj", "attention_output": "self_attn.o_proj", "mlp": "mlp.up_proj",
}  # fmt: skip
"""Kinds of biases, each with a module that has one."""

_SOFTCAPS = {
    "attention_softcap": "attn_logit_softcapping", "final_softcap": "final_logit_softcapping",
}  # fmt: skip


def _slides(config: ModelConfig) -> bool:
    return any(config.window_of(layer) is not None for layer in range(config.num_layers))


def _local_rope_fits(config: ModelConfig, family: Family) -> bool:
    local = config.local_rope_theta
    if not _slides(config):
        return True  # no layer is turned by it
    if family.window_period and family.local_rope is not None:
        return local is not None or config.rope_scaling is None
    return local is None or (local == config.rope_theta and config.rope_scaling is None)


def _check_keys(metadata: Mapping[str, Any], prefix: str, family: Family) -> None:
    unknown = []
    for key, value in metadata.items():
        short = key.removeprefix(prefix)
        if short in _NEUTRAL:
            if value != _NEUTRAL[short]:
                raise ValueError(
                    f"{key} is {value!r}, which is not supported; expected {_NEUTRAL[short]!r}"
                )
        elif not (
            key.startswith((*_DESCRIPTIVE, *TOKENIZER_PREFIXES))
            or key in TOKENIZER_KEYS
            or (short != key and _reads(short, family))
        ):
            unknown.append(f"{key} = {str(value)[:40]}")
    if unknown:
        raise ValueError(f"the metadata holds what is not supported: {', '.join(unknown[:8])}")


def _reads(key: str, family: Family) -> bool:
    known = key in _KNOWN_KEYS or key in family.keys or key == family.norm_eps_key
    return known or (key == _FINETUNED and bool(family.keys))


def _check_rows(file: GGUFFile, prefix: str) -> int:
    """Rows of the embedding, which are as many as tokens."""
    metadata, embedding = file.metadata, file.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding else 0
    for key, count in (
        (f"{prefix}vocab_size", _integer(metadata, f"{prefix}vocab_size", rows)),
        ("the number of tokens", len(metadata["tokenizer.ggml.tokens"])),
    ):
        if count != rows:
            raise ValueError(f"{key} is {count:,}, token_embd.weight has {rows:,} rows")
    return rows


def _has_head(file: GGUFFile, family: Family) -> bool:
    """Whether the head is a matrix of its own; where the family writes a copy of the embedding,
    the same bytes are the embedding.
    """
    names = "output.weight", "token_embd.weight"
    if names[0] not in file.tensors:
        return False
    both = [file.tensors.get(name) for name in names]
    if family.output_copy == "never" or both[1] is None:
        return True
    if both[0] is None or (both[0].format, both[0].shape) != (both[1].format, both[1].shape):
        return True
    return file.raw(names[0]) != file.raw(names[1])


def _biases(file: GGUFFile, family: Family) -> dict[str, Any]:
    names = {
        kind: family.name_of(f"model.layers.0.{module}")[0] for kind, module in _BIASES.items()
    }
    return {
        f"{kind}_bias": kind in family.biases and f"{name}.bias" in file.tensors
        for kind, name in names.items()
    }


def _rotary(file: GGUFFile, family: Family, prefix: str, head_size: int) -> dict[str, Any]:
    if family.fixed.get("position") == "learned":
        return {}
    metadata = file.metadata
    theta = _number(metadata, f"{prefix}rope.freq_base", 10000.0)
    scaling = read_scaling(metadata, prefix)
    if family.rope_freqs and ROPE_FREQS in file.tensors:
        if scaling is not None:
            raise ValueError(
                f"the file has both {ROPE_FREQS} and {prefix}rope.scaling.type = "
                f"{scaling.kind!r}; expected one of them"
            )
        scaling = find_llama3(file.read(ROPE_FREQS), head_size, theta)
    fields: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    if family.local_rope is not None and f"{prefix}attention.sliding_window" in metadata:
        default = theta if family.local_rope == "global" else family.local_rope
        local = _number(metadata, f"{prefix}rope.freq_base_swa", default)
        if family.local_rope != "global" or local != theta or scaling is not None:
            fields["local_rope_theta"] = local
    return fields


def _windows(
    metadata: Mapping[str, Any], family: Family, prefix: str, num_layers: int
) -> dict[str, Any]:
    key = f"{prefix}attention.sliding_window"
    if not family.window_period or (key not in metadata and not family.window_needed):
        return {}
    window = _integer(metadata, key)
    pattern: Any = metadata.get(f"{key}_pattern", family.window_period)
    if type(pattern) is int and pattern >= 0:
        pattern = _pattern(pattern, num_layers)
    if not isinstance(pattern, list) or [type(x) for x in pattern] != [bool] * num_layers:
        raise ValueError(
            f"{key}_pattern is {str(pattern)[:60]}; expected a period, or true or false for each "
            f"of the {num_layers} layers"
        )
    layers = tuple(layer for layer, slides in enumerate(pattern) if slides)
    return {"sliding_window": window, "sliding_layers": None if all(pattern) else layers}


def _pattern(period: int, num_layers: int) -> list[bool]:
    """Which layers slide: all but every ``period``-th; all of them where it is 0."""
    return [period == 0 or layer % period < period - 1 for layer in range(num_layers)]


def _softcaps(metadata: Mapping[str, Any], family: Family, prefix: str) -> dict[str, Any]:
    caps: dict[str, float] = {}
    for field, key in _SOFTCAPS.items():
        if key in family.keys and (family.window_needed or prefix + key in metadata):
            caps[field] = _number(metadata, prefix + key)
    return caps


def _integer(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if type(value) is not int or not 1 <= value < 2**31:
        found = "missing" if value is None else f"{str(value)[:40]}"
        raise ValueError(f"{key} is {found}; expected a whole number from 1 up")
    return value


def _number(metadata: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = metadata.get(key, default)
    if type(value) is not float or not 0 < value < float("inf"):
        raise ValueError(f"{key} is {value!r}; expected a number above 0")
    return value
