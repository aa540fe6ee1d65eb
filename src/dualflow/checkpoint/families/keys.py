"""Keys of config.json that several families share: those without a meaning for what a model
computes, those with one supported value, and small groups with a meaning.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dualflow.spec import ModelConfig

_DESCRIPTION = (
    "_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype", "torchscript",
    "task_specific_params", "finetuning_task", "tokenizer_class", "prefix", "unsloth_fixed",
    "unsloth_version", "transformers.js_config", "is_llama_config",
)  # fmt: skip
_TRAINING = (
    "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "gradient_checkpointing", "pretraining_tp", "use_bfloat16", "tf_legacy_loss",
)  # fmt: skip
_OUTPUTS = (
    "use_cache", "cache_implementation", "return_dict", "output_attentions", "is_decoder",
    "output_hidden_states", "chunk_size_feed_forward", "tie_last_hidden_states", "num_labels",
    "_num_labels", "id2label", "label2id", "problem_type", "attn_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled",
)  # fmt: skip
_TOKENS = (
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
    "decoder_start_token_id",
)  # fmt: skip
_GENERATION = (
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "temperature", "top_k",
    "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens", "num_beam_groups", "diversity_penalty", "max_new_tokens",
)  # fmt: skip

IRRELEVANT = frozenset((*_DESCRIPTION, *_TRAINING, *_OUTPUTS, *_TOKENS, *_GENERATION))
"""Keys that never change the logits: notes, training, what is returned, special ids, sampling."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,), "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,), "cross_attention_hidden_size": (), "pruned_heads": ({},),
    "partial_rotary_factor": (1.0, 1), "rope_interleaved": (False,), "use_mrope": (False,),
    "use_bidirectional_attention": (False,), "quantization_config": (), "auto_map": (),
    "per_layer_config": ({},),
}  # fmt: skip
"""Keys with the values at which they change nothing, null apart; others are refused by name."""

_GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu",
    "gelu_new": "geglu",
}


class Part(Protocol):
    """A group of keys of config.json that mean something together."""

    @property
    def keys(self) -> frozenset[str]:
        """The keys it understands."""
        ...

    def read(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of ``ModelConfig`` from a config.json whose missing keys are filled in."""
        ...

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Keys that say what ``config`` is, as far as they can."""
        ...


@dataclass(frozen=True)
class Activation:
    """The activation of the MLP: its names, and which of ours each is."""

    key: str = "hidden_act"
    kinds: Mapping[str, str] = field(default_factory=lambda: _GATED)
    legacy: Mapping[str, str] = field(default_factory=dict)
    """Names with another meaning here than elsewhere."""

    @property
    def keys(self) -> frozenset[str]:
        return frozenset({self.key})

    def read(self, table: Mapping[str, Any]) -> dict[str, Any]:
        kinds, name = {**self.kinds, **self.legacy}, table[self.key]
        if not isinstance(name, str) or name not in kinds:
            raise ValueError(
                f"{self.key} = {name!r} is not supported (expected {' or '.join(kinds)})"
            )
        return {"mlp": kinds[name]}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        name = next((name for name, kind in self.kinds.items() if kind == config.mlp), None)
        return {self.key: name} if name else {}


def whole_number(table: Mapping[str, Any], key: str) -> int:
    """The number under ``key``. Raises ``ValueError`` where it is no count that can be meant."""
    value = table[key]
    if type(value) is not int or not 1 <= value < 1 << 20:
        raise ValueError(f"{key} = {value!r}; expected a whole number from 1 up")
    return value


@dataclass(frozen=True)
class QueryScalar:
    """Gemma's number whose inverse square root scales the scores."""

    key: str = "query_pre_attn_scalar"

    @property
    def keys(self) -> frozenset[str]:
        return frozenset({self.key})

    def read(self, table: Mapping[str, Any]) -> dict[str, Any]:
        value = table[self.key]
        if type(value) not in (int, float) or not 0 < value < 1 << 32:
            raise ValueError(f"{self.key} = {value!r}; expected a number above 0")
        return {"attention_scale": None if value == table["head_dim"] else value**-0.5}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        if config.attention_scale is None:
            return {self.key: config.head_size}
        return {self.key: max(1, round(config.attention_scale**-2))}
