"""The ``--device`` option of the verbs that run a trained model."""

import argparse


def add_device_option(parser: argparse._ActionsContainer) -> None:
    """Declare ``--device``."""
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="default: auto"
    )
