"""Llama 1 to 3, SmolLM, SmolLM2 and what calls itself one."""

from dualflow.checkpoint.families.family import FIELDS, Family
from dualflow.checkpoint.families.keys import Activation
from dualflow.checkpoint.families.rotary import Rotary

LLAMA = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM", "LlamaModel"),
    fields=FIELDS
    | {
        "attention_bias": "attention_bias",
        "attention_output_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
    },
    defaults={
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 2048,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False,
    },
    parts=(Activation(), Rotary()),
    whole_heads=True,
)  # fmt: skip
