import functools
from pathlib import Path

import pytest
import torch

from dualflow.train import compilation
from dualflow.train.compilation import compile_loss, find_cpp_compiler


def loss(tokens, targets, documents):
    return tokens.sum()


def trial(function) -> None:
    function(torch.ones(3), None, None)


def broken(*_args: object, **_settings: object):
    def compiled(*_: object):
        raise RuntimeError("no\nheaders")

    return compiled


def test_off_is_the_function_itself_without_a_trial() -> None:
    done = compile_loss(loss, "off", broken())
    assert done.function is loss
    assert not done.is_compiled


def test_auto_without_a_compiler_is_eager_with_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    done = compile_loss(loss, "auto", trial)
    assert done.function is loss
    assert "no working C++ compiler" in done.note


def test_a_compiler_that_cannot_compile_counts_as_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "g++"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert find_cpp_compiler() is None


def test_a_failing_compilation_leads_back_to_eager_in_auto_and_is_an_error_in_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compilation, "find_cpp_compiler", lambda: "g++")
    monkeypatch.setattr(torch, "compile", broken)
    done = compile_loss(loss, "auto", trial)
    assert done.function is loss
    assert done.note == "eager: torch.compile failed (RuntimeError: no headers)"
    with pytest.raises(ValueError, match="RuntimeError: no headers.*set train.compile to 'off'"):
        compile_loss(loss, "on", trial)


def test_a_working_compilation_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    done = compile_loss(loss, "on", trial)
    assert done.is_compiled
    assert float(done.function(torch.ones(2), None, None)) == 2.0  # type: ignore[arg-type]
