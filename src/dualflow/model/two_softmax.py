"""Control: the mixture without a second flow. q is read from a learned map of the primary's own
final state.
"""

from torch import Tensor, nn

from dualflow.model.backbone import CausalLM
from dualflow.model.readout import ReadoutLogProbs, read_all, read_targets
from dualflow.ops.mixture import TargetLogProbs
from dualflow.spec import ModelConfig


class SecondState(nn.Module):
    """The second softmax's state: s + M s, with M a learned [D, D] matrix."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.second_state = nn.Linear(size, size, bias=False)

    def forward(self, state_TD: Tensor) -> Tensor:
        return state_TD + self.second_state(state_TD)


class TwoSoftmaxLM(CausalLM):
    """A standard transformer with two softmaxes under the same α rule and loss as Dual-Flow."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.model.aux.append(SecondState(config.hidden_size))

    def target_log_probs(
        self, primary_TD: Tensor, aux_FTD: Tensor, targets_T: Tensor
    ) -> TargetLogProbs:
        second_TD = self.model.aux[0](primary_TD)
        return read_targets(
            self.config.readout, self.logits(primary_TD), self.logits(second_TD)[None], targets_T
        )

    def read(self, primary_AD: Tensor, aux_FAD: Tensor) -> ReadoutLogProbs:
        second_AD = self.model.aux[0](primary_AD)
        return read_all(self.config.readout, self.logits(primary_AD), self.logits(second_AD)[None])
