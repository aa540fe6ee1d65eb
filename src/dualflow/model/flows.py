"""What an auxiliary flow owns: its embedding, its coupling vectors, and any norm or matrix it
does not share.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dualflow.ops.norm import RMSNorm, make_norm
from dualflow.spec import AuxConfig, ModelConfig
from dualflow.spec.parameters import query_norm_size

MLP_MATRICES = ("gate_proj", "up_proj", "down_proj")

LAYER_NORMS = {
    "input_layernorm": "pre",
    "attention_output_layernorm": "post",
    "post_attention_layernorm": "pre",
    "mlp_output_layernorm": "post",
}
"""A layer's norms, and the ``norm_placement`` that has them beside ``both``. The names of the first
kind are Llama's: the second of them comes after the attention and before the MLP.
"""


class LoRA(nn.Module):
    """A low-rank addition to a shared matrix (Hu et al. 2021): shared(x) + B A x, with B zero at
    birth.
    """

    def __init__(self, shared: nn.Linear, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Linear(shared.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, shared.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lora_B(self.lora_A(x))


class AuxLayer(nn.Module):
    """One flow's own parameters in one layer; what it does not own is None."""

    def __init__(
        self, config: ModelConfig, aux: AuxConfig, index: int, matrices: dict[str, nn.Linear]
    ) -> None:
        super().__init__()
        sizes = {
            "query": config.num_heads * config.head_size,
            "intermediate": config.coupled_size(index),
            "output": config.hidden_size,
        }
        for name, size in sizes.items():
            there = name in aux.couplings and size > 0
            vector = nn.Parameter(torch.zeros(size)) if there else None
            self.register_parameter(f"{name}_coupling", vector)
        experts = None
        if config.moe and config.has_experts(index) and aux.expert_couplings:
            experts = nn.Parameter(torch.zeros(config.moe.num_experts, config.moe.expert_size))
        self.register_parameter("expert_coupling", experts)
        for name, shared in matrices.items():
            owned = name in aux.owns or (name in MLP_MATRICES and "mlp" in aux.owns)
            self.add_module(name, _own_matrix(shared, aux.lora_rank) if owned else None)
        separate = aux.flow_norms == "separate"
        for name, place in LAYER_NORMS.items():
            there = separate and config.norm_placement in (place, "both")
            self.add_module(name, norm_of(config, config.hidden_size) if there else None)
        self.add_module("q_norm", query_norm(config) if separate and config.qk_norm else None)


class AuxModel(nn.Module):
    """One flow's own parameters outside the layers: E2, and its final norm or head where it owns
    them.
    """

    def __init__(self, config: ModelConfig, aux: AuxConfig, head: nn.Linear) -> None:
        super().__init__()
        own = (
            new_embedding(config.vocab_size, config.hidden_size) if aux.embedding == "own" else None
        )
        self.add_module("embed_tokens", own)
        self.add_module(
            "norm", norm_of(config, config.hidden_size) if aux.flow_norms == "separate" else None
        )
        self.add_module(
            "lm_head", _own_matrix(head, aux.lora_rank) if "lm_head" in aux.owns else None
        )


def is_aux(name: str) -> bool:
    """Whether a tensor of a model belongs to the auxiliary flows, by its name."""
    return ".aux." in name or name.startswith("aux_readout.")


class LearnedAlpha(nn.Module):
    """The three numbers that a learned mixture reads α from (``ops.mixture.learned_alpha``)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


def new_embedding(rows: int, width: int) -> nn.Embedding:
    """A table without values yet: they are drawn by name or loaded (``model.init``). Torch would
    draw some first, and import its compiler to do that on the meta device.
    """
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


def owned(flows: Iterable[nn.Module], name: str) -> list[Any]:
    """What each flow owns under ``name``; None where it shares the primary's."""
    return [getattr(flow, name, None) for flow in flows]


def _own_matrix(shared: nn.Linear, rank: int) -> nn.Module:
    if rank:
        return LoRA(shared, rank)
    return nn.Linear(shared.in_features, shared.out_features, bias=shared.bias is not None)


def norm_of(config: ModelConfig, size: int) -> nn.Module:
    """A norm of the model's kind over ``size`` features."""
    return make_norm(config.norm, size, config.norm_eps, config.norm_offset)


def query_norm(config: ModelConfig) -> RMSNorm:
    """The norm of queries: over each head, or over the row of all heads."""
    return RMSNorm(query_norm_size(config), config.norm_eps, config.norm_offset)
