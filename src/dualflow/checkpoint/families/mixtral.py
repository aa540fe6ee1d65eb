"""Mixtral: Mistral with experts in every layer."""

from dualflow.checkpoint.families.family import Family
from dualflow.checkpoint.families.keys import Activation
from dualflow.checkpoint.families.mixture import Mixture
from dualflow.checkpoint.families.names import Names
from dualflow.checkpoint.families.qwen2_moe import FUSED_EXPERTS
from dualflow.checkpoint.families.rotary import Rotary
from dualflow.checkpoint.families.windows import EveryLayer

MIXTRAL = Family(
    model_type="mixtral",
    architectures=("MixtralForCausalLM", "MixtralModel"),
    defaults={
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 131072,
        "initializer_range": 0.02, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "sliding_window": None, "num_experts_per_tok": 2,
    },
    parts=(
        Activation(),
        Rotary(theta=1_000_000.0),
        EveryLayer(),
        Mixture(
            counts=("num_local_experts", "num_experts"), default=8, size="intermediate_size",
            normalise=None, some_dense=False,
        ),
    ),
    names=Names(
        modules={"moe.router": "block_sparse_moe.gate"},
        stacked={
            "moe.experts.gate_proj": "block_sparse_moe.experts.{}.w1.weight",
            "moe.experts.down_proj": "block_sparse_moe.experts.{}.w2.weight",
            "moe.experts.up_proj": "block_sparse_moe.experts.{}.w3.weight",
        },
    ),
    read_names=(FUSED_EXPERTS,),
)  # fmt: skip
