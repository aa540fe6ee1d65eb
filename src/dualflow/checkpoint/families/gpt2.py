"""GPT-2: learned positions, matrices stored transposed, query, key and value in one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dualflow.checkpoint.families.family import Family
from dualflow.checkpoint.families.keys import Activation
from dualflow.checkpoint.families.names import Names, Slice
from dualflow.spec import ModelConfig


@dataclass(frozen=True)
class InnerSize:
    """``n_inner``; null: four times the hidden size."""

    @property
    def keys(self) -> frozenset[str]:
        return frozenset({"n_inner"})

    def read(self, table: Mapping[str, Any]) -> dict[str, Any]:
        inner, width = table["n_inner"], table["n_embd"]
        if inner is None:  # a width that is no number is told as such by whoever reads it
            inner = 4 * width if type(width) is int else width
        return {"intermediate_size": inner}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {"n_inner": config.intermediate_size}


GPT2 = Family(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    fields={
        "vocab_size": "vocab_size", "hidden_size": "n_embd", "num_layers": "n_layer",
        "num_heads": "n_head", "max_position": "n_positions", "norm_eps": "layer_norm_epsilon",
        "tie_embeddings": "tie_word_embeddings", "init_std": "initializer_range",
    },
    switches={
        "norm": "layernorm", "position": "learned", "attention_bias": True,
        "attention_output_bias": True, "mlp_bias": True,
    },
    defaults={
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
        "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02, "tie_word_embeddings": True,
    },
    parts=(
        InnerSize(),
        Activation(
            "activation_function",
            {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu2": "relu2"},
        ),
    ),
    neutral={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
    irrelevant=frozenset({
        "n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn", "summary_type",
        "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    }),
    names=Names(
        prefix="transformer.",
        layers="h",
        modules={
            "embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f",
            "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
            "self_attn.q_proj": Slice("attn.c_attn", 0, 3),
            "self_attn.k_proj": Slice("attn.c_attn", 1, 3),
            "self_attn.v_proj": Slice("attn.c_attn", 2, 3),
            "self_attn.o_proj": "attn.c_proj",
            "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj",
        },
        transposed=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
        buffers=(r".+\.attn\.(bias|masked_bias)",),
    ),
)  # fmt: skip
