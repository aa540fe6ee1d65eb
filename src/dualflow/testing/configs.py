"""Tiny model configurations: every variant, every family and every switch of the auxiliary flow.

Sizes are small but pairwise different where a mix-up could hide (8 query heads on 2 kv heads, an
intermediate size that is no multiple of the model's, a vocabulary unlike all of them).
"""

import dataclasses
from typing import Any

from dualflow.spec import (
    AuxConfig,
    ModelConfig,
    MoEConfig,
    ReadoutConfig,
    RopeScaling,
    Variant,
)

_GEMMA: dict[str, Any] = {
    "norm_offset": True, "mlp": "geglu", "scale_embeddings": True, "tie_embeddings": True,
    "head_dim": 6,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_mha_tied": {"num_kv_heads": 8, "tie_embeddings": True},
    "gpt2": {
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "position": "learned",
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp": "gelu",
        "mlp_bias": True,
        "num_kv_heads": 8,
        "tie_embeddings": True,
    },
    "qwen2": {"attention_bias": True, "rope_theta": 1e6},
    "qwen3": {"qk_norm": True, "head_dim": 6},
    "nanogpt": {"qk_norm": True, "mlp": "relu2", "num_kv_heads": 8, "tie_embeddings": True},
    "geglu": {"mlp": "geglu", "tie_embeddings": True},
    "padded_vocabulary": {"vocab_size": 64, "real_vocab_size": 53},
    "mistral": {"sliding_window": 5},
    "llama_linear": {"rope_scaling": RopeScaling(kind="linear", factor=4.0)},
    "llama3": {
        "head_dim": 16,
        "rope_scaling": RopeScaling(kind="llama3", factor=8.0, original_max_position=32),
    },
    "llama_yarn": {
        "head_dim": 16,
        "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_position=32),
    },
    "gemma": _GEMMA,
    "gemma2": _GEMMA
    | {
        "norm_placement": "both", "attention_scale": 0.3, "attention_softcap": 2.0,
        "final_softcap": 3.0, "sliding_window": 6, "sliding_layers": (0,),
    },
    "gemma3": _GEMMA
    | {
        "norm_placement": "both", "qk_norm": True, "attention_scale": 0.3, "sliding_window": 4,
        "sliding_layers": (1,), "rope_theta": 1e6, "local_rope_theta": 1e4,
        "rope_scaling": RopeScaling(kind="linear", factor=8.0),
    },
    "olmo2": {"norm_placement": "post", "qk_norm": True, "qk_norm_span": "row"},
}  # fmt: skip
"""What each family changes in ``tiny_config``: every family switch has a row that turns it."""

MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "attention_bias": True,
        "moe": MoEConfig(
            num_experts=6, experts_per_token=2, expert_size=20, shared_size=14, shared_gate=True,
            normalise=False,
        ),
    },
    "qwen3_moe": {
        "qk_norm": True,
        "moe": MoEConfig(num_experts=6, experts_per_token=3, expert_size=20, dense_layers=(1,)),
    },
    "mixtral": {"moe": MoEConfig(num_experts=4, experts_per_token=2, expert_size=12)},
    "olmoe": {
        "qk_norm": True, "qk_norm_span": "row",
        "moe": MoEConfig(num_experts=8, experts_per_token=3, expert_size=20, normalise=False),
    },
    "deepseek_v3": {
        "moe": MoEConfig(
            num_experts=8, experts_per_token=3, expert_size=20, shared_size=12, scores="sigmoid",
            scaling=2.5, selection_bias=True, num_groups=4, groups_per_token=2, dense_layers=(0,),
        ),
    },
    "ungated_experts": {
        "mlp": "relu2",
        "moe": MoEConfig(num_experts=4, experts_per_token=1, expert_size=10, shared_size=8),
    },
}  # fmt: skip
"""Models whose MLPs are mixtures of experts: every switch of ``MoEConfig`` has a row that turns
it.
"""

_AUX_ONLY = ReadoutConfig(kind="aux_only")

FLOWS: dict[str, dict[str, Any]] = {
    "full": {},
    "minimal": {"aux": AuxConfig(couplings=()), "readout": _AUX_ONLY},
    "coupling": {"readout": _AUX_ONLY},
    "mixture_without_coupling": {"aux": AuxConfig(couplings=())},
    "primary_loss": {"readout": ReadoutConfig(primary_loss_weight=0.3)},
    "fixed_alpha_gradient": {"readout": ReadoutConfig(alpha_gradient=False)},
    "primary_only": {"readout": ReadoutConfig(kind="primary_only")},
    "standalone_primary": {"readout": ReadoutConfig(kind="aux_only", standalone_primary=True)},
    "learned_alpha": {"readout": ReadoutConfig(kind="learned")},
    "query_coupling": {"aux": AuxConfig(couplings=("query",))},
    "intermediate_coupling": {"aux": AuxConfig(couplings=("intermediate",))},
    "output_coupling": {"aux": AuxConfig(couplings=("output",))},
    "three_flows": {"aux": AuxConfig(num_flows=3)},
    "tied_embedding": {"aux": AuxConfig(embedding="tied")},
    "separate_norms": {"aux": AuxConfig(flow_norms="separate")},
    "owns_query": {"aux": AuxConfig(owns=("q_proj",))},
    "owns_everything": {"aux": AuxConfig(owns=("q_proj", "o_proj", "mlp", "lm_head"))},
    "lora": {"aux": AuxConfig(owns=("q_proj", "o_proj", "mlp", "lm_head"), lora_rank=2)},
    "two_flows_own_mlp": {"aux": AuxConfig(num_flows=2, owns=("mlp",), flow_norms="separate")},
}
"""What each kind of dual model changes: every switch of the auxiliary flow and of the readout has a
row.
"""


def tiny_config(variant: Variant = "standard", **changes: Any) -> ModelConfig:
    """A Llama-like model of two layers and some ten thousand parameters, with ``changes`` to its
    fields.

    D 32, 8 query heads on 2 kv heads of 4, F 44, vocabulary 53, 128 positions.
    """
    fields: dict[str, Any] = {
        "variant": variant,
        "vocab_size": 53,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 2,
        "intermediate_size": 44,
        "max_position": 128,
        # Larger than in training, so that attention is far from uniform and the logits differ.
        "init_std": 0.2,
    }
    return ModelConfig(**(fields | changes))


def family_config(family: str, variant: Variant = "standard", **changes: Any) -> ModelConfig:
    """``tiny_config`` with the switches of one of ``FAMILIES``."""
    return tiny_config(variant, **(FAMILIES[family] | changes))


def mixture_config(mixture: str, variant: Variant = "standard", **changes: Any) -> ModelConfig:
    """``tiny_config`` with the experts of one of ``MIXTURES``."""
    return tiny_config(variant, **(MIXTURES[mixture] | changes))


def flow_config(flow: str, **changes: Any) -> ModelConfig:
    """A dual ``tiny_config`` with one of ``FLOWS``."""
    return dataclasses.replace(tiny_config("dual", **FLOWS[flow]), **changes)
