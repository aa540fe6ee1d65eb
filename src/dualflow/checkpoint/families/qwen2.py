"""Qwen 2 and 2.5: biases on queries, keys and values alone."""

from dualflow.checkpoint.families.family import Family
from dualflow.checkpoint.families.keys import Activation
from dualflow.checkpoint.families.rotary import Rotary
from dualflow.checkpoint.families.windows import LayerTypes, past_first_layers

QWEN_WINDOWS = LayerTypes(past_first_layers, ("max_window_layers",), switch="use_sliding_window")

QWEN2 = Family(
    model_type="qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    switches={"attention_bias": True},
    defaults={
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 32768,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    },
    parts=(Activation(), Rotary(), QWEN_WINDOWS),
)  # fmt: skip
