"""What a model is, as plain data: family switches, the auxiliary flow, the readout, presets and
parameter counts.

No torch here. Families differ by switches alone (there is no ``model_type`` to branch on), and the
variants that are compared (standard, dual, phd2, two_softmax) share every field but ``variant`` and
what the auxiliary flow adds.
"""

from dualflow.spec.flows import AuxConfig, Coupling, Owned, ReadoutConfig
from dualflow.spec.model import (
    WEIGHT_GROUP,
    FloatFormat,
    ModelConfig,
    QuantisedFormat,
    QuantisedWeights,
    RopeScaling,
    Variant,
    standard_twin,
)
from dualflow.spec.moe import MoEConfig
from dualflow.spec.parameters import ParameterCounts, parameter_counts
from dualflow.spec.presets import PRESETS, preset

__all__ = [
    "PRESETS", "WEIGHT_GROUP", "AuxConfig", "Coupling", "FloatFormat", "MoEConfig", "ModelConfig",
    "Owned", "ParameterCounts", "QuantisedFormat", "QuantisedWeights", "ReadoutConfig",
    "RopeScaling", "Variant", "parameter_counts", "preset", "standard_twin",
]  # fmt: skip
