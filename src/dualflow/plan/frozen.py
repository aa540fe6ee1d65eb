"""FLOPs of an auxiliary that is trained beside a frozen primary: forward and backward together.

Each product is done forward; once more for the gradient of its input, where something that is
trained lies before it; and once more for its weight, where the auxiliary owns that.
"""

from collections.abc import Callable

from dualflow.plan.flops import FlopBreakdown, attention_of, product
from dualflow.spec import AuxConfig, ModelConfig, MoEConfig, Owned


def frozen_aux(config: ModelConfig, keys: Callable[[int | None], float]) -> FlopBreakdown:
    """All auxiliary rows of one position, whose attention in a layer of window w is over
    ``keys(w)`` keys; of variants dual and two_softmax.
    """
    width, vocabulary = config.hidden_size, config.vocab_size
    if config.variant == "two_softmax":
        # The second state's input is frozen; the head passes the gradient on to its matrix.
        second = 2 * product(width, width)
        return FlopBreakdown(head=second + 2 * product(width, vocabulary))
    assert config.flows is not None
    flow, total = _Flow(config, config.flows), FlopBreakdown()
    for layer in range(config.num_layers):
        total += flow.layer(layer, keys(config.window_of(layer)))
    head = flow.matrix("lm_head", width, vocabulary, flow.trained or flow.owns_norms)
    return (total + FlopBreakdown(head=head)) * config.flows.num_flows


class _Flow:
    """One flow on its way up through the layers.

    trained:    whether the residual stream depends on anything that is trained.
    owns_norms: whether the flow's own norms are.
    """

    def __init__(self, config: ModelConfig, aux: AuxConfig) -> None:
        self._config, self._aux = config, aux
        self.trained = aux.embedding == "own"
        self.owns_norms = aux.flow_norms == "separate"

    def layer(self, index: int, keys: float) -> FlopBreakdown:
        """The next layer."""
        c, aux = self._config, self._aux
        width, query, inner = c.hidden_size, c.num_heads * c.head_size, c.coupled_size(index)
        norms_before = self.owns_norms and c.norm_placement != "post"
        norms_after = self.owns_norms and c.norm_placement != "pre"

        normed = self.trained or norms_before
        qkv = self.matrix("q_proj", width, query, normed)
        asks = normed or "q_proj" in aux.owns or "query" in aux.couplings
        asks = asks or (self.owns_norms and c.qk_norm)
        # Its backward is for the queries alone: half of that for queries, keys and values.
        attention = attention_of(c, keys) * (1 + asks)
        o = self.matrix("o_proj", query, width, asks)
        self.trained = self.trained or asks or "o_proj" in aux.owns or norms_after

        normed = self.trained or norms_before
        mlp = self.matrix("mlp", width, inner, normed) * (2 if c.gated else 1)
        inside = normed or "mlp" in aux.owns or ("intermediate" in aux.couplings and inner > 0)
        mlp += self.matrix("mlp", inner, width, inside)
        if c.moe is not None and c.has_experts(index):
            mlp += self._experts(c.moe, normed)
            inside = inside or (normed or aux.expert_couplings)
        self.trained = self.trained or inside or "output" in aux.couplings or norms_after
        return FlopBreakdown(qkv=qkv, o=o, attention=attention, mlp=mlp)

    def _experts(self, moe: MoEConfig, normed: bool) -> float:
        """The router, the shared expert's gate and the routed experts, none of which a flow owns.
        Under replay of experts without a gradient of their own the weights still get one.
        """
        c, aux = self._config, self._aux
        width, inner, k = c.hidden_size, moe.expert_size, c.aux_experts_per_token
        inside = normed or aux.expert_couplings
        routed = product(width, inner) * (2 if c.gated else 1) * (1 + normed)
        routed += product(inner, width) * (1 + inside)
        return k * routed + product(width, moe.num_experts + moe.shared_gate) * (1 + normed)

    def matrix(self, name: Owned, inputs: int, outputs: int, trained: bool) -> float:
        """A row times one matrix, behind something that is ``trained`` or not."""
        whole = product(inputs, outputs)
        if name not in self._aux.owns:
            return whole * (1 + trained)
        rank = self._aux.lora_rank
        if not rank:
            return whole * (2 + trained)
        adapter = product(inputs, rank) * (2 + trained) + product(rank, outputs) * 3
        return whole * (1 + trained) + adapter
