"""The standard transformer: primary rows alone, r = p."""

from torch import Tensor

from dualflow.model.backbone import CausalLM
from dualflow.model.readout import ReadoutLogProbs
from dualflow.ops.mixture import TargetLogProbs, at_targets, log_softmax


class StandardLM(CausalLM):
    """One flow, one distribution."""

    def target_log_probs(
        self, primary_TD: Tensor, aux_FTD: Tensor, targets_T: Tensor
    ) -> TargetLogProbs:
        return TargetLogProbs(
            at_targets(log_softmax(self.logits(primary_TD)), targets_T), None, None
        )

    def read(self, primary_AD: Tensor, aux_FAD: Tensor) -> ReadoutLogProbs:
        log_p = log_softmax(self.logits(primary_AD))
        return ReadoutLogProbs(log_p, log_p, None)
