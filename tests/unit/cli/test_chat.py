"""``dualflow chat``: turns, commands, and Ctrl-C that stops an answer and nothing more."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dualflow.cli import chat
from dualflow.cli.chat import Chat
from dualflow.cli.main import main
from dualflow.cli.serving import load_llm
from tests.unit.cli.models import save_tiny

FIELDS = {"max_tokens": 4, "temperature": 0.0, "aux": "on", "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny(tmp_path_factory.mktemp("chat") / "model", chat=True))


@pytest.fixture
def talk(model: Path) -> Chat:
    return Chat(load_llm(model, device="cpu"), FIELDS, None)


def test_an_answer_is_streamed_with_its_figures_and_remembered(talk, capfd):
    assert talk.take("hello")
    out, err = capfd.readouterr()
    assert "auxiliary at 4 of" in err
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]
    assert out == talk.messages[1]["content"] + "\n"
    assert talk.take("again")
    assert [message["content"] for message in talk.messages][::2] == ["hello", "again"]
    assert len(talk.messages) == 4


def test_a_later_turn_reads_what_was_said_before_from_the_cache(model, capfd):
    llm = load_llm(model, device="cpu", page_size=4)
    talk = Chat(llm, FIELDS, "Be brief.")
    talk.take("hello")
    talk.take("again")
    assert "of the prompt known" in capfd.readouterr().err
    assert talk.messages[0] == {"role": "system", "content": "Be brief."}


def test_reset_forgets_all_but_what_the_model_was_told_first(model, capfd):
    talk = Chat(load_llm(model, device="cpu"), FIELDS, "Be brief.")
    talk.take("hello")
    assert talk.take("/reset")
    assert talk.messages == [{"role": "system", "content": "Be brief."}]


def test_the_policy_of_the_auxiliary_is_changed_between_answers(talk, capfd):
    assert talk.take("/aux off") and talk.take("hello")
    assert "auxiliary at 0 of" in capfd.readouterr().err
    assert talk.take("/aux sometimes") and talk.take("/aux")
    err = capfd.readouterr().err
    assert "aux is 'sometimes'; expected on, off, exact" in err and "aux is off; /aux on" in err
    assert talk.take("/aux exact") and talk.take("hello")


def test_commands_help_quit_and_unknown_ones(talk, capfd):
    assert talk.take("/help") and talk.take("/rest") and talk.take("   ")
    err = capfd.readouterr().err
    assert "/reset" in err and "there is no command /rest" in err
    assert talk.take("//etc is a folder")
    assert talk.messages[0]["content"] == "/etc is a folder"
    assert not talk.take("/quit")


def test_control_tokens_that_are_typed_stay_text(talk, capfd):
    talk.take("<|im_end|>")
    # The name is 10 plain bytes; the template adds 3 control tokens and 16 bytes.
    assert "29 prompt +" in capfd.readouterr().err
    assert talk.messages[0]["content"] == "<|im_end|>"


def test_a_conversation_that_grows_too_long_is_told_and_unchanged(talk, capfd):
    assert talk.take("x" * 200)
    assert "128 positions; nothing was said (/reset forgets" in capfd.readouterr().err
    assert talk.messages == []
    assert talk.take("short")
    assert len(talk.messages) == 2


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(model, capfd, monkeypatch):
    llm = load_llm(model, device="cpu")
    talk = Chat(llm, {**FIELDS, "max_tokens": 60}, None)
    step, steps = llm.engine.step, 0

    def interrupted() -> Any:
        nonlocal steps
        steps += 1
        if steps == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    assert talk.take("hello")
    assert steps == 5
    assert "stopped" in capfd.readouterr().err
    assert talk.messages[-1]["role"] == "assistant"
    stats = llm.engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    talk._fields["max_tokens"] = 4
    assert talk.take("again")
    assert len(talk.messages) == 4


def test_ctrl_c_while_typing_drops_the_line(monkeypatch, capfd):
    lines = iter(["one", KeyboardInterrupt(), "two", EOFError()])

    def read(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr("builtins.input", read)
    assert list(chat._lines()) == ["one", "two"]
    assert "Ctrl-D ends the conversation" in capfd.readouterr().err


def test_lines_may_be_piped_in(model, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/aux off\nagain\n/quit\nnever\n"))
    code = main(["chat", str(model), "--device", "cpu", "--max-tokens", "3", "--ignore-eos"])
    err = capfd.readouterr().err
    assert code == 0
    assert "is listening; /help says how" in err
    assert err.count("new tokens") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n", "2"], "--n is 2; a conversation goes on from one answer"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--logprobs", "1"], "--logprobs has no place in a conversation"),
        (["--prompt-logprobs", "1"], "--prompt-logprobs has no place in a conversation"),
    ],
)
def test_options_that_cannot_be_used_are_one_line(model, capfd, arguments, message):
    assert main(["chat", str(model), "--device", "cpu", *arguments]) == 2
    assert message in capfd.readouterr().err


def test_the_model_must_be_named(capfd):
    assert main(["chat"]) == 2
    assert "required: MODEL" in capfd.readouterr().err


def test_a_model_without_a_template_cannot_chat(tmp_path, capfd):
    plain = save_tiny(tmp_path / "plain")
    assert main(["chat", plain, "--device", "cpu"]) == 2
    assert "no chat template" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_in_a_real_process_stops_the_answer_alone(tmp_path):
    model = save_tiny(tmp_path / "model", chat=True, max_position=100_000)
    command = [sys.executable, "-m", "dualflow", "chat", model, "--device", "cpu", "--ignore-eos"]
    process = subprocess.Popen(
        [*command, "--max-tokens", "90000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    assert process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    _, err = process.communicate(b"/quit\n", timeout=60)
    assert process.returncode == 0, err
    assert b"stopped" in err and b"Traceback" not in err
