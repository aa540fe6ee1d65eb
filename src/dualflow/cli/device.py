"""The ``--device`` option of the verbs that run a trained model."""

import argparse


def add_device_option(parser: argparse._ActionsContainer) -> None:
    """Declare ``--device``."""
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="default: auto"
    )


def pick_device(name: str) -> str:
    """The device to run on. Raises ``ValueError`` where it is asked for and not there."""
    import torch

    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return next(device for device, usable in there.items() if usable)
    if not there[name]:
        usable = ", ".join(device for device, is_there in there.items() if is_there)
        raise ValueError(f"--device {name}: there is none here; usable: {usable}")
    return name
