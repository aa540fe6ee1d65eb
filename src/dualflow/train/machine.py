"""The machine a run has: device, threads, number format, memory allocator."""

import ctypes
import platform
from contextlib import nullcontext

import torch

from dualflow.train.config import TrainConfig
from dualflow.train.parallel import local_rank
from dualflow.train.step import Autocast

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30


def choose_device(wanted: str) -> torch.device:
    """The device of this rank: ``auto`` prefers CUDA, then Apple's GPU, then the CPU. Raises
    ``ValueError``.
    """
    if wanted == "auto":
        wanted = (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"train.device is {wanted!r}, but PyTorch sees no CUDA device; use auto or cpu"
        )
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise ValueError("train.device is 'mps', but PyTorch sees no Apple GPU; use auto or cpu")
    device = torch.device(wanted)
    if device.type == "cuda":
        device = torch.device("cuda", local_rank() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def set_up_machine(config: TrainConfig) -> None:
    """Set this process's CPU threads, and let glibc keep the memory that each step frees."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Tell glibc to reuse large blocks instead of giving them back: a step's temporaries then cause
    no page faults.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * _KEPT_BYTES - 1)


def autocast_for(precision: str, device: torch.device) -> Autocast:
    """The context of the forward pass: bf16 autocast or nothing. Weights and optimizer state are
    float32 either way.
    """
    if precision == "bf16":
        return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext
