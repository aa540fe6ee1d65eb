"""A mixture of experts as plain data: how many, how large, and how the router chooses."""

from dataclasses import dataclass
from typing import Literal

from dualflow.spec.checks import require


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The experts of a layer. Routers of known families are settings of these switches.

    experts_per_token: routed experts that a primary row goes through, in prefill and decode alike
                       (k_primary); a flow's own number is ``AuxConfig.experts_per_token``.
    expert_size:       intermediate size of a routed expert.
    shared_size:       intermediate size of the shared expert that every row goes through (several
                       are one of their joint size); 0: there is none.
    shared_gate:       the shared expert's output is multiplied by σ(g · m), g learned (Qwen2-MoE).
    scores:            what the router makes of its logits, over all experts.
    normalise:         the chosen scores are divided by their sum. With ``softmax`` that is the
                       softmax over the chosen logits (Mixtral).
    scaling:           what the weights are multiplied by at last (DeepSeek-V3).
    selection_bias:    a bias per expert is added to the scores when choosing, and to nothing else
                       (balancing without a loss; DeepSeek-V3).
    num_groups, groups_per_token: experts come in groups of equal size, and a row chooses within its
                       best groups; a group counts the sum of its two best biased scores.
    dense_layers:      layers with an MLP of ``ModelConfig.intermediate_size`` instead.
    balance_weight:    weight of the load-balancing loss E · Σ_e f_e P_e, for each layer and flow.
    z_weight:          weight of the mean squared logsumexp of router logits.
    bias_rate:         by how much ``selection_bias`` moves towards balance each optimizer step.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int = 0
    shared_gate: bool = False
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    selection_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    dense_layers: tuple[int, ...] = ()
    balance_weight: float = 0.0
    z_weight: float = 0.0
    bias_rate: float = 0.001

    def __post_init__(self) -> None:
        for field in ("num_experts", "expert_size", "num_groups", "groups_per_token"):
            value = getattr(self, field)
            require(value >= 1, f"{field} is {value}; expected at least 1")
        require(
            0 <= self.experts_per_token <= self.num_experts,
            f"experts_per_token is {self.experts_per_token}; expected 0 to {self.num_experts} "
            "(num_experts)",
        )
        for field in ("shared_size", "balance_weight", "z_weight", "bias_rate"):
            value = getattr(self, field)
            require(value >= 0, f"{field} is {value}; expected 0 or more")
        require(self.scaling > 0, f"scaling is {self.scaling}; expected more than 0")
        require(
            self.shared_size > 0 or not self.shared_gate,
            "shared_gate is set, but there is no shared expert (shared_size)",
        )
        require(
            self.num_experts % self.num_groups == 0 and self.groups_per_token <= self.num_groups,
            f"num_groups {self.num_groups} and groups_per_token {self.groups_per_token}: expected "
            f"a divisor of num_experts {self.num_experts}, and at most as many",
        )
        require(
            self.experts_per_token <= self.groups_per_token * (self.num_experts // self.num_groups),
            f"experts_per_token is {self.experts_per_token}, but {self.groups_per_token} groups "
            f"hold {self.groups_per_token * (self.num_experts // self.num_groups)} experts",
        )
