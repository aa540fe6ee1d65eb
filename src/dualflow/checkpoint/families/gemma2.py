"""Gemma 2: norms on both sides, soft caps, a sliding window in every second layer."""

from dualflow.checkpoint.families.family import Family
from dualflow.checkpoint.families.gemma import GEMMA_FIELDS, GEMMA_SWITCHES
from dualflow.checkpoint.families.keys import Activation, QueryScalar
from dualflow.checkpoint.families.names import Names
from dualflow.checkpoint.families.rotary import Rotary
from dualflow.checkpoint.families.windows import LayerTypes, every_second

FOUR_NORMS = Names(
    modules={
        "attention_output_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_layernorm": "post_feedforward_layernorm",
    }
)

GEMMA2 = Family(
    model_type="gemma2",
    architectures=("Gemma2ForCausalLM", "Gemma2Model"),
    fields=GEMMA_FIELDS
    | {"attention_softcap": "attn_logit_softcapping", "final_softcap": "final_logit_softcapping"},
    switches=GEMMA_SWITCHES | {"norm_placement": "both"},
    defaults={
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "attention_bias": False, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
    },
    parts=(Activation("hidden_activation"), QueryScalar(), Rotary(), LayerTypes(every_second)),
    neutral={"hidden_act": ("gelu_pytorch_tanh",)},
    names=FOUR_NORMS,
    whole_heads=True,
)  # fmt: skip
