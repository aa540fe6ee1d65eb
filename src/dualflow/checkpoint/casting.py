"""Number formats of weights changed, without a value lost to infinity."""

import torch
from torch import Tensor


def cast(tensor: Tensor, dtype: torch.dtype | None, name: str) -> Tensor:
    """``tensor`` as ``dtype`` (None: as it is).

    Raises ``ValueError`` naming the tensor where finite values are too large for ``dtype``.
    """
    if dtype is None or dtype == tensor.dtype:
        return tensor
    converted = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        lost = tensor[tensor.isfinite() & ~converted.isfinite()]
        if len(lost):
            raise ValueError(
                f"{name}: {len(lost):,} of {tensor.numel():,} values are too large for {dtype} "
                f"(the largest is {float(lost.abs().max()):.3g}); take float32 or bfloat16"
            )
    return converted
