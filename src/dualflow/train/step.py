"""One optimizer step: micro-batches whose gradients add up to those of the whole batch, then one
update.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from dualflow.data.loader import Batch
from dualflow.model import LossSums
from dualflow.train.balance import Balance
from dualflow.train.optimizers import Optimizers
from dualflow.train.parallel import Parallel

IGNORED = -100
"""What stands where there is no target; whatever is below 0 is not counted."""


LossFunction = Callable[[Tensor, Tensor, Tensor | None], LossSums]
Autocast = Callable[[], AbstractContextManager[object]]


class NonFiniteError(ValueError):
    """The loss or a gradient stopped being a number; the weights are those from before the step."""


@dataclass(frozen=True)
class MeanLoss:
    """Mean losses in nats per counted target; None where undefined or nothing was counted."""

    r: float | None
    p: float | None
    q: float | None
    count: int


@dataclass(frozen=True)
class StepReport:
    """What an optimizer step did; ``grad_norm`` is the L2 norm of all gradients before clipping."""

    loss: MeanLoss
    grad_norm: float


def optimizer_step(
    loss_function: LossFunction,
    optimizers: Optimizers,
    batch: Batch,
    *,
    step: int,
    micro_batch_size: int,
    grad_clip: float | None,
    autocast: Autocast,
    parallel: Parallel,
    balance: Balance | None = None,
) -> StepReport:
    """Update the weights once from ``batch``, this rank's part of the global batch.

    The loss is the sum over all micro-batches and ranks divided by the number of targets counted in
    all of them, known before the first backward pass: the mean over tokens of the big batch,
    however it is split and however unevenly the counted targets lie.

    step:    the number of this step, for messages only.
    balance: of a model with experts.
    Raises ``NonFiniteError`` before any weight has changed, on every rank alike.
    """
    counted = int(parallel.sum_((batch.targets_BS >= 0).sum().to(parallel.device)))
    optimizers.zero_grad()
    sums = LossAccumulator()
    if balance is not None:
        balance.begin()
    for tokens_BS, targets_BS, document_ids_BS in micro_batches(
        batch, micro_batch_size, parallel.device
    ):
        with autocast():
            part = loss_function(tokens_BS, targets_BS, document_ids_BS)
        total = part.total / max(counted, 1)
        if balance is not None and part.router is not None:
            total = total + balance.loss(part.router)
        total.backward()
        sums.add(part)
    loss = sums.mean(parallel)
    if loss.r is not None and not math.isfinite(loss.r):
        raise NonFiniteError(f"step {step}: the loss is {loss.r}; {_ADVICE}")
    gradients = optimizers.gradients()
    parallel.sum_gradients(gradients)
    norm = torch.nn.utils.get_total_norm(gradients)
    grad_norm = float(norm)
    if not math.isfinite(grad_norm):
        raise NonFiniteError(
            f"step {step}: the gradient is not finite in {_non_finite(optimizers)}; {_ADVICE}"
        )
    if grad_clip is not None:
        parameters = optimizers.parameters.values()
        torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
    optimizers.step()
    if balance is not None:
        balance.finish()
    return StepReport(loss, grad_norm)


_ADVICE = "a lower optimizer.lr or muon_lr, a longer warm-up or optimizer.grad_clip usually helps"


class LossAccumulator:
    """Adds up ``LossSums`` in float64, and reads them off the device only at the end."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._has_p = self._has_q = False

    def add(self, part: LossSums) -> None:
        """Take in the sums of one micro-batch."""
        zero = torch.zeros_like(part.r)
        self._has_p, self._has_q = part.p is not None, part.q is not None
        values = (
            part.r,
            zero if part.p is None else part.p,
            zero if part.q is None else part.q,
            part.count,
        )
        self._sums.append(torch.stack([value.detach().float() for value in values]))

    def mean(self, parallel: Parallel) -> MeanLoss:
        """Means over all micro-batches and ranks."""
        r, p, q, count = self._total(parallel)
        if count == 0:
            return MeanLoss(None, None, None, 0)
        return MeanLoss(
            r / count,
            p / count if self._has_p else None,
            q / count if self._has_q else None,
            int(count),
        )

    def _total(self, parallel: Parallel) -> list[float]:
        own = torch.zeros(4, dtype=torch.float64)
        if self._sums:
            own = torch.stack(self._sums).cpu().double().sum(0)
        return parallel.sum_(own.to(parallel.device)).tolist()


def micro_batches(
    batch: Batch, size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Tokens, targets and document ids of consecutive groups of at most ``size`` sequences, on
    ``device``.
    """
    documents_BS = batch.document_ids_BS
    for start in range(0, batch.tokens_BS.shape[0], size):
        rows = slice(start, start + size)
        documents = None if documents_BS is None else documents_BS[rows].to(device)
        yield batch.tokens_BS[rows].to(device), batch.targets_BS[rows].to(device), documents


def _non_finite(optimizers: Optimizers) -> str:
    names = [
        name
        for name, parameter in optimizers.parameters.items()
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all())
    ]
    # Finite gradients can still have a norm beyond float32.
    return (
        ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        or "its norm"
    )
