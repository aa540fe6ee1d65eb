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
- **Training with a frozen primary** is the primary's forward alone, and for the auxiliary its
  forward, the gradients that pass through its products, and gradients of the weights it owns. A
  product whose input has nothing trained before it passes no gradient on. Attention's backward is
  for the queries alone, as large as its forward; fused kernels may compute those of the frozen keys
  and values too.
- **Sliding layers** attend at most their window: min(window, context) keys in decoding, over a
  whole sequence window − window²/2·context on average (context/2 where the window is wider).

Formulas: one layer costs 2(D·NH + 2·D·KH + NH·D + 3·D·F) for a primary row, the same less 2·2·D·KH
(no key, no value) for an auxiliary row, and 4·NH·keys for attention; the head costs 2·D·V. Ungated
MLPs have 2·D·F for 3·D·F. A mixture of experts has F of the shared expert, k times the size of a
routed one, and the router's E rows. Letters as in docs/shapes.md.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

from dualflow.plan.flops import FlopBreakdown, FlowFlops, attention_of, mlp_of, product
from dualflow.plan.frozen import frozen_aux
from dualflow.spec import AuxConfig, ModelConfig, Owned, parameter_counts

Trainable = Literal["all", "aux"]
"""Which tensors training changes: every one, or the auxiliary's alone."""

Keys = Callable[[int | None], float]
"""Keys that a row attends in a layer of this window (None: of every key up to its own)."""

BACKWARD_PER_FORWARD = 2
"""The backward of a matrix product is two products of its size: for its input and for its weight.
"""


def prefill_flops_per_token(config: ModelConfig, context: int) -> float:
    """FLOPs per prompt token of a prompt of ``context`` tokens; see the module's conventions."""
    return prefill_flops(config, context).total


def decode_flops_per_token(config: ModelConfig, context: int, aux: bool = True) -> float:
    """FLOPs of one generated token that attends ``context`` keys; ``aux=False``: with the auxiliary
    switched off.

    Raises ``ValueError`` where the auxiliary cannot be switched off.
    """
    return decode_flops(config, context, aux).total


def train_flops_per_token(config: ModelConfig, context: int, trainable: Trainable = "all") -> float:
    """FLOPs per training token, forward and backward, at sequences of ``context`` tokens;
    ``trainable="aux"``: with the primary frozen.
    """
    return train_flops(config, context, trainable).total


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
    return FlowFlops(primary=_layers(config, _mean_keys(context)) + _head(config) * (1 / context))


def decode_flops(config: ModelConfig, context: int, aux: bool = True) -> FlowFlops:
    """``decode_flops_per_token`` by flow and place."""
    _require_context(context)
    if not aux and not config.has_primary_readout:
        what = "variant 'phd2'" if config.variant == "phd2" else "readout 'aux_only'"
        raise ValueError(
            f"the auxiliary cannot be switched off: {what} reads no distribution from the primary; "
            "count with aux=True"
        )
    keys, reads_aux = _last_keys(context), aux and _reads_aux(config)
    primary = _layers(config, keys)
    if not reads_aux or _mixes(config):
        primary += _head(config)
    return FlowFlops(primary=primary, aux=_aux(config, keys) if reads_aux else FlopBreakdown())


def train_flops(config: ModelConfig, context: int, trainable: Trainable = "all") -> FlowFlops:
    """``train_flops_per_token`` by flow and place.

    Raises ``ValueError`` where ``trainable`` is ``aux`` and training has none to change.
    """
    _require_context(context)
    keys, reads_aux = _mean_keys(context), _reads_aux(config)
    primary = _layers(config, keys)
    if not reads_aux or _mixes(config) or config.readout.primary_loss_weight > 0:
        primary += _head(config)
    if trainable == "aux":
        if not reads_aux or not parameter_counts(config).aux:
            raise ValueError(
                f"this {config.variant} model (readout {config.readout.kind!r}) has no auxiliary "
                "tensors to train beside a frozen primary; count with trainable='all'"
            )
        return FlowFlops(primary=primary, aux=frozen_aux(config, keys))
    aux = _aux(config, keys) if reads_aux else FlopBreakdown()
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
    mixes = config.readout.kind in ("mixture", "learned")
    return config.variant in ("dual", "two_softmax") and mixes


def _last_keys(context: int) -> Keys:
    """Keys of the last of ``context`` positions, itself included."""
    return lambda window: context if window is None else min(window, context)


def _mean_keys(context: int) -> Keys:
    """Keys of a position, the mean over a sequence of ``context``."""

    def keys(window: int | None) -> float:
        if window is None or window >= context:
            return context / 2
        return window - window * window / (2 * context)

    return keys


def _layers(
    config: ModelConfig, keys: Keys, is_aux: bool = False, own_keys: int = 0
) -> FlopBreakdown:
    """All layers for one row that attends ``keys`` of each layer's window, and ``own_keys`` beside
    them; an auxiliary row writes no key and no value, and has a fan-out of its own.
    """
    writes_kv, experts = not is_aux, config.aux_experts_per_token
    if not is_aux:
        experts = config.moe.experts_per_token if config.moe else 0
    width = config.hidden_size
    query, key = config.num_heads * config.head_size, config.kv_heads * config.head_size
    per_layer = FlopBreakdown(
        qkv=product(width, query) + (2 * product(width, key) if writes_kv else 0),
        o=product(query, width),
    )
    layers = range(config.num_layers)
    attended = sum(keys(config.window_of(n)) + own_keys for n in layers)
    return dataclasses.replace(
        per_layer * config.num_layers,
        attention=attention_of(config, attended),
        mlp=sum(mlp_of(config, n, experts) for n in layers),
    )


def _head(config: ModelConfig) -> FlopBreakdown:
    """One head row; padding rows of the vocabulary are multiplied like the others."""
    return FlopBreakdown(head=product(config.hidden_size, config.vocab_size))


def _aux(config: ModelConfig, keys: Keys) -> FlopBreakdown:
    """What one position runs beside the primary, its head rows included."""
    if config.variant == "two_softmax":
        second_state = FlopBreakdown(head=product(config.hidden_size, config.hidden_size))
        return second_state + _head(config)
    if config.variant == "phd2":
        # A copy attends the originals up to its position and, beyond them, itself.
        return _layers(config, keys, own_keys=1) + _head(config)
    assert config.flows is not None
    flow = _layers(config, keys, is_aux=True) + _head(config) + _lora(config, config.flows)
    return flow * config.flows.num_flows


def _lora(config: ModelConfig, flows: AuxConfig) -> FlopBreakdown:
    """What the adapters of one flow add; a whole owned matrix costs what the shared one would and
    adds nothing.
    """
    width, query = config.hidden_size, config.num_heads * config.head_size

    def adapter(owned: Owned, inputs: int, outputs: int, matrices: int = 1) -> int:
        return matrices * product(flows.lora_rank, inputs + outputs) if owned in flows.owns else 0

    per_layer = FlopBreakdown(
        qkv=adapter("q_proj", width, query),
        o=adapter("o_proj", query, width),
        mlp=adapter("mlp", width, config.intermediate_size, matrices=3 if config.gated else 2),
    )
    return dataclasses.replace(
        per_layer * config.num_layers, head=adapter("lm_head", width, config.vocab_size)
    )
