"""What a model is, as plain data: family switches, the auxiliary flow, the readout, presets and
parameter counts.

No torch here. Families differ by switches alone (there is no ``model_type`` to branch on), and the
variants that are compared (standard, dual, phd2, two_softmax) share every field but ``variant`` and
what the auxiliary flow adds.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Coupling = Literal["query", "intermediate", "output"]
Owned = Literal["q_proj", "o_proj", "mlp", "lm_head"]
Variant = Literal["standard", "dual", "phd2", "two_softmax"]
FloatFormat = Literal["float64", "float32", "bfloat16", "float16"]
QuantisedFormat = Literal["int8", "int4"]

WEIGHT_GROUP = 32
"""Inputs of one output that share a scale in a quantised matrix."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class AuxConfig:
    """The auxiliary flows of a ``dual`` model (paper; switches marked "ours" in docs/dual_flow.md).

    num_flows:   how many auxiliary flows; q is their uniform mean in probability.
    couplings:   which of the three learned vectors exist: a (query), b (intermediate), c (output).
    embedding:   ``own`` gives each flow its E2; ``tied`` reads E1 (a control of the ablation
                 ladder).
    flow_norms:  whether norm gains are shared with the primary or the flow has its own.
    owns:        matrices the flow owns instead of sharing the primary's.
    lora_rank:   0: what it owns are whole matrices; r > 0: it owns a LoRA of rank r on top of the
                 shared ones.
    """

    num_flows: int = 1
    couplings: tuple[Coupling, ...] = ("query", "intermediate", "output")
    embedding: Literal["own", "tied"] = "own"
    flow_norms: Literal["shared", "separate"] = "shared"
    owns: tuple[Owned, ...] = ()
    lora_rank: int = 0

    def __post_init__(self) -> None:
        _require(self.num_flows >= 1, f"num_flows is {self.num_flows}; expected at least 1")
        _require(
            self.lora_rank >= 0,
            f"lora_rank is {self.lora_rank}; expected 0 (whole matrices) or more",
        )
        _require(
            self.lora_rank == 0 or bool(self.owns),
            "lora_rank is set but owns is empty; name the matrices it adapts",
        )
        for field in ("couplings", "owns"):
            names = getattr(self, field)
            _require(len(set(names)) == len(names), f"{field} names something twice: {list(names)}")


_DEFAULT_AUX = AuxConfig()


@dataclass(frozen=True, kw_only=True)
class ReadoutConfig:
    """How p and q become the distribution r that is trained and sampled.

    kind:                 ``mixture`` r = αp + (1 − α)q with α = clip(Σp², ½, 1) (paper);
                          ``aux_only`` r = q; ``primary_only`` r = p.
    alpha_gradient:       whether the gradient flows through α (ours).
    primary_loss_weight:  λ in loss = −log r − λ log p (ours); above 0 it keeps p usable with the
                          auxiliary off.
    """

    kind: Literal["mixture", "aux_only", "primary_only"] = "mixture"
    alpha_gradient: bool = True
    primary_loss_weight: float = 0.0

    def __post_init__(self) -> None:
        _require(
            self.primary_loss_weight >= 0,
            f"primary_loss_weight is {self.primary_loss_weight}; expected 0 or more",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One causal language model. Sizes are counts of elements; names follow Hugging Face's Llama
    where it has one.

    vocab_size:       rows of the embedding, padding rows included.
    real_vocab_size:  ids from here on are padding and are never sampled; None: all rows are real.
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
    position: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = 10000.0
    qk_norm: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp: Literal["swiglu", "geglu", "gelu", "relu2"] = "swiglu"
    mlp_bias: bool = False
    tie_embeddings: bool = False
    init_std: float = 0.02
    aux: AuxConfig | None = None
    readout: ReadoutConfig = ReadoutConfig()

    def __post_init__(self) -> None:
        for field in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "intermediate_size",
            "max_position",
        ):
            _require(
                getattr(self, field) >= 1, f"{field} is {getattr(self, field)}; expected at least 1"
            )
        _require(
            self.head_dim is not None or self.hidden_size % self.num_heads == 0,
            f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; "
            "set head_dim",
        )
        _require(self.head_size >= 1, f"head_dim is {self.head_dim}; expected at least 1")
        _require(self.rope_theta > 0, f"rope_theta is {self.rope_theta}; expected more than 0")
        for field in ("norm_eps", "init_std"):
            _require(
                getattr(self, field) >= 0, f"{field} is {getattr(self, field)}; expected 0 or more"
            )
        _require(
            self.kv_heads >= 1 and self.num_heads % self.kv_heads == 0,
            f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.kv_heads}",
        )
        _require(
            self.position != "rotary" or self.head_size % 2 == 0,
            f"head_dim {self.head_size} is odd; rotary positions turn pairs, so it must be even",
        )
        _require(
            self.real_vocab_size is None or 1 <= self.real_vocab_size <= self.vocab_size,
            f"real_vocab_size {self.real_vocab_size} is not in 1..{self.vocab_size} (vocab_size)",
        )
        _require(
            self.variant == "dual" or self.aux is None,
            f"aux is set, but variant is {self.variant!r}; "
            "auxiliary flows belong to variant = 'dual'",
        )
        _require(
            self.variant in ("dual", "two_softmax") or self.readout == ReadoutConfig(),
            f"readout is set, but variant {self.variant!r} has one distribution; leave readout out",
        )

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
        _require(self.group == WEIGHT_GROUP, f"group is {self.group}; expected {WEIGHT_GROUP}")


def standard_twin(config: ModelConfig) -> ModelConfig:
    """The same model without an auxiliary flow: what every comparison is made against."""
    return dataclasses.replace(config, variant="standard", aux=None, readout=ReadoutConfig())


@dataclass(frozen=True)
class ParameterCounts:
    """Learned scalars by owner; a shared matrix counts for the primary, a tied head once."""

    primary: int
    aux: int

    @property
    def total(self) -> int:
        return self.primary + self.aux


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Learned scalars of ``config`` by formula, without building it."""
    c = config
    primary = sum(rows * columns for rows, columns in _primary_shapes(c))
    if c.variant == "two_softmax":
        return ParameterCounts(primary, c.hidden_size * c.hidden_size)
    if c.flows is None:
        return ParameterCounts(primary, 0)
    return ParameterCounts(primary, c.flows.num_flows * _flow_parameters(c, c.flows))


def _primary_shapes(c: ModelConfig) -> Iterator[tuple[int, int]]:
    norm = 2 if c.norm == "layernorm" else 1
    query, key = c.num_heads * c.head_size, c.kv_heads * c.head_size
    yield c.vocab_size, c.hidden_size
    if not c.tie_embeddings:
        yield c.vocab_size, c.hidden_size
    if c.position == "learned":
        yield c.max_position, c.hidden_size
    yield norm, c.hidden_size
    for _ in range(c.num_layers):
        yield 2 * norm, c.hidden_size
        yield query + 2 * key, c.hidden_size + c.attention_bias
        yield c.hidden_size, query + c.attention_output_bias
        yield from _mlp_shapes(c)
        if c.qk_norm:
            yield 2, c.head_size


def _mlp_shapes(c: ModelConfig) -> Iterator[tuple[int, int]]:
    yield (2 if c.gated else 1) * c.intermediate_size, c.hidden_size + c.mlp_bias
    yield c.hidden_size, c.intermediate_size + c.mlp_bias


def _flow_parameters(c: ModelConfig, aux: AuxConfig) -> int:
    query = c.num_heads * c.head_size
    norm = c.hidden_size * (2 if c.norm == "layernorm" else 1)
    per_coupling = {"query": query, "intermediate": c.intermediate_size, "output": c.hidden_size}
    layer = sum(per_coupling[name] for name in aux.couplings)
    owned: dict[str, list[tuple[int, int]]] = {
        "q_proj": [(query, c.hidden_size + c.attention_bias)],
        "o_proj": [(c.hidden_size, query + c.attention_output_bias)],
        "mlp": [(c.intermediate_size, c.hidden_size + c.mlp_bias)] * (2 if c.gated else 1)
        + [(c.hidden_size, c.intermediate_size + c.mlp_bias)],
    }
    biases = {"q_proj": c.attention_bias, "o_proj": c.attention_output_bias, "mlp": c.mlp_bias}

    def size(rows: int, columns: int, bias: bool) -> int:
        return aux.lora_rank * (rows + columns - bias) if aux.lora_rank else rows * columns

    for name, shapes in owned.items():
        if name in aux.owns:
            layer += sum(size(rows, columns, biases[name]) for rows, columns in shapes)
    total = c.num_layers * layer
    if aux.embedding == "own":
        total += c.vocab_size * c.hidden_size
    if "lm_head" in aux.owns:
        total += size(c.vocab_size, c.hidden_size, False)
    if aux.flow_norms == "separate":
        total += norm + c.num_layers * 2 * norm + c.num_layers * c.qk_norm * c.head_size
    return total


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=32000, hidden_size=hidden, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, intermediate_size=intermediate,
        max_position=2048, norm_eps=1e-5, rope_theta=10000.0,
    )  # fmt: skip


PRESETS: dict[str, ModelConfig] = {
    "demo": ModelConfig(
        vocab_size=1024, hidden_size=32, num_layers=4, num_heads=2, intermediate_size=96,
        max_position=1024, tie_embeddings=True,
    ),
    # The paper's NanoGPT setting: 12 layers, D 768, head dim 128, vocabulary 50257 padded to 50304;
    # the rest is ours.
    "nanogpt-124m": ModelConfig(
        vocab_size=50304, real_vocab_size=50257, hidden_size=768, num_layers=12, num_heads=6,
        intermediate_size=3072, max_position=1024, qk_norm=True, mlp="relu2", tie_embeddings=True,
    ),
    "llama-120m": _llama(768, 12, 12, 4, 2048),
    "llama-270m": _llama(1024, 16, 16, 4, 2816),
    "llama-500m": _llama(1280, 22, 20, 5, 3456),
    "smollm2-135m": ModelConfig(
        vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3,
        intermediate_size=1536, max_position=8192, norm_eps=1e-5, rope_theta=100000.0,
        tie_embeddings=True,
    ),
}  # fmt: skip
"""Named standard models; ``dataclasses.replace(PRESETS[name], variant="dual")`` gives one an
auxiliary flow.
"""


def preset(name: str) -> ModelConfig:
    """The preset ``name``; raises ``ValueError`` with the known names."""
    _require(name in PRESETS, f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]
