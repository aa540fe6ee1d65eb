"""Mean losses of r, p and q over the validation split, the same whatever the micro-batches and
ranks.
"""

from collections.abc import Callable, Iterable
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional as F

from dualflow.train.parallel import Parallel
from dualflow.train.step import (
    IGNORED,
    Autocast,
    Batch,
    LossAccumulator,
    LossFunction,
    MeanLoss,
    micro_batches,
)


def validation_loss(
    loss_function: LossFunction,
    batches: Iterable[Batch],
    *,
    micro_batch_size: int,
    max_batches: int | None,
    autocast: Autocast,
    parallel: Parallel,
    stop: Callable[[], bool],
    grad: bool,
) -> MeanLoss | None:
    """Losses over the first ``max_batches`` batches (None: all) of this rank's part; None where
    ``stop`` said so.

    grad: keep gradients enabled although none are computed: a compiled loss then runs the graph
          that training already compiled, and needs no second compilation.
    """
    sums = LossAccumulator()
    stopped = False
    with torch.set_grad_enabled(grad):
        for batch in islice(batches, max_batches):
            for rows in micro_batches(batch, micro_batch_size, parallel.device):
                with autocast():
                    sums.add(loss_function(*_fill_up(rows, micro_batch_size)))
            if stop():
                stopped = True
                break
    loss = sums.mean(parallel)
    return None if parallel.any(stopped) else loss


def _fill_up(
    rows: tuple[Tensor, Tensor, Tensor | None], size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Add uncounted sequences up to ``size``: one shape for all micro-batches, hence one
    compilation.
    """
    tokens_BS, targets_BS, documents_BS = rows
    missing = size - tokens_BS.shape[0]
    if missing == 0:
        return rows
    below = (0, 0, 0, missing)
    documents_BS = None if documents_BS is None else F.pad(documents_BS, below)
    return F.pad(tokens_BS, below), F.pad(targets_BS, below, value=IGNORED), documents_BS
