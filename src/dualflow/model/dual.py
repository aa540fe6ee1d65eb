"""The Dual-Flow Transformer: auxiliary flows with embeddings of their own, coupled to the
primary, mixed into r.
"""

import torch
from torch import Tensor

from dualflow.model.backbone import CausalLM
from dualflow.model.flows import AuxModel, LearnedAlpha, owned
from dualflow.model.readout import ReadoutLogProbs, read_all, read_targets
from dualflow.ops.mixture import TargetLogProbs
from dualflow.spec import ModelConfig


class DualFlowLM(CausalLM):
    """A complete causal LM (the primary flow) and one or more decode-only auxiliary flows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.flows is not None
        self.model.aux.extend(
            AuxModel(config, config.flows, self.lm_head) for _ in range(config.num_flows)
        )
        self.aux_readout = LearnedAlpha() if config.readout.kind == "learned" else None

    def embed_aux(self, tokens_A: Tensor) -> Tensor:
        shared = self.model.embed_tokens
        tables = owned(self.model.aux, "embed_tokens")
        return torch.stack([(table or shared)(tokens_A) for table in tables])

    def target_log_probs(
        self, primary_TD: Tensor, aux_FTD: Tensor, targets_T: Tensor
    ) -> TargetLogProbs:
        return read_targets(
            self.config.readout, self.logits(primary_TD), self.aux_logits(aux_FTD), targets_T,
            self._alpha_weight,
        )  # fmt: skip

    def read(self, primary_AD: Tensor, aux_FAD: Tensor) -> ReadoutLogProbs:
        return read_all(
            self.config.readout, self.logits(primary_AD), self.aux_logits(aux_FAD),
            self._alpha_weight,
        )  # fmt: skip

    @property
    def _alpha_weight(self) -> Tensor | None:
        return None if self.aux_readout is None else self.aux_readout.weight
