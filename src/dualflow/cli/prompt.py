"""A prompt from an option, a file or what is piped in."""

import argparse
import sys
from pathlib import Path


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Declare ``--prompt`` and ``--prompt-file``."""
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt", metavar="TEXT", help="the text to continue; '' starts a new text"
    )
    prompt.add_argument(
        "--prompt-file", metavar="FILE",
        help="read it from FILE (UTF-8), '-' for standard input; "
        "without either option, what is piped in is read",
    )  # fmt: skip


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt as text. Raises ``ValueError`` where it cannot be read, or is not UTF-8."""
    if args.prompt is not None:
        source, data = "--prompt", args.prompt.encode("utf-8", "surrogateescape")
    elif args.prompt_file == "-" or (args.prompt_file is None and _piped()):
        source, data = "standard input", sys.stdin.buffer.read()
    elif args.prompt_file is not None:
        source = args.prompt_file
        try:
            data = Path(source).read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read the prompt file {source}: {error.strerror}") from error
    else:
        return ""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the prompt from {source} is not UTF-8: "
            f"byte {error.start} is 0x{data[error.start]:02x}"
        ) from error


def _piped() -> bool:
    """Whether something was piped or redirected into the command; a terminal or a closed input is
    not waited for.
    """
    import os
    import stat

    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # no standard input, or one that is not a file
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
