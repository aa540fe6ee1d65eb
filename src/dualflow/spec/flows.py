"""The auxiliary flows and the readout as plain data."""

from dataclasses import dataclass
from typing import Literal

from dualflow.spec.checks import require

Coupling = Literal["query", "intermediate", "output"]
Owned = Literal["q_proj", "o_proj", "mlp", "lm_head"]

MAX_FLOWS = 1024
"""Flows beyond this are a slip of the keyboard: building them would take all memory there is."""


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
    experts_per_token: of a mixture of experts, how many routed experts each of the flow's rows goes
                 through (k_aux); 0: the shared experts alone; None: as many as a primary row.
    routing:     ``independent``: the router chooses for the flow's own rows; ``replay``: they go
                 through the experts that the primary row chose, weighted by their own scores.
    expert_couplings: under ``replay``, also couple each routed expert's intermediate, by one vector
                 for every expert.
    """

    num_flows: int = 1
    couplings: tuple[Coupling, ...] = ("query", "intermediate", "output")
    embedding: Literal["own", "tied"] = "own"
    flow_norms: Literal["shared", "separate"] = "shared"
    owns: tuple[Owned, ...] = ()
    lora_rank: int = 0
    experts_per_token: int | None = None
    routing: Literal["independent", "replay"] = "independent"
    expert_couplings: bool = False

    def __post_init__(self) -> None:
        require(self.num_flows >= 1, f"num_flows is {self.num_flows}; expected at least 1")
        require(
            self.num_flows <= MAX_FLOWS,
            f"num_flows is {self.num_flows}; expected {MAX_FLOWS} at most",
        )
        require(
            self.lora_rank >= 0,
            f"lora_rank is {self.lora_rank}; expected 0 (whole matrices) or more",
        )
        require(
            self.lora_rank == 0 or bool(self.owns),
            "lora_rank is set but owns is empty; name the matrices it adapts",
        )
        require(
            self.experts_per_token is None or self.experts_per_token >= 0,
            f"experts_per_token is {self.experts_per_token}; expected 0 or more",
        )
        require(
            self.routing == "replay" or not self.expert_couplings,
            "expert_couplings is set, but routing is 'independent'; they couple the experts that "
            "a flow shares with the primary under 'replay'",
        )
        for field in ("couplings", "owns"):
            names = getattr(self, field)
            require(len(set(names)) == len(names), f"{field} names something twice: {list(names)}")


@dataclass(frozen=True, kw_only=True)
class ReadoutConfig:
    """How p and q become the distribution r that is trained and sampled.

    kind:                 ``mixture`` r = αp + (1 − α)q with α = clip(Σp², ½, 1) (paper);
                          ``aux_only`` r = q; ``primary_only`` r = p; ``learned`` is the mixture
                          with α = σ(w · [1, logit Σp², logit Σq²]) and w three learned numbers of
                          the auxiliary (ours; for retrofits, where α ≥ ½ holds q back).
    alpha_gradient:       whether the gradient flows through α (ours).
    standalone_primary:   of ``aux_only``: p is a model in its own right all the same, as in a
                          retrofit, so that the auxiliary may be left out.
    primary_loss_weight:  λ in loss = −log r − λ log p (ours); above 0 it keeps p usable with the
                          auxiliary off.
    """

    kind: Literal["mixture", "aux_only", "primary_only", "learned"] = "mixture"
    alpha_gradient: bool = True
    standalone_primary: bool = False
    primary_loss_weight: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.primary_loss_weight >= 0,
            f"primary_loss_weight is {self.primary_loss_weight}; expected 0 or more",
        )
        require(
            self.kind == "aux_only" or not self.standalone_primary,
            f"standalone_primary is set, but kind is {self.kind!r}, where p always stands for "
            "itself; it belongs to 'aux_only'",
        )
