"""PHD-2, Parallel Hidden Decoding with two copies (arXiv:2504.14992): the baseline that spends an
equal second row.

Every token gets a second row with the same embedding and matrices. A copy attends to all originals
up to its own position and to its own key and value, which are never stored; originals never see
copies; only the copy is read out. The copy keeps the original's rotary position (our decision).
"""

from torch import Tensor

from dualflow.model.backbone import CausalLM
from dualflow.model.readout import ReadoutLogProbs
from dualflow.ops.mixture import TargetLogProbs, at_targets, log_softmax
from dualflow.spec import ModelConfig


class PHD2LM(CausalLM):
    """The copies are this model's auxiliary rows: no embedding, coupling or mixture of their
    own, but own keys.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, own_key_value=True)

    def embed_aux(self, tokens_A: Tensor) -> Tensor:
        return self.model.embed_tokens(tokens_A)[None]

    def target_log_probs(
        self, primary_TD: Tensor, aux_FTD: Tensor, targets_T: Tensor
    ) -> TargetLogProbs:
        return TargetLogProbs(
            at_targets(log_softmax(self.logits(aux_FTD[0])), targets_T), None, None
        )

    def read(self, primary_AD: Tensor, aux_FAD: Tensor) -> ReadoutLogProbs:
        return ReadoutLogProbs(log_softmax(self.logits(aux_FAD[0])), None, None)
