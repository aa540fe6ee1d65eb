"""``dualflow VERB``: finds the verb's module, reads its arguments and turns errors into one line.

A verb is a module ``dualflow.cli.<verb>`` that holds ``HELP`` (one line), ``EXAMPLES`` (whole
command lines), ``configure(parser)`` and ``run(args) -> int``. At its top it imports the standard
library alone, so that ``--help`` is instant; torch and the rest are imported inside ``run``.

Exit codes: 0 done, 1 done but the answer is bad (``doctor``), 2 the user's input cannot be used,
130 interrupted, 141 whoever read the output has left.
"""

import argparse
import difflib
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol, cast

from dualflow import __version__
from dualflow.extras import MissingExtraError

VERBS = (
    "demo", "train", "generate", "chat", "convert", "retrofit", "export", "info", "eval", "compare",
    "data", "doctor", "bench",
)  # fmt: skip

DESCRIPTION = "Train, compare and generate with Dual-Flow Transformers."
EXAMPLES = """\
dualflow demo
dualflow generate --prompt "def main("
dualflow VERB --help
"""


class Verb(Protocol):
    """What a module of this folder offers."""

    HELP: str
    EXAMPLES: str

    def configure(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


class Parser(argparse.ArgumentParser):
    """argparse with exact option names, examples as written, and errors of one line that suggest
    the nearest.
    """

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings)

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown argument {unknown[0]!r}{_nearest(unknown[0], _options(self))}")
        return known

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (``sys.argv`` by default); returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _make_output_safe()
    arguments, debug = _take_debug(arguments)
    # No top-level option takes a value, so the first word without a dash is the verb.
    start = next((i for i, word in enumerate(arguments) if word[:1] != "-"), len(arguments))
    leading, rest = arguments[:start], arguments[start:]
    try:
        if leading:
            asks_for_help = bool({"-h", "--help"} & set(leading))
            _top_parser(with_verbs=asks_for_help).parse_args(leading)
        if not rest:
            _top_parser(with_verbs=True).print_help()
            return 0
        return _run_verb(rest[0], rest[1:], debug)
    except SystemExit as stop:  # argparse's way to end after --help and errors
        return stop.code if isinstance(stop.code, int) else 0


def _run_verb(name: str, arguments: Sequence[str], debug: bool) -> int:
    if name not in VERBS:
        advice = _nearest(name, VERBS) or f"; expected one of: {', '.join(VERBS)}"
        print(f"dualflow: unknown command {name!r}{advice}", file=sys.stderr)
        return 2
    verb = load_verb(name)
    parser = Parser(prog=f"dualflow {name}", description=verb.HELP, epilog=_epilog(verb.EXAMPLES))
    verb.configure(parser)
    _add_debug(parser)
    args = parser.parse_args(arguments)
    try:
        with _clean_interrupts(name), _plain_warnings(name):
            code = verb.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"\ndualflow {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has left, as in `dualflow data info | head`
        # What is still buffered goes nowhere; otherwise Python complains about it on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, MissingExtraError, MemoryError, RuntimeError) as error:
        if debug or (isinstance(error, RuntimeError) and not _is_out_of_memory(error)):
            raise
        print(f"dualflow {name}: {describe_error(error)}", file=sys.stderr)
        return 2


@contextmanager
def _clean_interrupts(verb: str) -> Iterator[None]:
    """Let Ctrl-C end the process at once while torch is being imported.

    An exception raised there may meet C++ code that has no way to pass it on and aborts.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        spec = getattr(sys.modules.get("torch"), "__spec__", None)
        if getattr(spec, "_initializing", False):
            os.write(2, f"\ndualflow {verb}: interrupted\n".encode())
            os._exit(130)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _plain_warnings(verb: str) -> Iterator[None]:
    """Show our own warnings as one line each, without the line of code that they came from."""
    usual, ours = warnings.formatwarning, str(Path(__file__).parents[1])

    def plain(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        line: str | None = None,
    ) -> str:  # fmt: skip
        if category is UserWarning and filename.startswith(ours):
            return f"dualflow {verb}: warning: {' '.join(str(message).split())}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual


def load_verb(name: str) -> Verb:
    """The module of the verb ``name``, one of ``VERBS``."""
    return cast(Verb, importlib.import_module(f"dualflow.cli.{name}"))


def describe_error(error: BaseException) -> str:
    """``error`` in one line for the person who typed the command."""
    if isinstance(error, MemoryError | RuntimeError):
        detail = " ".join(str(error).split())[:200]
        return "not enough memory; make the model, the batch or the windows smaller" + (
            f" ({detail})" if detail else ""
        )
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch found no memory, which it says with a plain ``RuntimeError`` on a CPU."""
    text = str(error)
    return any(
        sign in text
        for sign in ("allocate memory", "out of memory", "Storage size calculation overflowed")
    )


def _top_parser(with_verbs: bool) -> Parser:
    """The parser of what stands before the verb; ``with_verbs`` lists the verbs, which imports
    their modules.
    """
    listing = ""
    if with_verbs:
        listing = "".join(f"\n  {name:<10}{load_verb(name).HELP}" for name in VERBS)
    parser = Parser(
        prog="dualflow",
        usage="dualflow [--debug] VERB ...",
        description=f"{DESCRIPTION}\n\nverbs:{listing}",
        epilog=_epilog(EXAMPLES),
    )
    parser.add_argument("--version", action="version", version=f"dualflow {__version__}")
    _add_debug(parser)
    return parser


def _add_debug(parser: Parser) -> None:
    """For the help text: ``_take_debug`` has already read and removed it."""
    parser.add_argument("--debug", action="store_true", help="show the whole traceback of an error")


def _take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """The arguments without ``--debug``, which may stand anywhere before a ``--``, and whether it
    was there.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    head = [word for word in arguments[:end] if word != "--debug"]
    return head + arguments[end:], len(head) < end


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Every option name of ``parser`` and of its sub-commands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _options(inner)


def _epilog(examples: str) -> str:
    lines = examples.strip().splitlines()
    return "\n".join(
        [f"example{'s' if len(lines) > 1 else ''}:", *(f"  {line.strip()}" for line in lines)]
    )


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word.partition("=")[0], list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _make_output_safe() -> None:
    """A terminal that cannot show α or − gets an escape in its place, and an output that is closed
    takes everything, so neither ends in an error in the middle of a run.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed, as by `>&-`
            devnull = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(devnull, "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
