"""Give a standard model an auxiliary flow that changes nothing at birth (spec: E2 = E1, couplings
zero, so q = p and r = p up to rounding).
"""

import dataclasses

import torch

from dualflow.model import CausalLM, build_model
from dualflow.model.init import drawn
from dualflow.spec import AuxConfig, ModelConfig, ReadoutConfig


def add_aux(
    model: CausalLM, aux: AuxConfig | None = None, readout: ReadoutConfig | None = None
) -> CausalLM:
    """A dual model whose primary is ``model``, bit for bit, and whose flows start as copies of it.

    aux:     the flows; by default one, with an embedding of its own and all three couplings. What
             it owns starts as the primary's values, a LoRA with its second matrix at zero.
    readout: by default the mixture.

    The result has the device, the number formats and the mode of ``model``, and no memory in common
    with it. Raises ``ValueError`` where ``model`` has a second flow or softmax already, or its
    matrices are quantised.
    """
    if model.config.variant != "standard":
        raise ValueError(
            f"the model is a {model.config.variant} model already; an auxiliary flow can be added "
            "to a standard one"
        )
    if model.quantised is not None:
        raise ValueError(
            f"the model's matrices are {model.quantised}; add an auxiliary flow to the float model "
            "they were made from, and quantise the result"
        )
    readout = readout or ReadoutConfig()
    if readout.kind == "aux_only":  # the primary is a model, whoever reads it
        readout = dataclasses.replace(readout, standalone_primary=True)
    config = dataclasses.replace(model.config, variant="dual", aux=aux, readout=readout)
    embedding = model.model.embed_tokens.weight
    dual = build_model(config, None, embedding.device, embedding.dtype)
    primary = model.state_dict()
    with torch.no_grad():
        for name, parameter in dual.named_parameters():
            parameter.data = _at_birth(name, parameter, primary, config)
    return dual.train(model.training)


def _at_birth(
    name: str, parameter: torch.Tensor, primary: dict[str, torch.Tensor], config: ModelConfig
) -> torch.Tensor:
    if name in primary:
        return primary[name].clone()
    if name.endswith(("_coupling", "lora_B.weight", "aux_readout.weight")):
        return torch.zeros_like(parameter)
    if name.endswith("lora_A.weight"):
        # Any values will do, as what they make is multiplied by zero; these let it learn at once.
        values = drawn(name, parameter.shape, config.init_std, seed=0)
        return values.to(parameter.device, parameter.dtype)
    return primary[_shared_name(name)].clone()


def _shared_name(name: str) -> str:
    """The primary's tensor that an auxiliary one starts from: ``model.aux.0.embed_tokens.weight``
    from ``model.embed_tokens.weight``, ``model.layers.1.aux.0.q_proj.weight`` from
    ``model.layers.1.self_attn.q_proj.weight``.
    """
    before, _, after = name.partition(".aux.")
    own = after.partition(".")[2]
    if before == "model":
        return own if own.startswith("lm_head") else f"model.{own}"
    matrix = own.partition(".")[0]
    rooms = {"q_proj": "self_attn.", "o_proj": "self_attn.", "q_norm": "self_attn.",
             "gate_proj": "mlp.", "up_proj": "mlp.", "down_proj": "mlp."}  # fmt: skip
    return f"{before}.{rooms.get(matrix, '')}{own}"
