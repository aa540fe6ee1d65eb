"""Where a model runs."""

import torch


def pick_device(name: str) -> str:
    """``name``, or for ``auto`` the accelerator where there is one. Raises ``ValueError`` where a
    device is asked for that is not there.
    """
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return next(device for device, usable in there.items() if usable)
    if not there[name]:
        usable = ", ".join(device for device, is_there in there.items() if is_there)
        raise ValueError(f"device is {name!r}, and there is none here; usable: {usable}")
    return name
