"""One transformer layer for both flows: the paper's mathematics, in the order of docs/dual_flow.md.

primary                                    auxiliary, same matrices
q1 = Wq n1, k1 = Wk n1, v1 = Wv n1         q2 = Wq n2 + a * q1
write k1, v1                               (writes nothing)
h1 += Wo attend(q1)                        h2 += Wo attend(q2)         both over the primary's keys
u1 = act(Wg m1) * (Wu m1)                  u2 = act(Wg m2) * (Wu m2) + b * u1
y1 = Wd u1;  h1 += y1                      y2 = Wd u2 + c * y1;  h2 += y2

n and m are the normed states. Where a family norms what attention and MLP give, Wo and Wd above
include that norm. The keys of a position's own token are there before either flow attends.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualflow.model.couplings import couple, per_flow, project
from dualflow.model.flows import LAYER_NORMS, AuxLayer, norm_of, owned, query_norm
from dualflow.model.kv import KVWriter
from dualflow.model.moe import LayerRouting, MoE
from dualflow.model.rows import Kept, Rows
from dualflow.ops.activation import mlp_intermediate
from dualflow.ops.attention import Scope
from dualflow.ops.norm import RMSNorm
from dualflow.ops.rope import rotate
from dualflow.spec import ModelConfig

RotaryTable = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """The attention matrices under their Hugging Face names, and the QK-norm gains where there
    are any.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        query, key = config.num_heads * config.head_size, config.kv_heads * config.head_size
        self.q_proj = nn.Linear(config.hidden_size, query, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=config.attention_bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.attention_output_bias)
        span = key if config.qk_norm_span == "row" else config.head_size
        self.q_norm = query_norm(config) if config.qk_norm else None
        self.k_norm = RMSNorm(span, config.norm_eps, config.norm_offset) if config.qk_norm else None


class MLP(nn.Module):
    """The MLP matrices under their Hugging Face names; the gate exists for gated kinds."""

    def __init__(self, config: ModelConfig, inner: int) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias) if config.gated else None
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)


class LayerOutput(NamedTuple):
    """The new state [R, D], the primary's intermediates (q1, u1, y1), each [T, ...], and what the
    router did where the layer has experts.
    """

    state_RD: Tensor
    kept: Kept
    routing: LayerRouting | None


class Layer(nn.Module):
    """Layer ``index`` of the model. ``forward`` takes and returns [R, D]; R counts the rows of both
    flows (``model.rows``).
    """

    def __init__(self, config: ModelConfig, index: int, *, own_key_value: bool = False) -> None:
        super().__init__()
        self.head_dim, self.mlp_kind = config.head_size, config.mlp
        self.norms_rows = config.qk_norm_span == "row"
        self.scope = Scope(config.window_of(index), config.attention_softcap)
        # Attention itself multiplies scores by 1/√H.
        scale = config.attention_scale
        self.query_scale = None if scale is None else scale * config.head_size**0.5
        self.own_key_value = own_key_value
        self.self_attn = Attention(config)
        # Of a layer with experts this is the shared one, where there is one.
        inner = config.coupled_size(index)
        self.mlp = MLP(config, inner) if inner else None
        self.moe = MoE(config) if config.has_experts(index) else None
        for name, place in LAYER_NORMS.items():
            there = config.norm_placement in (place, "both")
            self.add_module(name, norm_of(config, config.hidden_size) if there else None)
        self.aux = nn.ModuleList()
        if config.flows:
            names = {"q_proj": self.self_attn.q_proj, "o_proj": self.self_attn.o_proj}
            if self.mlp is not None:
                children = self.mlp.named_children()
                names |= {name: m for name, m in children if isinstance(m, nn.Linear)}
            self.aux.extend(
                AuxLayer(config, config.flows, index, names) for _ in range(config.num_flows)
            )

    def forward(
        self,
        h_RD: Tensor,
        rows: Rows,
        kv: KVWriter,
        rotary: RotaryTable | None,
        kept: Kept | None = None,
    ) -> LayerOutput:
        """One layer over all rows."""
        own, attention = partial(owned, self.aux), self.self_attn

        n_RD = self._norm("input_layernorm", h_RD, rows)
        q_RX = project(n_RD, rows, attention.q_proj, own("q_proj"))
        q1_TX = rows.primary(q_RX)
        q_RX = couple(q_RX, rows, own("query_coupling"), kept and kept.query)
        o_RX = self._attend(q_RX, n_RD, rows, kv, rotary)
        o_RD = project(o_RX, rows, attention.o_proj, own("o_proj"))
        h_RD = h_RD + self._norm("attention_output_layernorm", o_RD, rows)

        m_RD = self._norm("post_attention_layernorm", h_RD, rows)
        y_RD, u1_TF = self._mlp(m_RD, rows, kept)
        chosen = None
        if self.moe is not None:
            chosen = self.moe(m_RD, rows, own("expert_coupling"), kept)
            y_RD = chosen.output_RD + self.moe.gated(m_RD, y_RD)
        y_RD = self._norm("mlp_output_layernorm", y_RD, rows)
        y1_TD = rows.primary(y_RD)
        y_RD = couple(y_RD, rows, own("output_coupling"), kept and kept.output)
        made = Kept(q1_TX, u1_TF, y1_TD)
        if chosen is None:
            return LayerOutput(h_RD + y_RD, made, None)
        made = made._replace(
            experts=chosen.routing.primary.experts_XK, expert_intermediate=chosen.intermediate_TKF
        )
        return LayerOutput(h_RD + y_RD, made, chosen.routing)

    def _mlp(self, m_RD: Tensor, rows: Rows, kept: Kept | None) -> tuple[Tensor, Tensor]:
        """The MLP, or the shared expert, over all rows; and the primary's intermediate. Zero where
        there is neither.
        """
        mlp, own = self.mlp, partial(owned, self.aux)
        if mlp is None:
            return torch.zeros_like(m_RD), m_RD.new_empty(rows.num_primary, 0)
        g_RF = mlp.gate_proj and project(m_RD, rows, mlp.gate_proj, own("gate_proj"))
        u_RF = project(m_RD, rows, mlp.up_proj, own("up_proj"))
        u_RF = mlp_intermediate(self.mlp_kind, g_RF, u_RF)
        u1_TF = rows.primary(u_RF)
        u_RF = couple(u_RF, rows, own("intermediate_coupling"), kept and kept.intermediate)
        return project(u_RF, rows, mlp.down_proj, own("down_proj")), u1_TF

    def _norm(self, name: str, x_RC: Tensor, rows: Rows) -> Tensor:
        """The norm ``name``, or each flow's own; nothing where the family has none there."""
        norm = getattr(self, name)
        return x_RC if norm is None else per_flow(x_RC, rows, norm, owned(self.aux, name))

    def _attend(
        self, q_RX: Tensor, n_RD: Tensor, rows: Rows, kv: KVWriter, rotary: RotaryTable | None
    ) -> Tensor:
        attention = self.self_attn
        q_norm = attention.q_norm and partial(
            per_flow, rows=rows, shared=attention.q_norm, owned=owned(self.aux, "q_norm")
        )
        q_RNH = self._heads(q_RX, q_norm)
        writing_RD = n_RD if self.own_key_value else rows.primary(n_RD)
        k_WKH = self._heads(attention.k_proj(writing_RD), attention.k_norm)
        v_WKH = self._heads(attention.v_proj(writing_RD), None)
        if rotary is not None:
            cos, sin = rotary
            q_RNH = rotate(q_RNH, rotary)
            k_WKH = rotate(k_WKH, (cos[: len(k_WKH)], sin[: len(k_WKH)]))
        if self.query_scale is not None:
            q_RNH = q_RNH * self.query_scale
        own = None
        if self.own_key_value and rows.num_flows:
            own = k_WKH[rows.num_primary :], v_WKH[rows.num_primary :]
        reader = kv.append(rows.primary(k_WKH), rows.primary(v_WKH))
        return reader.attend(q_RNH, rows, own, self.scope).flatten(-2)

    def _heads(self, x_RX: Tensor, norm: Callable[[Tensor], Tensor] | None) -> Tensor:
        """[R, heads, H], normed before or after the heads are split."""
        if norm is not None and self.norms_rows:
            x_RX = norm(x_RX)
        x_RNH = x_RX.unflatten(-1, (-1, self.head_dim))
        return x_RNH if norm is None or self.norms_rows else norm(x_RNH)
