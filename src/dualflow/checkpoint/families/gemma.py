"""Gemma 1: gains around 1, scaled embeddings, a head of its own size."""

from dualflow.checkpoint.families.family import FIELDS, Family
from dualflow.checkpoint.families.keys import Activation
from dualflow.checkpoint.families.rotary import Rotary

GEMMA_SWITCHES = {"norm_offset": True, "scale_embeddings": True}
GEMMA_FIELDS = FIELDS | {
    "attention_bias": "attention_bias",
    "attention_output_bias": "attention_bias",
}

GEMMA = Family(
    model_type="gemma",
    architectures=("GemmaForCausalLM", "GemmaModel"),
    fields=GEMMA_FIELDS,
    switches=GEMMA_SWITCHES,
    defaults={
        "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "attention_bias": False,
    },
    # The first files say "gelu" and mean the tanh form; `hidden_activation` set them right.
    parts=(Activation(legacy={"gelu": "geglu"}), Rotary()),
    neutral={"hidden_activation": ("gelu_pytorch_tanh",)},
)  # fmt: skip
