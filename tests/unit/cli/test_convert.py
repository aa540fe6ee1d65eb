"""``dualflow convert``."""

import json
import sys
import warnings

import pytest
import torch

from dualflow.checkpoint import huggingface_text, load_model, save_model
from dualflow.cli.main import main
from dualflow.testing import tiny_config
from dualflow.testing.tensors import tiny_model
from tests.unit.checkpoint.huggingface_folders import write_folder


@pytest.fixture
def folder(tmp_path):
    save_model(tiny_model(tiny_config(), dtype=torch.float32), tmp_path / "model")
    return tmp_path / "model"


def test_what_was_written_is_said_in_a_line(folder, tmp_path, capsys):
    target = tmp_path / "new"
    assert main(["convert", str(folder), str(target), "--dtype", "bfloat16"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{target}: standard model, ")
    assert " parameters, bfloat16, " in shown.out and shown.out.endswith(" kB\n")
    assert shown.err == ""
    assert load_model(target).dtype == torch.bfloat16


def test_the_old_way_to_a_dual_model_is_gone(folder, tmp_path, capsys):
    assert main(["convert", str(folder), str(tmp_path / "new"), "--add-aux"]) == 2
    assert "unknown argument '--add-aux'" in capsys.readouterr().err


def test_quantised_formats_are_named(folder, tmp_path, capsys):
    assert main(["convert", str(folder), str(tmp_path / "q"), "--dtype", "int4"]) == 0
    shown = capsys.readouterr()
    assert ", int4, " in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["MODEL", "MODEL"], "exists already; name a new folder"),
        (["nothing", "new"], "there is no folder nothing"),
        (["MODEL", "new", "--dtype", "int3"], "invalid choice: 'int3'"),
    ],
)
def test_errors_are_one_line_and_exit_2(folder, tmp_path, capsys, monkeypatch, arguments, found):
    monkeypatch.chdir(tmp_path)
    words = [str(folder) if word == "MODEL" else word for word in arguments]
    assert main(["convert", *words]) == 2
    error = capsys.readouterr().err
    assert found in error
    assert error.count("\n") == 1


def test_a_missing_gguf_package_is_named(tmp_path, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert main(["convert", str(tmp_path / "a.gguf"), str(tmp_path / "new")]) == 2
    assert "gguf is needed for reading GGUF files: pip install 'dualflow[gguf]'" in (
        capsys.readouterr().err
    )


def _config(table: dict[str, object]):
    return lambda path: path.mkdir() or (path / "config.json").write_text(json.dumps(table))


@pytest.mark.parametrize("verb", ["convert", "retrofit", "info"])
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (_config({"architectures": ["FooForCausalLM"]}), "FooForCausalLM"),
        (_config({"model_type": "bert", "architectures": ["BertModel"]}), "'bert'"),
        (_config({"model_type": "llama", "architectures": ["A", "B"]}), "expected one"),
        (_config({"hidden_size": 8}), "has no model_type"),
        (lambda path: path.mkdir(), "it is empty"),
        (lambda path: path.write_text("{}"), "is a file"),
        (lambda path: path.write_bytes(b"GGUF"), "not a usable GGUF file"),
        (lambda path: None, "there is no folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line(tmp_path, capsys, verb, make, found):
    """C09: what was found, where, and what is supported."""
    make(tmp_path / "it")
    target = [] if verb == "info" else [str(tmp_path / "new")]
    assert main([verb, str(tmp_path / "it"), *target]) == 2
    error = capsys.readouterr().err
    assert found in error
    assert str(tmp_path / "it") in error
    assert error.count("\n") == 1
    assert "GGUF" in error or "supported: llama" in error
    assert not (tmp_path / "new").exists()


def test_a_warning_is_one_line(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(huggingface_text, "find_extra", lambda _: None)
    write_folder(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.model").write_text("no vocabulary")
    with warnings.catch_warnings():  # as outside of pytest, which would keep it to itself
        warnings.simplefilter("always")
        warnings.showwarning = show_warning
        assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "new")]) == 0
    shown = capfd.readouterr().err.splitlines()
    assert len(shown) == 1
    assert shown[0].startswith("dualflow convert: warning: ")
    assert "tokenizer.model, but no tokenizer.json" in shown[0]


def show_warning(message, category, filename, lineno, file=None, line=None):
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))
