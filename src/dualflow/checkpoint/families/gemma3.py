"""The text model of Gemma 3: QK-norm, and five sliding layers with a rotation of their own to each
full one.
"""

from dualflow.checkpoint.families.family import Family
from dualflow.checkpoint.families.gemma import GEMMA_FIELDS, GEMMA_SWITCHES
from dualflow.checkpoint.families.gemma2 import FOUR_NORMS
from dualflow.checkpoint.families.keys import Activation, QueryScalar
from dualflow.checkpoint.families.rotary import LayeredRotary
from dualflow.checkpoint.families.windows import LayerTypes, all_but_each_nth

GEMMA3 = Family(
    model_type="gemma3_text",
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
    fields=GEMMA_FIELDS | {"final_softcap": "final_logit_softcapping"},
    switches=GEMMA_SWITCHES | {"norm_placement": "both", "qk_norm": True},
    defaults={
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072, "initializer_range": 0.02, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "attention_bias": False, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "sliding_window_pattern": 6, "final_logit_softcapping": None,
    },
    parts=(
        Activation("hidden_activation"),
        QueryScalar(),
        LayeredRotary(),
        LayerTypes(all_but_each_nth, ("sliding_window_pattern",)),
    ),
    # transformers reads no attention soft cap in this family, so one that is set has no meaning
    # that all agree on.
    neutral={"attn_logit_softcapping": (), "hidden_act": ("gelu_pytorch_tanh",)},
    irrelevant=frozenset({"_sliding_window_pattern"}),
    names=FOUR_NORMS,
    whole_heads=True,
)  # fmt: skip
