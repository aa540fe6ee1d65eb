"""FLOPs and KV bytes per token by formula, for every variant, without building the model.

Conventions, the same for every variant:

- A multiply-add is 2 FLOPs. Only matrix products and attention are counted: norms, activations,
  rotary positions, coupling vectors, the embedding look-up and the softmax are left out, as they
  are in every usual count.
- **Prefill** is the primary alone over a prompt of ``context`` tokens: causal attention counted
  half, and one head row (the last position's) spread over the tokens. What the last prompt position
  runs beside the primary (an auxiliary row, a PHD-2 copy, a second softmax) belongs to the first
  generated token and is counted with decoding. So the prefill cost of a variant is, by construction
  of the architecture, the cost of its standard twin.
- **Decode** is one token whose rows attend ``context`` keys, its own position included.
- **Training** is the forward of every row of both flows, with the head rows that the loss needs, at
  sequences of ``context`` tokens, causal attention counted half; the backward is twice the forward.
  Recomputation (activation checkpointing, the chunked loss) trades time for memory and is not
  counted.

Formulas: one layer costs 2(D·NH + 2·D·KH + NH·D + 3·D·F) for a primary row, the same less 2·2·D·KH
(no key, no value) for an auxiliary row, and 4·NH·keys for attention; the head costs 2·D·V. Ungated
MLPs have 2·D·F for 3·D·F. Letters as in docs/shapes.md.
"""

import dataclasses
from dataclasses import dataclass

from dualflow.spec import AuxConfig, ModelConfig, Owned

BACKWARD_PER_FORWARD = 2
"""The backward of a matrix product is two products of its size: for its input and for its weight.
"""


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


def prefill_flops_per_token(config: ModelConfig, context: int) -> float:
    """FLOPs per prompt token of a prompt of ``context`` tokens; see the module's conventions."""
    return prefill_flops(config, context).total


def decode_flops_per_token(config: ModelConfig, context: int, aux: bool = True) -> float:
    """FLOPs of one generated token that attends ``context`` keys; ``aux=False``: with the auxiliary
    switched off.

    Raises ``ValueError`` where the auxiliary cannot be switched off.
    """
    return decode_flops(config, context, aux).total


def train_flops_per_token(config: ModelConfig, context: int) -> float:
    """FLOPs per training token, forward and backward, at sequences of ``context`` tokens."""
    return train_flops(config, context).total


def kv_bytes_per_token(config: ModelConfig, bytes_per_element: int = 4) -> int:
    """Bytes a cached token takes over all layers: keys and values of the primary alone, whatever
    the variant.
    """
    if bytes_per_element < 1:
        raise ValueError(f"bytes_per_element is {bytes_per_element}; expected at least 1")
    return config.num_layers * 2 * config.kv_heads * config.head_size * bytes_per_element


def prefill_flops(config: ModelConfig, context: int) -> FlowFlops:
    """``prefill_flops_per_token`` by flow and place."""
    _require_context(context)
    return FlowFlops(primary=_layers(config, context / 2) + _head(config) * (1 / context))


def decode_flops(config: ModelConfig, context: int, aux: bool = True) -> FlowFlops:
    """``decode_flops_per_token`` by flow and place."""
    _require_context(context)
    if not aux and (config.variant == "phd2" or config.readout.kind == "aux_only"):
        what = "variant 'phd2'" if config.variant == "phd2" else "readout 'aux_only'"
        raise ValueError(
            f"the auxiliary cannot be switched off: {what} reads no distribution from the primary; "
            "count with aux=True"
        )
    reads_aux = aux and _reads_aux(config)
    primary = _layers(config, context)
    if not reads_aux or _mixes(config):
        primary += _head(config)
    return FlowFlops(primary=primary, aux=_aux(config, context) if reads_aux else FlopBreakdown())


def train_flops(config: ModelConfig, context: int) -> FlowFlops:
    """``train_flops_per_token`` by flow and place."""
    _require_context(context)
    reads_aux = _reads_aux(config)
    primary = _layers(config, context / 2)
    if not reads_aux or _mixes(config) or config.readout.primary_loss_weight > 0:
        primary += _head(config)
    aux = _aux(config, context / 2) if reads_aux else FlopBreakdown()
    passes = 1 + BACKWARD_PER_FORWARD
    return FlowFlops(primary=primary * passes, aux=aux * passes)


def _require_context(context: int) -> None:
    if context < 1:
        raise ValueError(f"context is {context} tokens; expected at least 1")


def _reads_aux(config: ModelConfig) -> bool:
    """Whether anything beside the primary has a say in r."""
    return config.variant != "standard" and config.readout.kind != "primary_only"


def _mixes(config: ModelConfig) -> bool:
    """Whether r is made of p and q, so that both need a head row."""
    return config.variant in ("dual", "two_softmax") and config.readout.kind == "mixture"


def _product(rows: int, columns: int) -> int:
    """One row times a [rows, columns] matrix."""
    return 2 * rows * columns


def _layers(config: ModelConfig, keys: float, writes_kv: bool = True) -> FlopBreakdown:
    """All layers for one row that attends ``keys`` keys; an auxiliary row writes no key and no
    value.
    """
    width = config.hidden_size
    query, key = config.num_heads * config.head_size, config.kv_heads * config.head_size
    per_layer = FlopBreakdown(
        qkv=_product(width, query) + (2 * _product(width, key) if writes_kv else 0),
        o=_product(query, width),
        attention=2 * 2 * query * keys,
        mlp=(3 if config.gated else 2) * _product(width, config.intermediate_size),
    )
    return per_layer * config.num_layers


def _head(config: ModelConfig) -> FlopBreakdown:
    """One head row; padding rows of the vocabulary are multiplied like the others."""
    return FlopBreakdown(head=_product(config.hidden_size, config.vocab_size))


def _aux(config: ModelConfig, keys: float) -> FlopBreakdown:
    """What one position runs beside the primary, its head rows included."""
    if config.variant == "two_softmax":
        second_state = FlopBreakdown(head=_product(config.hidden_size, config.hidden_size))
        return second_state + _head(config)
    if config.variant == "phd2":
        # A copy attends the originals up to its position and, beyond them, itself.
        return _layers(config, keys + 1) + _head(config)
    assert config.flows is not None
    flow = _layers(config, keys, writes_kv=False) + _head(config) + _lora(config, config.flows)
    return flow * config.flows.num_flows


def _lora(config: ModelConfig, flows: AuxConfig) -> FlopBreakdown:
    """What the adapters of one flow add; a whole owned matrix costs what the shared one would and
    adds nothing.
    """
    width, query = config.hidden_size, config.num_heads * config.head_size

    def adapter(owned: Owned, inputs: int, outputs: int, matrices: int = 1) -> int:
        return matrices * _product(flows.lora_rank, inputs + outputs) if owned in flows.owns else 0

    per_layer = FlopBreakdown(
        qkv=adapter("q_proj", width, query),
        o=adapter("o_proj", query, width),
        mlp=adapter("mlp", width, config.intermediate_size, matrices=3 if config.gated else 2),
    )
    return dataclasses.replace(
        per_layer * config.num_layers, head=adapter("lm_head", width, config.vocab_size)
    )
