"""Learned scalars of a model by formula, without building it."""

from collections.abc import Iterator
from dataclasses import dataclass

from dualflow.spec.flows import AuxConfig
from dualflow.spec.model import ModelConfig


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
    learned = 3 if c.readout.kind == "learned" else 0
    return ParameterCounts(primary, c.flows.num_flows * _flow_parameters(c, c.flows) + learned)


def _primary_shapes(c: ModelConfig) -> Iterator[tuple[int, int]]:
    norm = 2 if c.norm == "layernorm" else 1
    query, key = c.num_heads * c.head_size, c.kv_heads * c.head_size
    yield c.vocab_size, c.hidden_size
    if not c.tie_embeddings:
        yield c.vocab_size, c.hidden_size
    if c.position == "learned":
        yield c.max_position, c.hidden_size
    yield norm, c.hidden_size
    for layer in range(c.num_layers):
        yield norms_per_layer(c) * norm, c.hidden_size
        yield query + 2 * key, c.hidden_size + c.attention_bias
        yield c.hidden_size, query + c.attention_output_bias
        yield from _mlp_shapes(c, layer)
        if c.qk_norm:
            yield 1, query_norm_size(c)
            yield 1, key if c.qk_norm_span == "row" else c.head_size


def norms_per_layer(c: ModelConfig) -> int:
    """Norms of one layer beside QK-norm."""
    return 4 if c.norm_placement == "both" else 2


def query_norm_size(c: ModelConfig) -> int:
    """Features that QK-norm normalises at once in a query."""
    return c.num_heads * c.head_size if c.qk_norm_span == "row" else c.head_size


def _mlp_shapes(c: ModelConfig, layer: int) -> Iterator[tuple[int, int]]:
    matrices, inner = 2 if c.gated else 1, c.coupled_size(layer)
    yield matrices * inner, c.hidden_size + c.mlp_bias
    if inner:
        yield c.hidden_size, inner + c.mlp_bias
    if c.moe and c.has_experts(layer):
        yield c.moe.num_experts, c.hidden_size
        yield c.moe.shared_gate, c.hidden_size
        yield (matrices + 1) * c.moe.num_experts * c.moe.expert_size, c.hidden_size


def _flow_parameters(c: ModelConfig, aux: AuxConfig) -> int:
    query = c.num_heads * c.head_size
    norm = c.hidden_size * (2 if c.norm == "layernorm" else 1)
    per_coupling = {"query": query, "output": c.hidden_size}
    layer = sum(per_coupling.get(name, 0) for name in aux.couplings)
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
    for index in range(c.num_layers):
        total += ("intermediate" in aux.couplings) * c.coupled_size(index)
        if c.moe and c.has_experts(index) and aux.expert_couplings:
            total += c.moe.num_experts * c.moe.expert_size
    if aux.embedding == "own":
        total += c.vocab_size * c.hidden_size
    if "lm_head" in aux.owns:
        total += size(c.vocab_size, c.hidden_size, False)
    if aux.flow_norms == "separate":
        layer_norms = norms_per_layer(c) * norm + c.qk_norm * query_norm_size(c)
        total += norm + c.num_layers * layer_norms
    return total
