"""What a model is, as plain data: family switches, flows, experts."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from dualflow.spec.checks import require
from dualflow.spec.flows import AuxConfig, ReadoutConfig
from dualflow.spec.moe import MoEConfig

Variant = Literal["standard", "dual", "phd2", "two_softmax"]
FloatFormat = Literal["float64", "float32", "bfloat16", "float16"]
QuantisedFormat = Literal["int8", "int4"]

WEIGHT_GROUP = 32
"""Inputs of one output that share a scale in a quantised matrix."""

_DEFAULT_AUX, _DEFAULT_READOUT = AuxConfig(), ReadoutConfig()

_POSITIVE = (
    "rope_theta", "local_rope_theta", "attention_scale", "attention_softcap", "final_softcap",
    "sliding_window",
)  # fmt: skip
"""Fields of ``ModelConfig`` that are above 0 where they are given."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than the model was first trained on.

    kind:                   ``linear`` divides every frequency by ``factor``; ``llama3`` (Llama 3.1)
                            and ``yarn`` (Peng et al. 2023) only the slow ones, with a ramp between.
    original_max_position:  positions of the training before; ``llama3`` and ``yarn`` need it.
    low_freq_factor, high_freq_factor: ends of the ramp of ``llama3``, in turns over the original
                            positions.
    beta_slow, beta_fast:   ends of the ramp of ``yarn``, in turns over the original positions.
    truncate:               whether ``yarn`` rounds the ramp's ends to whole dimensions.
    attention_factor:       what ``yarn`` multiplies cosine and sine by; None: 0.1 ln(factor) + 1.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        require(self.factor >= 1, f"factor is {self.factor}; expected 1 or more")
        require(
            self.kind == "linear" or (self.original_max_position or 0) >= 1,
            f"original_max_position is {self.original_max_position}; {self.kind} needs the number "
            "of positions the model was first trained on",
        )
        require(
            self.high_freq_factor > self.low_freq_factor > 0,
            f"low_freq_factor {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}: "
            "expected 0 < low < high",
        )
        require(
            self.beta_fast > self.beta_slow > 0,
            f"beta_slow {self.beta_slow} and beta_fast {self.beta_fast}: expected 0 < slow < fast",
        )
        require(
            self.attention_factor is None or self.attention_factor > 0,
            f"attention_factor is {self.attention_factor}; expected more than 0",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One causal language model. Sizes are counts of elements; names follow Hugging Face's Llama
    where it has one.

    vocab_size:       rows of the embedding, padding rows included.
    real_vocab_size:  ids from here on are padding and are never sampled; None: all rows are real.
    norm_offset:      an RMSNorm multiplies by 1 + its stored gain (Gemma).
    norm_placement:   ``pre`` norms what attention and MLP read, ``post`` what they give (OLMo-2),
                      ``both`` both (Gemma 2 and 3).
    rope_scaling:     of every layer that does not use ``local_rope_theta``.
    local_rope_theta: rotary base of the sliding layers, unscaled (Gemma 3); None: ``rope_theta``.
    qk_norm_span:     whether QK-norm goes over each ``head`` (Qwen 3) or over the whole ``row`` of
                      all heads (OLMo-2).
    attention_scale:  what scores are multiplied by; None: 1/√head_dim.
    attention_softcap, final_softcap: cap · tanh(x / cap) on scores and on logits (Gemma 2).
    sliding_window:   keys that a sliding layer's query sees, its own included.
    sliding_layers:   which layers slide; None: all of them, where ``sliding_window`` is set.
    scale_embeddings: token embeddings are multiplied by √hidden_size (Gemma).
    moe:              the mixture of experts that stands for the MLP in all layers but its
                      ``dense_layers``; None: every layer has an MLP of ``intermediate_size``.
    """

    variant: Variant = "standard"
    vocab_size: int
    real_vocab_size: int | None = None
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int
    max_position: int = 1024
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-6
    norm_offset: bool = False
    norm_placement: Literal["pre", "post", "both"] = "pre"
    position: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    qk_norm: bool = False
    qk_norm_span: Literal["head", "row"] = "head"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp: Literal["swiglu", "geglu", "gelu", "relu2"] = "swiglu"
    mlp_bias: bool = False
    moe: MoEConfig | None = None
    tie_embeddings: bool = False
    scale_embeddings: bool = False
    init_std: float = 0.02
    aux: AuxConfig | None = None
    readout: ReadoutConfig = _DEFAULT_READOUT

    def __post_init__(self) -> None:
        for field in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "intermediate_size",
            "max_position",
        ):
            require(
                getattr(self, field) >= 1, f"{field} is {getattr(self, field)}; expected at least 1"
            )
        require(
            self.head_dim is not None or self.hidden_size % self.num_heads == 0,
            f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; "
            "set head_dim",
        )
        require(self.head_size >= 1, f"head_dim is {self.head_dim}; expected at least 1")
        for field in _POSITIVE:
            value = getattr(self, field)
            require(value is None or value > 0, f"{field} is {value}; expected more than 0")
        for field in ("norm_eps", "init_std"):
            require(
                getattr(self, field) >= 0, f"{field} is {getattr(self, field)}; expected 0 or more"
            )
        require(
            self.kv_heads >= 1 and self.num_heads % self.kv_heads == 0,
            f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.kv_heads}",
        )
        require(
            self.position != "rotary" or self.head_size % 2 == 0,
            f"head_dim {self.head_size} is odd; rotary positions turn pairs, so it must be even",
        )
        self._check_switches()
        require(
            self.real_vocab_size is None or 1 <= self.real_vocab_size <= self.vocab_size,
            f"real_vocab_size {self.real_vocab_size} is not in 1..{self.vocab_size} (vocab_size)",
        )
        require(
            self.variant == "dual" or self.aux is None,
            f"aux is set, but variant is {self.variant!r}; "
            "auxiliary flows belong to variant = 'dual'",
        )
        # Every matrix has a side of hidden_size: a higher rank says no more and costs memory.
        rank = 0 if self.aux is None else self.aux.lora_rank
        require(
            rank <= self.hidden_size,
            f"aux.lora_rank is {rank}; expected hidden_size {self.hidden_size} at most",
        )
        require(
            self.variant in ("dual", "two_softmax") or self.readout == ReadoutConfig(),
            f"readout is set, but variant {self.variant!r} has one distribution; leave readout out",
        )
        require(
            self.variant == "dual" or self.readout.kind != "learned",
            f"readout 'learned' belongs to variant = 'dual', and this is {self.variant!r}",
        )

    def _check_switches(self) -> None:
        rotary = self.rope_scaling is not None or self.local_rope_theta is not None
        require(
            self.position == "rotary" or not rotary,
            "rope_scaling or local_rope_theta is set, but position is 'learned'",
        )
        require(
            self.norm == "rmsnorm" or not self.norm_offset,
            "norm_offset is set, but norm is 'layernorm'; it belongs to 'rmsnorm'",
        )
        require(
            self.sliding_window is not None
            or (self.sliding_layers is None and self.local_rope_theta is None),
            "sliding_layers or local_rope_theta is set, but sliding_window is not",
        )
        self._check_moe()
        layers = self.sliding_layers or ()
        require(
            all(0 <= layer < self.num_layers for layer in layers)
            and len(set(layers)) == len(layers),
            f"sliding_layers is {list(layers)}; expected different layers below {self.num_layers}",
        )

    def _check_moe(self) -> None:
        aux = self.aux or _DEFAULT_AUX
        moe = self.moe
        if moe is None:
            require(
                aux.experts_per_token is None and aux.routing == "independent",
                "aux.experts_per_token or aux.routing is set, but the model has no experts (moe)",
            )
            return
        require(not self.mlp_bias, "mlp_bias is set, but experts (moe) have no biases")
        require(
            all(0 <= layer < self.num_layers for layer in moe.dense_layers),
            f"moe.dense_layers is {list(moe.dense_layers)}; expected layers below "
            f"{self.num_layers}",
        )
        k_aux = moe.experts_per_token if aux.experts_per_token is None else aux.experts_per_token
        require(
            k_aux <= moe.num_experts,
            f"aux.experts_per_token is {k_aux}, but there are {moe.num_experts} experts",
        )
        require(
            aux.routing == "independent" or k_aux == moe.experts_per_token,
            f"aux.experts_per_token is {k_aux}, but under routing 'replay' a flow's rows go "
            f"through the primary's {moe.experts_per_token} experts",
        )
        require(
            "mlp" not in aux.owns,
            "aux.owns names 'mlp', but the MLPs of this model are experts (moe), which flows share",
        )

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def coupled_size(self, layer: int) -> int:
        """Features that b couples in this layer: the MLP's intermediate, or the shared expert's; 0
        where there is none.
        """
        return (
            self.moe.shared_size
            if self.moe and self.has_experts(layer)
            else (self.intermediate_size)
        )

    @property
    def aux_experts_per_token(self) -> int:
        """k_aux; 0 where there are no experts."""
        if self.moe is None or self.flows is None:
            return 0
        chosen = self.flows.experts_per_token
        return self.moe.experts_per_token if chosen is None else chosen

    def window_of(self, layer: int) -> int | None:
        """Keys that a query of this layer sees, its own included; None: all of them."""
        slides = self.sliding_layers is None or layer in self.sliding_layers
        return self.sliding_window if slides else None

    @property
    def kv_heads(self) -> int:
        """num_kv_heads, or num_heads where that is not given (multi-head attention)."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_size(self) -> int:
        """head_dim, or hidden_size / num_heads where that is not given."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def flows(self) -> AuxConfig | None:
        """What the auxiliary flows of a dual model are: ``aux``, or its defaults; None for every
        other variant.
        """
        return (self.aux or _DEFAULT_AUX) if self.variant == "dual" else None

    @property
    def has_primary_readout(self) -> bool:
        """Whether p is a distribution to predict from, so that the auxiliary can be left out."""
        trained = self.readout.kind != "aux_only" or self.readout.standalone_primary
        return self.variant != "phd2" and trained

    @property
    def num_real_tokens(self) -> int:
        """Ids 0 .. num_real_tokens − 1 may be sampled."""
        return self.real_vocab_size or self.vocab_size

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate matrix beside its up matrix."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def num_flows(self) -> int:
        """Auxiliary rows per auxiliary position: 0 for standard and two_softmax, 1 for phd2."""
        if self.variant == "phd2":
            return 1
        return self.flows.num_flows if self.flows else 0


@dataclass(frozen=True, kw_only=True)
class QuantisedWeights:
    """How a checkpoint holds its matrices where they are not floats: codes of ``format`` in groups
    of ``group`` inputs.
    """

    format: QuantisedFormat
    group: int = WEIGHT_GROUP

    def __post_init__(self) -> None:
        require(self.group == WEIGHT_GROUP, f"group is {self.group}; expected {WEIGHT_GROUP}")


def standard_twin(config: ModelConfig) -> ModelConfig:
    """The same model without an auxiliary flow: what every comparison is made against."""
    return dataclasses.replace(config, variant="standard", aux=None, readout=ReadoutConfig())
