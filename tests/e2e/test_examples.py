"""The examples run as they are, offline, and on what is named."""

import ast
import json
import re
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from dualflow.checkpoint import load_model, load_tensors

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Run an example as a program would; returns what it printed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def losses(printed: str) -> list[float]:
    """Before and after."""
    line = re.search(r"^loss ([\d.]+) before, ([\d.]+) after$", printed, re.M)
    assert line is not None, printed
    return [float(loss) for loss in line.groups()]


def folder_named_in(printed: str) -> Path:
    return Path(printed.rsplit("the trained model: ", 1)[1].strip())


def assert_primary_is_the_sources(trained: Path, source: Path) -> None:
    tensors, expected = load_tensors(trained / "model.safetensors"), load_tensors(source)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in expected.items())


def test_a_retrofitted_model_learns(run, tmp_path: Path) -> None:
    printed = run("retrofit_your_model.py")
    before, after = losses(printed)
    assert after < before - 0.1
    trained = folder_named_in(printed)
    assert load_model(trained).config.readout.kind == "learned"
    assert_primary_is_the_sources(trained, trained.parents[2] / "llama" / "model.safetensors")


def test_the_number_of_steps_can_be_said(run, tmp_path: Path) -> None:
    run("retrofit_your_model.py")
    (made,) = tmp_path.glob("dualflow-example-*")
    paths = [str(made / "llama"), str(made / "text.txt"), str(tmp_path / "out")]
    printed = run("retrofit_your_model.py", *paths, "3")
    result = json.loads((tmp_path / "out/auxiliary/result.json").read_text(encoding="utf-8"))
    assert result["steps"] == 3
    assert folder_named_in(printed) == tmp_path / "out/auxiliary/model"
    with pytest.raises(SystemExit, match="STEPS is 'few'; expected a whole number from 1 on"):
        run("retrofit_your_model.py", *paths, "few")


def test_a_stopped_run_says_how_to_go_on(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt("stopped and saved at step 3")

    monkeypatch.setattr("dualflow.train.train", stopped)
    with pytest.raises(SystemExit, match="stopped and saved at step 3"):
        run("retrofit_your_model.py")


def test_retrofitting_takes_twenty_lines() -> None:
    text = (EXAMPLES / "retrofit_your_model.py").read_text(encoding="utf-8")
    body = ast.parse(text).body[1:]  # after the docstring
    lines = text.splitlines()[body[0].lineno - 1 :]
    assert sum(1 for line in lines if line.strip() and not line.lstrip().startswith("#")) <= 20


def test_the_trainer_trains_a_retrofitted_model_that_transformers_then_loads(run) -> None:
    printed = run("train_with_trainer.py")
    before, after = losses(printed)
    assert after < before - 0.05
    trained = folder_named_in(printed)
    source = trained.parents[1] / "llama" / "model.safetensors"
    assert_primary_is_the_sources(trained, source)
    assert load_model(trained).config.variant == "dual"
    generated = run("load_in_transformers.py", str(trained), "The dog")
    assert generated.count("The dog") == 8
    assert "primary alone: ['The dog" in generated


def test_loading_needs_no_arguments_and_shows_a_lora(run, tmp_path: Path) -> None:
    printed = run("load_in_transformers.py")
    assert printed.count("The cat") == 8
    (made,) = tmp_path.glob("dualflow-example-*")
    aux = load_model(made / "dual").config.aux
    assert aux is not None
    assert aux.lora_rank == 4


def test_each_result_is_printed_before_the_next_is_made(
    run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GenerationMixin

    from dualflow.integrations.transformers import DualFlowForCausalLM

    generate: Any = vars(GenerationMixin)["generate"]

    def until_beams(*args: Any, **options: Any) -> Any:
        if "num_beams" in options:
            raise RuntimeError("no beams")
        return generate(*args, **options)

    monkeypatch.setattr(DualFlowForCausalLM, "generate", until_beams)
    with pytest.raises(RuntimeError, match="no beams"):
        run("load_in_transformers.py")
    printed = capsys.readouterr().out
    assert "greedy: ['The cat" in printed
    assert "drawn: ['The cat" in printed


def test_too_few_arguments_are_told(run) -> None:
    with pytest.raises(SystemExit, match=r"give MODEL TEXT OUT \[STEPS\]"):
        run("train_with_trainer.py", "model")
