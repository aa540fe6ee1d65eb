"""One configuration of every kind of model, and the forward pass that all other ways to run it
must equal.
"""

import torch
from torch import Tensor

from dualflow.model import AuxRows, BatchKV, CausalLM, StepOutput
from dualflow.spec import AuxConfig, ModelConfig
from dualflow.testing.configs import family_config, flow_config, mixture_config, tiny_config

EVERY_KIND: dict[str, ModelConfig] = {
    "standard": tiny_config("standard"),
    "two_softmax": tiny_config("two_softmax"),
    "phd2": tiny_config("phd2"),
    "dual": tiny_config("dual"),
    "dual, two flows": tiny_config("dual", aux=AuxConfig(num_flows=2)),
    "dual, tied embedding": flow_config("tied_embedding"),
    "dual, owns everything": flow_config("owns_everything"),
    "dual, separate norms": flow_config("separate_norms", qk_norm=True),
    "dual, LoRA": flow_config("lora"),
    "dual, GPT-2 family": family_config("gpt2", "dual"),
    "dual, Gemma 2 family": family_config("gemma2", "dual"),
    "dual, Gemma 3 family": family_config("gemma3", "dual", aux=AuxConfig(flow_norms="separate")),
    "dual, OLMo-2 family": family_config("olmo2", "dual", aux=AuxConfig(flow_norms="separate")),
    "dual, learned alpha": flow_config("learned_alpha"),
    "standard, Qwen2-MoE": mixture_config("qwen2_moe"),
    "phd2, DeepSeek-V3": mixture_config("deepseek_v3", "phd2"),
    "dual, Qwen2-MoE": mixture_config("qwen2_moe", "dual", aux=AuxConfig(experts_per_token=3)),
    "dual, DeepSeek-V3 without experts for the flow": mixture_config(
        "deepseek_v3", "dual", aux=AuxConfig(experts_per_token=0, flow_norms="separate")
    ),
    "dual, Mixtral replayed": mixture_config("mixtral", "dual", aux=AuxConfig(routing="replay")),
    "dual, OLMoE replayed and coupled": mixture_config(
        "olmoe",
        "dual",
        aux=AuxConfig(num_flows=2, routing="replay", expert_couplings=True),
    ),
}
"""Every variant and every way an auxiliary flow can differ from the primary."""


WITHOUT_EXPERTS = {name: config for name, config in EVERY_KIND.items() if config.moe is None}
"""Those whose matrices can be quantised."""


def whole_sequence(model: CausalLM, tokens_T: Tensor, *, keep: bool = False) -> StepOutput:
    """The training forward of one sequence: every token a primary row and an auxiliary row."""
    positions_T = torch.arange(len(tokens_T))
    kv = [BatchKV(1, len(tokens_T))] * model.config.num_layers
    return model.step(tokens_T, positions_T, kv, aux=AuxRows(tokens_T, positions_T), keep=keep)
