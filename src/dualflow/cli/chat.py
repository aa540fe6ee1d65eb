"""``dualflow chat``: talk with a model in the terminal."""

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dualflow.cli.figures import figures_line, figures_of
from dualflow.cli.interrupts import stop_request
from dualflow.cli.request_fields import build_params
from dualflow.cli.request_options import (
    add_engine_options,
    add_model_argument,
    add_request_options,
    engine_settings,
    model_folder,
    request_fields,
)
from dualflow.cli.serving import load_llm, stream

if TYPE_CHECKING:
    from dualflow.engine.llm import LLM

HELP = "talk in the terminal with a model that has a chat template"

EXAMPLES = """\
  dualflow chat models/smollm2-dual
  dualflow chat models/smollm2-dual --system 'Answer in one sentence.' --aux exact --temperature 0
"""

COMMANDS = """\
/help         show this
/reset        forget the conversation
/aux POLICY   when the auxiliary flow runs: on, off, exact or threshold=T
/quit         end (so does Ctrl-D); Ctrl-C stops an answer
//...         say what follows, with one slash"""

PROMPT = "> "


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_model_argument(parser, required=True)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    add_request_options(parser, max_tokens=512)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answers go to standard output, everything else to standard error."""
    fields = request_fields(args)
    if args.n != 1:
        raise ValueError(f"--n is {args.n}; a conversation goes on from one answer")
    for option in ("logprobs", "prompt_logprobs"):
        if getattr(args, option) is not None:
            name = option.replace("_", "-")
            raise ValueError(f"--{name} has no place in a conversation; dualflow generate has it")
    build_params(fields)
    settings = engine_settings(args)
    with model_folder(args.model) as folder:
        llm = load_llm(folder, chats=True, max_running=1, **settings)
    chat = Chat(llm, fields, args.system)
    _note(f"{args.model} is listening; /help says how")
    for line in _lines():
        if not chat.take(line):
            break
    return 0


class Chat:
    """A conversation and how its answers are sampled."""

    def __init__(self, llm: "LLM", fields: dict[str, Any], system: str | None) -> None:
        self._llm, self._fields = llm, dict(fields)
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._first)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far."""
        return list(self._messages)

    def take(self, line: str) -> bool:
        """Do what a line says; False: it ends the conversation."""
        if not line.strip():
            return True
        if line.startswith("/") and not line.startswith("//"):
            return self._command(line)
        self._answer(line[1:] if line.startswith("//") else line)
        return True

    def _command(self, line: str) -> bool:
        name, _, value = line.strip().partition(" ")
        if name == "/quit":
            return False
        if name == "/help":
            _note(COMMANDS)
        elif name == "/reset":
            self._messages = list(self._first)
            _note("the conversation is forgotten")
        elif name == "/aux":
            self._set_aux(value.strip())
        else:
            _note(f"there is no command {name}; /help lists them, // begins a message with a slash")
        return True

    def _set_aux(self, value: str) -> None:
        if not value:
            _note(f"aux is {self._fields['aux']}; /aux on, off, exact or threshold=T changes it")
            return
        try:
            build_params({**self._fields, "aux": value})
        except ValueError as error:
            _note(str(error))
            return
        self._fields["aux"] = value
        _note(f"aux is {value}")

    def _answer(self, text: str) -> None:
        """Stream the answer to ``text``. Where it fails, what was said counts as not said; where it
        is stopped, the answer is what was written by then.
        """
        from dualflow.engine.outputs import FinishEvent, PromptEvent

        messages = [*self._messages, {"role": "user", "content": text}]
        written: list[str] = []
        try:
            ids = self._llm.encode_chat(messages)
            events = stream(self._llm, ids, build_params(self._fields))
        except ValueError as error:
            _note(f"{error}; nothing was said (/reset forgets the conversation)")
            return
        with stop_request() as stop:
            for event in events:
                if isinstance(event, PromptEvent):
                    continue
                written.append(event.text)
                print(event.text, end="", flush=True)
                if isinstance(event, FinishEvent):
                    print(flush=True)
                    if event.reason == "error":
                        _note(f"the answer failed: {event.error}; nothing was said")
                        return
                    _note(figures_line(figures_of(self._llm.engine, event), event.reason))
                elif stop.asked:
                    break
            if stop.asked:
                events.close()  # type: ignore[attr-defined]
                print(flush=True)
                _note("stopped")
        self._messages = [*messages, {"role": "assistant", "content": "".join(written)}]


def _lines() -> Iterator[str]:
    """What the user types, to the end of input. Ctrl-C drops the line that is being typed."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import contextlib

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() then knows arrow keys and history
    while True:
        try:
            yield input(PROMPT if is_terminal else "")
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise ValueError(f"what was typed is not UTF-8: byte {error.start}") from error
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print(flush=True)
            _note("/quit or Ctrl-D ends the conversation")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
