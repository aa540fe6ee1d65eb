"""At which positions a request needs the auxiliary flow, and when that is known. No torch.

docs/engine.md says why the exact rules are exact. α is the weight of p in r, from p alone.
"""

import math
from dataclasses import dataclass
from typing import Literal

from dualflow.engine.request import RequestError, RequestParams
from dualflow.spec import ModelConfig

Need = Literal["never", "always", "greedy", "two_stage", "threshold"]
"""never, always: known beforehand.
greedy:     the most probable token of r; skipped where p alone proves which one that is.
two_stage:  the position's uniform u says which flow the token is drawn from: p where u < α, else
            q. As α is at least one half, u < ½ is known beforehand.
threshold:  p where α is at least the threshold, else r.
"""

SURELY_SHARP = math.sqrt(0.5)
"""Above this α the most probable token of p is that of r: p₁ ≥ Σp² = α and p₂ ≤ 1 − p₁ make
α(p₁ − p₂) ≥ α(2α − 1), which is above 1 − α where 2α² > 1.
"""

_MARGIN = 1e-6
"""For the rounding of float32 probabilities, on the careful side."""


@dataclass(frozen=True, slots=True)
class AuxRule:
    """How one request's positions are served.

    need:       when the auxiliary runs; ``threshold`` belongs to that need.
    coupled:    tokens are drawn from p first and then kept or replaced, so that guesses of the
                primary hold as often as possible (``drafts="primary"``).
    """

    need: Need
    threshold: float = 1.0
    coupled: bool = False

    @property
    def decides_late(self) -> bool:
        """Whether the need can depend on p."""
        return self.need in ("greedy", "two_stage", "threshold")


def aux_rule(params: RequestParams, config: ModelConfig) -> AuxRule:
    """The rule of a request. Raises ``RequestError`` where the model has no trained p for it."""
    coupled = params.drafts == "primary" and not params.greedy
    if not config.has_primary_readout and (params.aux.kind == "off" or params.drafts == "primary"):
        asked = "aux = 'off'" if params.aux.kind == "off" else "drafts = 'primary'"
        raise RequestError(
            f"{asked} needs the primary's own distribution, but this {config.variant} model was "
            "trained to be read from its auxiliary rows only (there is no trained p); "
            "ask for aux = 'on'"
        )
    if config.variant == "standard" or params.aux.kind == "off":
        return AuxRule("never", coupled=coupled)
    is_mixture = config.variant in ("dual", "two_softmax") and config.readout.kind == "mixture"
    if params.aux.kind == "threshold" and is_mixture:
        assert params.aux.threshold is not None
        return AuxRule("threshold", params.aux.threshold, coupled)
    if params.aux.kind == "exact" and is_mixture and params.logprobs is None:
        if params.greedy and not params.penalises:
            return AuxRule("greedy")
        if not params.reshapes and not coupled:
            return AuxRule("two_stage")
    return AuxRule("always", coupled=coupled)


def greedy_is_sure(alpha: float, first: float, second: float) -> bool:
    """Whether the most probable allowed token of p is that of r for certain, ``first`` and
    ``second`` being the two largest allowed p.

    r₁ − r_v = α(p₁ − p_v) + (1 − α)(q₁ − q_v) ≥ α(p₁ − p₂) − (1 − α).
    """
    return alpha * (first - second) > 1 - alpha + _MARGIN
