"""One layer of a Dual-Flow Transformer for the `transformers` library, and what it is made of.

Shapes: B sequences, S primary positions, A auxiliary positions, F flows, D model, N query heads on
K key-value heads, H head. ``h1`` [B, S, D] is the primary's state, ``h2`` [F, B, A, D] that
of the auxiliary flows, whose position i sits on the primary's position ``at[i]``. A standard model
has F = 0. The mathematics is in ``DualFlowLayer.forward``.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_dualflow import Positions, Rotary, Sight, attention, rotate, wide
from .configuration_dualflow import DualFlowConfig

_ACTIVATIONS = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "gelu": lambda gate, up: F.gelu(up, approximate="tanh"),
    "relu2": lambda gate, up: F.relu(up).square(),
}
_NORMS = {
    "input_layernorm": "pre",
    "attention_output_layernorm": "post",
    "post_attention_layernorm": "pre",
    "mlp_output_layernorm": "post",
}
"""A layer's norms, and the ``norm_placement`` that has each beside ``both``."""


class DualFlowRMSNorm(nn.Module):
    """x / √(mean x² + ε) · gain in at least float32; the gain is the weight, or 1 + weight."""

    def __init__(self, size: int, eps: float, offset: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if offset else torch.ones(size))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        y, weight = x.to(wide(x.dtype)), self.weight.to(wide(self.weight.dtype))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + weight if self.offset else weight)).to(x.dtype)


class LowRank(nn.Module):
    """What a flow adds to a shared matrix: B A x, with B zero at birth."""

    def __init__(self, shared: nn.Linear, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Linear(shared.in_features, rank, bias=False)
        self.lora_B = _linear(rank, shared.out_features, bias=False, starts_at=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.lora_B(self.lora_A(x))


def make_norm(config: DualFlowConfig, size: int) -> nn.Module:
    c = config.config
    if c["norm"] == "layernorm":
        return nn.LayerNorm(size, c["norm_eps"])
    return DualFlowRMSNorm(size, c["norm_eps"], c["norm_offset"])


def _linear(inputs: int, outputs: int, bias: bool, starts_at: float = 1.0) -> nn.Linear:
    """A matrix whose initial values are drawn ``starts_at`` times as wide as others."""
    linear = nn.Linear(inputs, outputs, bias=bias)
    linear.starts_at = starts_at  # type: ignore[assignment]
    return linear


def own_matrix(config: DualFlowConfig, name: str, shared: nn.Linear) -> nn.Module | None:
    """What each flow owns of the matrix ``name``; None: it shares the primary's."""
    aux = config.flows
    if name not in aux["owns"] and not (name.endswith(("gate_proj", "up_proj", "down_proj"))
                                        and "mlp" in aux["owns"]):  # fmt: skip
        return None
    if aux["lora_rank"]:
        return LowRank(shared, aux["lora_rank"])
    start = getattr(shared, "starts_at", 1.0)
    return _linear(shared.in_features, shared.out_features, shared.bias is not None, start)


def own(flows: Iterable[nn.Module], name: str) -> list[Any]:
    """What each flow owns under ``name``; None where it shares the primary's."""
    return [getattr(flow, name) for flow in flows]


def project(
    shared: nn.Module, owned: list[nn.Module | None], x1: Tensor, x2: Tensor
) -> tuple[Tensor, Tensor]:
    """A matrix over the rows of both flows; a flow's LoRA adds to its rows, a flow's own matrix
    replaces the shared one. An ``x2`` without flows (the primary runs alone) stays so.

    Without gradients it is one product, so that decode reads the shared weight once for both. With
    them it is two, so that a frozen primary keeps nothing for a backward pass.
    """
    owned = owned if len(x2) else []
    adds = any(isinstance(module, LowRank) for module in owned)
    if any(owned) and not adds:
        return shared(x1), torch.stack([own(x) for own, x in zip(owned, x2, strict=True)])  # type: ignore[misc]
    if not len(x2):
        y1 = shared(x1)
        y2 = y1.new_empty(*x2.shape[:-1], y1.shape[-1])
    elif torch.is_grad_enabled():
        y1, y2 = shared(x1), shared(x2)
    else:
        rows = shared(torch.cat([x1.flatten(0, -2), x2.flatten(0, -2)]))
        y1 = rows[: x1.shape[:-1].numel()].unflatten(0, x1.shape[:-1])
        y2 = rows[x1.shape[:-1].numel() :].unflatten(0, x2.shape[:-1])
    if adds:
        y2 = y2 + torch.stack([own(x) for own, x in zip(owned, x2, strict=True)])  # type: ignore[misc]
    return y1, y2


def normalise(
    shared: nn.Module | None, owned: list[nn.Module | None], x1: Tensor, x2: Tensor
) -> tuple[Tensor, Tensor]:
    """A norm over both flows, each flow's own where it has one; nothing where there is none."""
    if shared is None:
        return x1, x2
    if len(x2) and any(owned):
        return shared(x1), torch.stack([own(x) for own, x in zip(owned, x2, strict=True)])  # type: ignore[misc]
    return shared(x1), shared(x2)


class DualFlowAttention(nn.Module):
    """The attention matrices, and the QK-norm gains where there are any."""

    def __init__(self, config: DualFlowConfig) -> None:
        super().__init__()
        c, hidden, head = config.config, config.hidden_size, config.head_dim
        query, key = config.num_attention_heads * head, config.num_key_value_heads * head
        self.q_proj = _linear(hidden, query, c["attention_bias"])
        self.k_proj = _linear(hidden, key, c["attention_bias"])
        self.v_proj = _linear(hidden, key, c["attention_bias"])
        residual = (2 * c["num_layers"]) ** -0.5  # what writes to the residual stream (GPT-2)
        self.o_proj = _linear(query, hidden, c["attention_output_bias"], residual)
        span = key if c["qk_norm_span"] == "row" else head
        k_norm = DualFlowRMSNorm(span, c["norm_eps"], c["norm_offset"])
        self.q_norm = _query_norm(config) if c["qk_norm"] else None
        self.k_norm = k_norm if c["qk_norm"] else None


class DualFlowMLP(nn.Module):
    """The MLP matrices; the gate exists for gated kinds."""

    def __init__(self, config: DualFlowConfig) -> None:
        super().__init__()
        hidden, inner, bias = (
            config.hidden_size,
            config.intermediate_size,
            config.config["mlp_bias"],
        )
        self.gate_proj = _linear(hidden, inner, bias) if config.gated else None
        self.up_proj = _linear(hidden, inner, bias)
        self.down_proj = _linear(inner, hidden, bias, (2 * config.num_hidden_layers) ** -0.5)


class DualFlowAuxLayer(nn.Module):
    """One flow's own parameters in one layer; what it does not own is None."""

    def __init__(self, config: DualFlowConfig, matrices: dict[str, nn.Linear | None]) -> None:
        super().__init__()
        c, aux = config.config, config.flows
        sizes = {
            "query": config.num_attention_heads * config.head_dim,
            "intermediate": config.intermediate_size,
            "output": config.hidden_size,
        }
        for name, size in sizes.items():
            vector = nn.Parameter(torch.zeros(size)) if name in aux["couplings"] else None
            self.register_parameter(f"{name}_coupling", vector)
        for name, shared in matrices.items():
            self.add_module(name, shared and own_matrix(config, name, shared))
        separate = aux["flow_norms"] == "separate"
        for name in _NORMS:
            there = separate and _has_norm(config, name)
            self.add_module(name, make_norm(config, config.hidden_size) if there else None)
        self.add_module("q_norm", _query_norm(config) if separate and c["qk_norm"] else None)


class DualFlowLayer(GradientCheckpointingLayer):
    """One layer for both flows."""

    def __init__(self, config: DualFlowConfig, index: int) -> None:
        super().__init__()
        c = config.config
        self.config, self.index, self.window = config, index, config.window_of(index)
        self.scale = c["attention_scale"] or config.head_dim**-0.5
        self.activation = _ACTIVATIONS[c["mlp"]]
        for name in _NORMS:
            there = _has_norm(config, name)
            self.add_module(name, make_norm(config, config.hidden_size) if there else None)
        self.self_attn, self.mlp = DualFlowAttention(config), DualFlowMLP(config)
        matrices = {
            "q_proj": self.self_attn.q_proj, "o_proj": self.self_attn.o_proj,
            "gate_proj": self.mlp.gate_proj, "up_proj": self.mlp.up_proj,
            "down_proj": self.mlp.down_proj,
        }  # fmt: skip
        flows = (DualFlowAuxLayer(config, matrices) for _ in range(config.num_flows))
        self.aux = nn.ModuleList(flows)

    def forward(
        self, h1: Tensor, h2: Tensor, at: Positions, sight: Sight, rotary: Rotary | None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Both flows' states after this layer; the primary's keys and values go into ``cache``."""
        attn, mlp = self.self_attn, self.mlp
        n1, n2 = self._norm("input_layernorm", h1, h2)
        q1, q2 = self._project(attn.q_proj, "q_proj", n1, n2)
        k1, v1 = attn.k_proj(n1), attn.v_proj(n1)
        q2 = self._couple("query_coupling", q2, q1, at)  # q2 + a · q1
        o1, o2 = self._attend(q1, q2, k1, v1, at, sight, rotary, cache)
        o1, o2 = self._project(attn.o_proj, "o_proj", o1, o2)
        o1, o2 = self._norm("attention_output_layernorm", o1, o2)
        h1, h2 = h1 + o1, h2 + o2

        m1, m2 = self._norm("post_attention_layernorm", h1, h2)
        g1 = g2 = None
        if mlp.gate_proj is not None:
            g1, g2 = self._project(mlp.gate_proj, "gate_proj", m1, m2)
        u1, u2 = self._project(mlp.up_proj, "up_proj", m1, m2)
        u1, u2 = self.activation(g1, u1), self.activation(g2, u2)
        u2 = self._couple("intermediate_coupling", u2, u1, at)  # u2 + b · u1
        y1, y2 = self._project(mlp.down_proj, "down_proj", u1, u2)
        y1, y2 = self._norm("mlp_output_layernorm", y1, y2)
        y2 = self._couple("output_coupling", y2, y1, at)  # y2 + c · y1
        return h1 + y1, h2 + y2

    def _attend(
        self, q1: Tensor, q2: Tensor, k1: Tensor, v1: Tensor, at: Positions, sight: Sight,
        rotary: Rotary | None, cache: Cache | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Both flows over the primary's keys, the own position's included."""
        heads = (-1, self.config.head_dim)
        if self.self_attn.k_norm is not None:
            span = (1, -1) if self.config.config["qk_norm_span"] == "row" else heads
            split = (x.unflatten(-1, span) for x in (q1, q2))
            q1, q2 = (x.flatten(-2) for x in self._norm("q_norm", *split))
            k1 = self.self_attn.k_norm(k1.unflatten(-1, span)).flatten(-2)
        q1, q2, k1, v1 = (x.unflatten(-1, heads) for x in (q1, q2, k1, v1))
        if rotary is not None:
            cos, sin = rotary
            q1, k1 = rotate(q1, cos, sin), rotate(k1, cos, sin)
            q2 = rotate(q2, cos[:, at], sin[:, at])
        k, v = k1.transpose(1, 2), v1.transpose(1, 2)
        if cache is not None:
            # Static caches of earlier 5.x have to be told where to write.
            k, v = cache.update(k, v, self.index, {"cache_position": sight.places})
        mask = sight.mask(self.window, k.shape[2])
        fused = self.config._attn_implementation != "eager"
        options = (self.scale, self.config.config["attention_softcap"], fused)
        if len(q2) and q2.shape[2] == q1.shape[1] and not torch.is_grad_enabled():
            both = attention(torch.cat([q1[None], q2]), k, v, mask, *options)
            return both[0], both[1:]
        o1 = attention(q1[None], k, v, mask, *options)[0]
        if not len(q2):
            return o1, o1.new_empty(*q2.shape[:-2], o1.shape[-1])
        return o1, attention(q2, k, v, mask if mask is None else mask[:, :, at], *options)

    def _project(
        self, shared: nn.Module, name: str, x1: Tensor, x2: Tensor
    ) -> tuple[Tensor, Tensor]:
        return project(shared, own(self.aux, name), x1, x2)

    def _norm(self, name: str, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.self_attn.q_norm if name == "q_norm" else getattr(self, name)
        return normalise(shared, own(self.aux, name), x1, x2)

    def _couple(self, name: str, x2: Tensor, x1: Tensor, at: Positions) -> Tensor:
        """Each flow's vector times the primary's value at the same position is added."""
        vectors = own(self.aux, name)
        if not len(x2) or vectors[0] is None:
            return x2
        return x2 + torch.stack(vectors).to(x2.dtype)[:, None, None] * x1[:, at]


def _has_norm(config: DualFlowConfig, name: str) -> bool:
    return config.config["norm_placement"] in (_NORMS[name], "both")


def _query_norm(config: DualFlowConfig) -> DualFlowRMSNorm:
    c, row = config.config, config.config["qk_norm_span"] == "row"
    size = config.head_dim * (config.num_attention_heads if row else 1)
    return DualFlowRMSNorm(size, c["norm_eps"], c["norm_offset"])
