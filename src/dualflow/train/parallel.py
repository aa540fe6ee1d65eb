"""Data parallelism, spelled out: every rank holds the whole model, and gradients are summed once
per optimizer step.

No wrapper goes round the model, so parameter names and checkpoints are the same for any number of
ranks. Each rank divides its loss by the global count of targets, hence the sum over ranks is the
gradient of the big batch.

Sharding (FSDP2) would be another class with these methods, whose ``sum_gradients`` does nothing
because the sharded backward pass already reduces, and which gathers the tensors that Muon and the
checkpoint need whole.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_BUCKET_ELEMENTS = 25_000_000
"""Gradients are copied into flat buffers of about this size: few messages, and bounded extra
memory.
"""


@dataclass(frozen=True)
class Parallel:
    """This process's place among ``world_size`` ranks, and its device. Every method is a no-op for
    a single rank.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and speaks to people."""
        return self.rank == 0

    def sum_(self, values: Tensor) -> Tensor:
        """``values`` summed over the ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank: what all ranks must agree on before they go on."""
        if self.world_size == 1:
            return flag
        return bool(self.sum_(torch.tensor(int(flag), device=self.device)) > 0)

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Replace every gradient with its sum over the ranks; all ranks pass the same tensors in
        the same order.
        """
        if self.world_size == 1:
            return
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            pieces = flat.split([gradient.numel() for gradient in bucket])
            for gradient, piece in zip(bucket, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in rank order; they have one shape and number format."""
        if self.world_size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor)
        return gathered

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier()


def join_ranks(device: torch.device) -> Parallel:
    """This process's place as torchrun's environment variables state it; a single rank without
    them.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return Parallel(device=device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    return Parallel(dist.get_rank(), world_size, device)


def leave_ranks() -> None:
    """Undo ``join_ranks``."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def is_main_process() -> bool:
    """Whether this process is rank 0, before and after the ranks are joined too."""
    return os.environ.get("RANK", "0") == "0"


def local_rank() -> int:
    """Which of this machine's ranks this process is: the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Consecutive gradients of one number format, about ``_BUCKET_ELEMENTS`` together."""
    buckets: list[list[Tensor]] = []
    size = 0
    for gradient in gradients:
        full = size + gradient.numel() > _BUCKET_ELEMENTS
        if not buckets or full or buckets[-1][0].dtype != gradient.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += gradient.numel()
    return buckets
