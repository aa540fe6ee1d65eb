"""OLMo 2: norms after attention and MLP instead of before, and over whole queries and keys."""

from dualflow.checkpoint.families.family import FIELDS, Family
from dualflow.checkpoint.families.keys import Activation
from dualflow.checkpoint.families.names import Names
from dualflow.checkpoint.families.rotary import Rotary

OLMO2 = Family(
    model_type="olmo2",
    architectures=("Olmo2ForCausalLM", "Olmo2Model"),
    fields=FIELDS
    | {"attention_bias": "attention_bias", "attention_output_bias": "attention_bias"},
    switches={"norm_placement": "post", "qk_norm": True, "qk_norm_span": "row"},
    defaults={
        "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
        "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 2048,
        "initializer_range": 0.02, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "attention_bias": False,
    },
    parts=(Activation(), Rotary()),
    names=Names(
        modules={
            "attention_output_layernorm": "post_attention_layernorm",
            "mlp_output_layernorm": "post_feedforward_layernorm",
        }
    ),
)  # fmt: skip
