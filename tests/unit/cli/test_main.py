"""The front door: verbs, help, errors in one line, exit codes."""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from dualflow import __version__
from dualflow.cli import main as front
from dualflow.cli.main import VERBS, load_verb, main
from dualflow.extras import MissingExtraError

HEAVY = ("torch", "numpy", "rich", "tokenizers", "safetensors", "matplotlib", "transformers")


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """Puts a function in the place of the verb ``train``."""

    def install(run: Callable[[argparse.Namespace], int]) -> None:
        def configure(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("words", nargs="*")
            parser.add_argument("--steps", type=int, default=1)

        module = SimpleNamespace(HELP="h", EXAMPLES="dualflow train", configure=configure, run=run)
        monkeypatch.setattr(front, "load_verb", lambda name: module)

    return install


def raising(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_offers_help_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verb = load_verb(name)
    assert verb.HELP and "\n" not in verb.HELP
    assert all(f"dualflow {name}" in line for line in verb.EXAMPLES.strip().splitlines())
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"dualflow {name}" in shown.partition("example")[2]
    assert "--debug" in shown


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in VERBS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from dualflow.cli.main import main; code = main(sys.argv[1:]);"
        f"print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


def test_help_is_quick() -> None:
    def seconds(*arguments: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        return time.perf_counter() - start

    bare = min(seconds("-c", "pass") for _ in range(3))
    assert min(seconds("-m", "dualflow", "--help") for _ in range(3)) < bare + 1.0


def test_the_overview_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(f"\n  {name} " in overview for name in VERBS)
    assert main([]) == 0
    assert capsys.readouterr().out == overview


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dualflow {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "dualflow: unknown command 'trian'; did you mean 'train'?"),
        (["--debug", "generat"], "dualflow: unknown command 'generat'; did you mean 'generate'?"),
        (["xyz"], "dualflow: unknown command 'xyz'; expected one of: demo, train"),
        (["--versoin"], "dualflow: unknown argument '--versoin'; did you mean '--version'?"),
        (["doctor", "--jsn"], "dualflow doctor: unknown argument '--jsn'; did you mean '--json'?"),
        (["doctor", "--js"], "dualflow doctor: unknown argument '--js'"),
        (["doctor", "extra"], "dualflow doctor: unknown argument 'extra'"),
    ],
)
def test_mistyped_commands_are_one_line_with_the_nearest(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("steps is -1; expected 1 or more"), "steps is -1; expected 1 or more"),
        (ValueError("two\n  lines"), "two lines"),
        (ValueError(), "ValueError"),
        (FileNotFoundError(2, "No such file or directory", "run.toml"), "run.toml: No such file"),
        (PermissionError(13, "Permission denied", "/x"), "/x: Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (MissingExtraError("gguf is needed"), "gguf is needed"),
        (MemoryError("745 GiB"), "not enough memory; make the model, the batch or the windows"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: x"), "not enough memory"),
        (RuntimeError("Storage size calculation overflowed with sizes=[1]"), "not enough memory"),
    ],
)
def test_errors_for_people_are_one_line_and_exit_2(
    verb, error: Exception, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verb(raising(error))
    assert main(["train"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"dualflow train: {message}")
    assert shown.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--debug", "train"], ["train", "--debug"]])
def test_debug_shows_the_traceback(verb, arguments: list[str]) -> None:
    verb(raising(ValueError("x")))
    with pytest.raises(ValueError, match="x"):
        main(arguments)


def test_debug_after_two_dashes_is_a_word(verb) -> None:
    seen: list[str] = []
    verb(lambda args: seen.extend(args.words) or 0)
    assert main(["train", "--", "--debug"]) == 0
    assert seen == ["--debug"]


@pytest.mark.parametrize("bug", [KeyError("x"), RuntimeError("x")])
def test_a_bug_is_not_hidden(verb, bug: Exception) -> None:
    verb(raising(bug))
    with pytest.raises(type(bug)):
        main(["train"])


def test_arguments_and_exit_code_are_the_verbs(verb) -> None:
    verb(lambda args: args.steps)
    assert main(["train", "--steps", "5"]) == 5


def test_a_bad_value_is_one_line(verb, capsys: pytest.CaptureFixture[str]) -> None:
    verb(lambda args: 0)
    assert main(["train", "--steps", "many"]) == 2
    assert capsys.readouterr().err == (
        "dualflow train: argument --steps: invalid int value: 'many'; see dualflow train --help\n"
    )


def test_an_interruption_exits_130(verb, capsys: pytest.CaptureFixture[str]) -> None:
    verb(raising(KeyboardInterrupt()))
    assert main(["train"]) == 130
    assert capsys.readouterr().err.strip() == "dualflow train: interrupted"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = """
import sys, time, types
from dualflow.cli import main as front
def run(args):
    time.sleep(0.3)
    print("more than nobody wants to read")
    return 0
front.load_verb = lambda name: types.SimpleNamespace(
    HELP="", EXAMPLES="x", configure=lambda parser: None, run=run)
sys.exit(front.main(["train"]))
"""
    command = f"{sys.executable} -c '{code}' | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("141", "")


def test_output_survives_a_terminal_without_unicode() -> None:
    code = "from dualflow.cli.main import main; main(['--version']); print('α − β')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
        timeout=60,
    )
    assert done.returncode == 0
    assert b"\\u03b1" in done.stdout


def test_a_closed_output_is_no_error() -> None:
    command = f"{sys.executable} -m dualflow doctor --json >&- 2>&- <&-"
    assert subprocess.run(["bash", "-c", command], timeout=60).returncode == 0


def test_ctrl_c_while_torch_is_imported_ends_in_one_line() -> None:
    code = """
import os, signal, sys, types
from dualflow.cli import main as front
def run(args):
    torch = types.ModuleType("torch")
    torch.__spec__ = types.SimpleNamespace(_initializing=True)
    sys.modules["torch"] = torch
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        os.abort()
    return 0
front.load_verb = lambda name: types.SimpleNamespace(
    HELP="", EXAMPLES="x", configure=lambda parser: None, run=run)
sys.exit(front.main(["train"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (130, "dualflow train: interrupted")


def test_the_handler_of_ctrl_c_is_put_back(verb) -> None:
    before = signal.getsignal(signal.SIGINT)
    verb(lambda args: 0)
    assert main(["train"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
