"""``dualflow convert``."""

import pytest
import torch

from dualflow.checkpoint import load_model, save_model
from dualflow.cli.main import main
from dualflow.testing import tiny_config
from dualflow.testing.tensors import tiny_model


@pytest.fixture
def folder(tmp_path):
    save_model(tiny_model(tiny_config(), dtype=torch.float32), tmp_path / "model")
    return tmp_path / "model"


def test_a_dual_model_in_bfloat16(folder, tmp_path, capsys):
    target = tmp_path / "dual"
    assert main(["convert", str(folder), str(target), "--dtype", "bfloat16", "--add-aux"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{target}: dual model, ")
    assert "of the auxiliary flow, bfloat16, 0.0 MB" in shown.out
    assert shown.err.startswith("the auxiliary flow is not trained yet")
    assert "--aux off leaves it out" in shown.err
    assert load_model(target).config.variant == "dual"


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
