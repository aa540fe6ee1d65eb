"""FLOPs by the place and the flow they are spent in, and of the two operations that are counted."""

from dataclasses import dataclass

from dualflow.spec import ModelConfig


@dataclass(frozen=True, kw_only=True)
class FlopBreakdown:
    """FLOPs per token by the place they are spent.

    qkv:        query, key and value projections.
    o:          attention's output projection.
    attention:  scores and weighted values.
    mlp:        the MLP's two or three matrices.
    head:       the output matrix; for two_softmax also the D × D product that makes the second
                state.
    """

    qkv: float = 0.0
    o: float = 0.0
    attention: float = 0.0
    mlp: float = 0.0
    head: float = 0.0

    @property
    def total(self) -> float:
        """The sum over all places."""
        return self.qkv + self.o + self.attention + self.mlp + self.head

    def __add__(self, other: "FlopBreakdown") -> "FlopBreakdown":
        return FlopBreakdown(
            qkv=self.qkv + other.qkv,
            o=self.o + other.o,
            attention=self.attention + other.attention,
            mlp=self.mlp + other.mlp,
            head=self.head + other.head,
        )

    def __mul__(self, factor: float) -> "FlopBreakdown":
        return FlopBreakdown(
            qkv=self.qkv * factor,
            o=self.o * factor,
            attention=self.attention * factor,
            mlp=self.mlp * factor,
            head=self.head * factor,
        )


@dataclass(frozen=True, kw_only=True)
class FlowFlops:
    """FLOPs per token by flow.

    primary: what the standard twin would spend, less the head row that the readout does not need.
    aux:     everything beside it: all auxiliary flows, PHD-2's copy, or the second softmax.
    """

    primary: FlopBreakdown
    aux: FlopBreakdown = FlopBreakdown()

    @property
    def total(self) -> float:
        """Both flows together."""
        return self.primary.total + self.aux.total


def product(inputs: int, outputs: int) -> int:
    """One row times an [inputs, outputs] matrix."""
    return 2 * inputs * outputs


def attention_of(config: ModelConfig, keys: float) -> float:
    """One row of all heads over ``keys`` keys: scores and weighted values."""
    return 2 * 2 * config.num_heads * config.head_size * keys


def mlp_of(config: ModelConfig, layer: int, experts: int) -> float:
    """One row's MLP in a layer; where that has experts, the router, the shared expert and its gate,
    and ``experts`` routed ones.
    """
    width, matrices = config.hidden_size, 3 if config.gated else 2
    total = matrices * product(width, config.coupled_size(layer))
    if config.moe is not None and config.has_experts(layer):
        total += experts * matrices * product(width, config.moe.expert_size)
        total += product(width, config.moe.num_experts + config.moe.shared_gate)
    return total
