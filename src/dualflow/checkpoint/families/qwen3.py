"""Qwen 3: a norm over each head's query and key."""

from dualflow.checkpoint.families.family import FIELDS, Family
from dualflow.checkpoint.families.keys import Activation
from dualflow.checkpoint.families.qwen2 import QWEN_WINDOWS
from dualflow.checkpoint.families.rotary import Rotary

QWEN3 = Family(
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    fields=FIELDS
    | {"attention_bias": "attention_bias", "attention_output_bias": "attention_bias"},
    switches={"qk_norm": True},
    defaults={
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 32768,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 28,
    },
    parts=(Activation(), Rotary(), QWEN_WINDOWS),
)  # fmt: skip
