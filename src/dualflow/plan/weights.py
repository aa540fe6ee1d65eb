"""Bytes of a model's weights by number format, without building the model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from dualflow.spec import (
    WEIGHT_GROUP,
    AuxConfig,
    FloatFormat,
    ModelConfig,
    QuantisedFormat,
    parameter_counts,
)

WeightFormat = Literal["float64", "float32", "bfloat16", "float16", "int8", "int4"]

FLOAT_BYTES: dict[FloatFormat, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

_GROUP_BYTES: dict[QuantisedFormat, int] = {"int8": 2, "int4": 4}
"""A float16 scale; for int4 also a float16 minimum."""


@dataclass(frozen=True)
class WeightBytes:
    """Bytes by owner; a shared matrix counts for the primary, a tied head once."""

    primary: int
    aux: int

    @property
    def total(self) -> int:
        """Both flows together."""
        return self.primary + self.aux


def weight_bytes(
    config: ModelConfig, weights: WeightFormat, others: FloatFormat | None = None
) -> WeightBytes:
    """Bytes of all tensors, in memory as in a checkpoint (where a few headers come on top).

    weights:  how the matrices are held (``model.quantise`` says which are quantised).
    others:   how norms, biases, couplings and LoRA are held; None: as the matrices, or in float32
              beside quantised ones.
    """
    if weights not in get_args(WeightFormat):
        known = ", ".join(get_args(WeightFormat))
        raise ValueError(f"weights are {weights!r}; expected one of {known}")
    if others is None:
        others = "float32" if weights in ("int8", "int4") else weights
    counts = parameter_counts(config)

    def owner(shapes: list[tuple[int, int]], parameters: int) -> int:
        quantisable = sum(outputs * inputs for outputs, inputs in shapes)
        matrices = sum(matrix_bytes(outputs, inputs, weights) for outputs, inputs in shapes)
        return matrices + (parameters - quantisable) * FLOAT_BYTES[others]

    biases = 0  # of routers: float32 whatever the rest is, and learned without a gradient
    if config.moe and config.moe.selection_bias:
        mixtures = sum(config.has_experts(layer) for layer in range(config.num_layers))
        biases = mixtures * config.moe.num_experts * FLOAT_BYTES["float32"]
    return WeightBytes(
        owner(list(_primary_matrices(config)), counts.primary) + biases,
        owner(list(_aux_matrices(config)), counts.aux),
    )


def matrix_bytes(outputs: int, inputs: int, weights: WeightFormat) -> int:
    """Bytes of one matrix, its scales included."""
    if weights in ("int8", "int4"):
        row = inputs if weights == "int8" else -(-inputs // 2)
        return outputs * (row + -(-inputs // WEIGHT_GROUP) * _GROUP_BYTES[weights])
    return outputs * inputs * FLOAT_BYTES[weights]


def _primary_matrices(c: ModelConfig) -> Iterator[tuple[int, int]]:
    """[outputs, inputs] of every embedding and linear of the primary."""
    query, key = c.num_heads * c.head_size, c.kv_heads * c.head_size
    yield c.vocab_size, c.hidden_size
    if not c.tie_embeddings:
        yield c.vocab_size, c.hidden_size
    if c.position == "learned":
        yield c.max_position, c.hidden_size
    for _ in range(c.num_layers):
        yield query + 2 * key, c.hidden_size
        yield c.hidden_size, query
        yield from _mlp(c)


def _mlp(c: ModelConfig) -> Iterator[tuple[int, int]]:
    yield (2 if c.gated else 1) * c.intermediate_size, c.hidden_size
    yield c.hidden_size, c.intermediate_size


def _aux_matrices(c: ModelConfig) -> Iterator[tuple[int, int]]:
    """Those of all auxiliary flows, or of the second softmax."""
    if c.variant == "two_softmax":
        yield c.hidden_size, c.hidden_size
    if c.flows is not None:
        for _ in range(c.flows.num_flows):
            yield from _flow_matrices(c, c.flows)


def _flow_matrices(c: ModelConfig, aux: AuxConfig) -> Iterator[tuple[int, int]]:
    """Whole matrices of one flow; LoRA's are not quantised and are none of them."""
    query = c.num_heads * c.head_size
    if aux.embedding == "own":
        yield c.vocab_size, c.hidden_size
    if aux.lora_rank:
        return
    if "lm_head" in aux.owns:
        yield c.vocab_size, c.hidden_size
    for _ in range(c.num_layers):
        if "q_proj" in aux.owns:
            yield query, c.hidden_size
        if "o_proj" in aux.owns:
            yield c.hidden_size, query
        if "mlp" in aux.owns:
            yield from _mlp(c)
