"""Validation loss of a model: the means of −log r, −log p and −log q over counted targets."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dualflow.data.loader import Batch
from dualflow.model import CausalLM


@dataclass(frozen=True, kw_only=True)
class EvaluatedLoss:
    """Mean losses in nats per token; p and q are None where the model has no such distribution.

    tokens:           targets that were counted.
    bytes_per_token:  UTF-8 bytes of text per token, None where not known.
    """

    loss: float
    loss_p: float | None
    loss_q: float | None
    tokens: int
    bytes_per_token: float | None = None

    @property
    def perplexity(self) -> float:
        """The exponential of the loss of r; infinite where that is beyond floats."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Loss of r in bits per byte of text, which does not depend on the tokenizer."""
        return self.loss / math.log(2) / self.bytes_per_token if self.bytes_per_token else None


def evaluate_loss(
    model: CausalLM,
    batches: Iterable[Batch],
    device: torch.device | str = "cpu",
    *,
    bytes_per_token: float | None = None,
) -> EvaluatedLoss:
    """Losses of ``model``, which lies on ``device``, over all ``batches``, summed in float64.

    The model is in evaluation mode meanwhile and then as it was. Raises ``ValueError``: a token id
    outside the model's vocabulary, or no counted target.
    """
    sums: dict[str, float] = {}
    count = 0
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for batch in batches:
                _check_ids(batch, model.config.num_real_tokens)
                documents = batch.document_ids_BS
                found = model.loss(
                    batch.tokens_BS.to(device),
                    batch.targets_BS.to(device),
                    None if documents is None else documents.to(device),
                )
                count += int(found.count)
                for name, value in (("r", found.r), ("p", found.p), ("q", found.q)):
                    if value is not None:
                        sums[name] = sums.get(name, 0.0) + float(value)
    finally:
        model.train(was_training)
    if not count:
        raise ValueError("nothing to evaluate: the data has no counted target; give more text")
    mean = {name: total / count for name, total in sums.items()}
    return EvaluatedLoss(
        loss=mean["r"],
        loss_p=mean.get("p"),
        loss_q=mean.get("q"),
        tokens=count,
        bytes_per_token=bytes_per_token,
    )


def _check_ids(batch: Batch, vocab_size: int) -> None:
    """Refuse ids that would read beyond the embedding or a row of logits."""
    largest = int(max(batch.tokens_BS.max(), batch.targets_BS.max()))
    smallest = int(batch.tokens_BS.min())
    if largest >= vocab_size or smallest < 0:
        wrong = largest if largest >= vocab_size else smallest
        raise ValueError(
            f"token id {wrong} is outside the model's vocabulary of {vocab_size} ids "
            f"(0 .. {vocab_size - 1}); use the tokenizer the model was trained with"
        )
