"""OLMoE: experts in every layer, and a norm over whole queries and keys."""

from dualflow.checkpoint.families.family import FIELDS, Family
from dualflow.checkpoint.families.keys import Activation
from dualflow.checkpoint.families.mixture import Mixture
from dualflow.checkpoint.families.qwen2_moe import EXPERTS, FUSED_EXPERTS
from dualflow.checkpoint.families.rotary import Rotary

OLMOE = Family(
    model_type="olmoe",
    architectures=("OlmoeForCausalLM", "OlmoeModel"),
    # Its norms are as wide as heads that divide the model, so it can have no other size of head.
    fields={ours: key for ours, key in FIELDS.items() if ours != "head_dim"}
    | {"attention_bias": "attention_bias", "attention_output_bias": "attention_bias"},
    switches={"qk_norm": True, "qk_norm_span": "row"},
    defaults={
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": None,
        "hidden_act": "silu", "max_position_embeddings": 4096, "initializer_range": 0.02,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False,
        "num_experts_per_tok": 8, "norm_topk_prob": False,
    },
    parts=(
        Activation(),
        Rotary(),
        Mixture(default=64, size="intermediate_size", some_dense=False),
    ),
    neutral={"clip_qkv": ()},
    names=EXPERTS,
    read_names=(FUSED_EXPERTS,),
)  # fmt: skip
