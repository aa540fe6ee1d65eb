"""The models: one backbone, four variants, one step function."""

import torch

from dualflow.model.backbone import AuxRows, CausalLM, LossSums, StepOutput
from dualflow.model.dual import DualFlowLM
from dualflow.model.init import initialise
from dualflow.model.kv import BatchKV, ContiguousCache, KVReader, KVWriter
from dualflow.model.phd import PHD2LM
from dualflow.model.quantise import QuantisedEmbedding, QuantisedLinear, quantise_model
from dualflow.model.readout import ReadoutLogProbs
from dualflow.model.rows import Kept, Rows
from dualflow.model.standard import StandardLM
from dualflow.model.two_softmax import TwoSoftmaxLM
from dualflow.spec import ModelConfig, Variant

__all__ = [
    "AuxRows", "BatchKV", "CausalLM", "ContiguousCache", "DualFlowLM", "KVReader", "KVWriter",
    "Kept", "LossSums", "PHD2LM", "QuantisedEmbedding", "QuantisedLinear", "ReadoutLogProbs",
    "Rows", "StandardLM", "StepOutput", "TwoSoftmaxLM", "build_model", "quantise_model",
]  # fmt: skip

VARIANTS: dict[Variant, type[CausalLM]] = {
    "standard": StandardLM,
    "dual": DualFlowLM,
    "phd2": PHD2LM,
    "two_softmax": TwoSoftmaxLM,
}


def build_model(
    config: ModelConfig,
    seed: int | None = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> CausalLM:
    """A model of ``config.variant``; equal seeds give what variants share equal values.

    ``seed`` None leaves the parameters to be filled by the caller, as from a checkpoint.
    """
    with torch.device(device):
        model = VARIANTS[config.variant](config)
    model.to(dtype)
    if seed is not None and torch.device(device).type != "meta":
        initialise(model, config, seed)
    return model
