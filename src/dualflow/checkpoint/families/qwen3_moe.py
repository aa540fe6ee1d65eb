"""Qwen 3 with experts, and dense layers among the others."""

from dualflow.checkpoint.families.family import FIELDS, Family
from dualflow.checkpoint.families.keys import Activation
from dualflow.checkpoint.families.mixture import Mixture
from dualflow.checkpoint.families.qwen2_moe import EXPERTS, FUSED_EXPERTS
from dualflow.checkpoint.families.rotary import Rotary
from dualflow.checkpoint.families.windows import SwitchedWindow

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    fields=FIELDS
    | {"attention_bias": "attention_bias", "attention_output_bias": "attention_bias"},
    switches={"qk_norm": True},
    defaults={
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 32768,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
        "mlp_only_layers": None, "decoder_sparse_step": 1,
    },
    parts=(Activation(), Rotary(), SwitchedWindow(), Mixture(default=128)),
    names=EXPERTS,
    read_names=(FUSED_EXPERTS,),
)  # fmt: skip
