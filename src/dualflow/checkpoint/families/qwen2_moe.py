"""Qwen 1.5 and 2 with experts: a shared one behind a gate, and dense layers among the others."""

from dualflow.checkpoint.families.family import FIELDS, Family
from dualflow.checkpoint.families.keys import Activation
from dualflow.checkpoint.families.mixture import Mixture
from dualflow.checkpoint.families.names import Names, Slice
from dualflow.checkpoint.families.rotary import Rotary
from dualflow.checkpoint.families.windows import LayerTypes, every_second_of_first_layers

EXPERTS = Names(
    modules={"moe.router": "mlp.gate"},
    stacked={
        f"moe.experts.{matrix}": f"mlp.experts.{{}}.{matrix}.weight"
        for matrix in ("gate_proj", "up_proj", "down_proj")
    },
)
FUSED_EXPERTS = Names(
    sign=".mlp.experts.gate_up_proj",
    modules=EXPERTS.modules,
    stacked={
        "moe.experts.gate_proj": Slice("mlp.experts.gate_up_proj", 0, 2),
        "moe.experts.up_proj": Slice("mlp.experts.gate_up_proj", 1, 2),
        "moe.experts.down_proj": "mlp.experts.down_proj",
    },
)
"""As transformers 5 keeps them in memory, and writes them where it is asked to."""

_SHARED = {
    "moe.shared_expert_gate": "mlp.shared_expert_gate",
    "mlp.gate_proj": "mlp.shared_expert.gate_proj",
    "mlp.up_proj": "mlp.shared_expert.up_proj",
    "mlp.down_proj": "mlp.shared_expert.down_proj",
}

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
    fields=FIELDS | {"attention_bias": "qkv_bias"},
    defaults={
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 32768,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "qkv_bias": True, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 28, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "norm_topk_prob": False, "mlp_only_layers": None,
        "decoder_sparse_step": 1,
    },
    parts=(
        Activation(),
        Rotary(),
        LayerTypes(
            every_second_of_first_layers, ("max_window_layers",), switch="use_sliding_window"
        ),
        Mixture(counts=("num_experts",), default=60, shared="shared_expert_intermediate_size"),
    ),
    names=EXPERTS.but(with_experts=_SHARED),
    read_names=(FUSED_EXPERTS.but(with_experts=_SHARED),),
)  # fmt: skip
