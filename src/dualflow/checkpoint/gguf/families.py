"""The architectures of GGUF files that we read and write, each as a plain table: its tensors, what
it fixes of a model, and the keys of its metadata beyond those that all have. No torch here.

What a table says is what llama.cpp does with such a file, not what a checkpoint elsewhere may do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dualflow.spec import ModelConfig

_OUTER = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_ATTENTION = {
    "attn_q": ("self_attn.q_proj",),
    "attn_k": ("self_attn.k_proj",),
    "attn_v": ("self_attn.v_proj",),
    "attn_output": ("self_attn.o_proj",),
}
_FUSED_ATTENTION = {
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_output": ("self_attn.o_proj",),
}
_QK_NORMS = {"attn_q_norm": ("self_attn.q_norm",), "attn_k_norm": ("self_attn.k_norm",)}
_PRE_NORMS = {"attn_norm": ("input_layernorm",), "ffn_norm": ("post_attention_layernorm",)}
_POST_NORMS = {
    "post_attention_norm": ("attention_output_layernorm",),
    "post_ffw_norm": ("mlp_output_layernorm",),
}
_MLP = {"ffn_up": ("mlp.up_proj",), "ffn_down": ("mlp.down_proj",)}
_GATED_MLP = {"ffn_gate": ("mlp.gate_proj",), **_MLP}

_SCALING = "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"
_ROTARY = ("rope.freq_base", "rope.dimension_count", *_SCALING, "rope.scaling.attn_factor")
_WINDOW = "attention.sliding_window", "attention.sliding_window_pattern"

Bias = Literal["attention", "attention_output", "mlp"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    title:          what people call it, for messages.
    layer_tensors:  names of a layer's tensors, each with ours; several of ours are one tensor of
                    theirs, row under row.
    fixed:          fields of ``ModelConfig`` that are the same in all of its models.
    keys:           keys of the metadata that are read, beyond those of every architecture.
    interleaved:    rows of queries and keys lie as rotary pairs, where ours lie as halves.
    offset_norms:   the family's gains are stored elsewhere without the 1 that a file includes.
    own_head_size:  whether a head may have another size than hidden_size / heads.
    biases:         which biases a model may have.
    ties:           whether the head may be the embedding and may be another matrix.
    output_copy:    whether a tied head may, or must, be in a file as a copy of the embedding.
    window_period:  every so manieth layer does not slide, where no pattern is given; 0: there are
                    no sliding windows.
    window_needed:  a file without a window would get one.
    local_rope:     rotary base of the sliding layers where a file names none, unscaled; "global":
                    that of the others, unscaled; None: they are rotated as all others are.
    odd_scale:      the number of layers at which scores are scaled by hidden_size / heads.
    """

    architecture: str
    title: str
    layer_tensors: Mapping[str, tuple[str, ...]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = _ROTARY
    interleaved: bool = False
    offset_norms: bool = False
    own_head_size: bool = True
    grouped_heads: bool = True
    biases: tuple[Bias, ...] = ("attention",)
    required_biases: bool = False
    ties: tuple[bool, ...] = (True, False)
    output_copy: Literal["never", "allowed", "required"] = "never"
    window_period: int = 0
    window_needed: bool = False
    local_rope: float | Literal["global"] | None = None
    odd_scale: int | None = None
    rope_freqs: bool = False

    @property
    def norm_eps_key(self) -> str:
        """The key of the norms' ε."""
        kind = "layer_norm" if self.fixed.get("norm") == "layernorm" else "layer_norm_rms"
        return f"attention.{kind}_epsilon"

    def attention_scale(self, config: ModelConfig) -> float:
        """What llama.cpp multiplies scores by in a model of these sizes."""
        if config.num_layers == self.odd_scale:
            return (config.hidden_size // config.num_heads) ** -0.5
        return config.head_size**-0.5

    def name_of(self, module: str) -> tuple[str, int]:
        """The tensor that a module of ours is in, without ".weight" or ".bias", and its place among
        the modules that are in it. Raises ``KeyError`` where the architecture has no such tensor.
        """
        if not module.startswith("model.layers."):
            return next(name for name, ours in _OUTER.items() if ours == module), 0
        layer, _, inner = module.removeprefix("model.layers.").partition(".")
        for name, ours in self.layer_tensors.items():
            if inner in ours:
                return f"blk.{layer}.{name}", ours.index(inner)
        raise KeyError(module)


_GEMMA = {"mlp": "geglu", "scale_embeddings": True}

FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            architecture="llama",
            title="Llama",
            layer_tensors={**_ATTENTION, **_PRE_NORMS, **_GATED_MLP},
            interleaved=True,
            biases=("attention", "attention_output", "mlp"),
            rope_freqs=True,
        ),
        Family(
            architecture="qwen2",
            title="Qwen 2",
            layer_tensors={**_ATTENTION, **_PRE_NORMS, **_GATED_MLP},
            own_head_size=False,
        ),
        Family(
            architecture="qwen3",
            title="Qwen 3",
            layer_tensors={**_ATTENTION, **_QK_NORMS, **_PRE_NORMS, **_GATED_MLP},
            fixed={"qk_norm": True},
        ),
        Family(
            architecture="gemma",
            title="Gemma",
            layer_tensors={**_ATTENTION, **_PRE_NORMS, **_GATED_MLP},
            fixed=_GEMMA,
            offset_norms=True,
            biases=(),
            ties=(True,),
        ),
        Family(
            architecture="gemma2",
            title="Gemma 2",
            layer_tensors={**_ATTENTION, **_PRE_NORMS, **_POST_NORMS, **_GATED_MLP},
            fixed={**_GEMMA, "norm_placement": "both"},
            keys=(*_ROTARY, *_WINDOW, "attn_logit_softcapping", "final_logit_softcapping"),
            offset_norms=True,
            biases=(),
            ties=(True,),
            window_period=2,
            window_needed=True,
            odd_scale=46,
        ),
        Family(
            architecture="gemma3",
            title="Gemma 3",
            layer_tensors={**_ATTENTION, **_QK_NORMS, **_PRE_NORMS, **_POST_NORMS, **_GATED_MLP},
            fixed={**_GEMMA, "norm_placement": "both", "qk_norm": True},
            keys=(*_ROTARY, *_WINDOW, "rope.freq_base_swa", "final_logit_softcapping"),
            offset_norms=True,
            biases=(),
            window_period=6,
            local_rope=10000.0,
            odd_scale=62,
        ),
        Family(
            architecture="gpt2",
            title="GPT-2",
            layer_tensors={**_FUSED_ATTENTION, **_PRE_NORMS, **_MLP},
            fixed={"norm": "layernorm", "position": "learned", "mlp": "gelu"},
            keys=(),
            own_head_size=False,
            grouped_heads=False,
            biases=("attention", "attention_output", "mlp"),
            required_biases=True,
            output_copy="allowed",
        ),
        Family(
            architecture="olmo2",
            title="OLMo 2",
            layer_tensors={**_ATTENTION, **_QK_NORMS, **_POST_NORMS, **_GATED_MLP},
            fixed={"norm_placement": "post", "qk_norm": True, "qk_norm_span": "row"},
            keys=(*_ROTARY, *_WINDOW, "rope.freq_base_swa"),
            own_head_size=False,
            biases=(),
            output_copy="required",
            window_period=4,
            local_rope="global",
        ),
    )
}


def find_family(metadata: Mapping[str, Any]) -> Family:
    """The family of a file by its ``general.architecture``; ``ValueError`` lists those we know."""
    architecture = metadata.get("general.architecture")
    if architecture not in FAMILIES:
        raise ValueError(
            f"general.architecture is {architecture!r}, which is not supported; supported: "
            f"{', '.join(map(repr, FAMILIES))}"
        )
    return FAMILIES[architecture]


def choose_family(config: ModelConfig) -> Family:
    """The family that a model to be written belongs to, by the switches that tell them apart.
    Whether it can express all others is for ``config`` to say.

    Raises ``ValueError`` for a mixture of experts.
    """
    if config.moe is not None:
        raise ValueError(
            "a mixture of experts cannot be written as GGUF; export it as a Hugging Face folder"
        )
    if config.position == "learned" or config.norm == "layernorm":
        name = "gpt2"
    elif config.norm_placement == "post":
        name = "olmo2"
    elif config.norm_placement == "both":
        name = "gemma3" if config.qk_norm else "gemma2"
    elif config.scale_embeddings or config.mlp == "geglu":
        name = "gemma"
    elif config.qk_norm:
        name = "qwen3"
    else:
        only_inputs = config.attention_bias and not (
            config.attention_output_bias or config.mlp_bias
        )
        plain = config.head_size * config.num_heads == config.hidden_size
        llama3 = config.rope_scaling is not None and config.rope_scaling.kind == "llama3"
        name = "qwen2" if only_inputs and plain and not llama3 else "llama"
    return FAMILIES[name]
