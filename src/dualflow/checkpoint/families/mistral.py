"""Mistral: Llama with a sliding window in every layer, or in none."""

from dualflow.checkpoint.families.family import Family
from dualflow.checkpoint.families.keys import Activation
from dualflow.checkpoint.families.rotary import Rotary
from dualflow.checkpoint.families.windows import EveryLayer

MISTRAL = Family(
    model_type="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    defaults={
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 131072,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    parts=(Activation(), Rotary(), EveryLayer()),
)  # fmt: skip
