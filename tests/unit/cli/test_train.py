"""The arguments of ``dualflow train``; whole runs are in tests/e2e/test_resume.py."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dualflow.checkpoint import save_model
from dualflow.checkpoint.retrofit import add_aux
from dualflow.cli.main import main
from dualflow.config import to_toml
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.model import build_model
from dualflow.spec import parameter_counts
from dualflow.testing.configs import tiny_config
from dualflow.testing.runs import tiny_run_config, write_tiny_text


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    config = tiny_run_config(write_tiny_text(tmp_path), "small", train={"steps": 3})
    Path("run.toml").write_text(to_toml(config))
    return "run.toml"


def test_print_config_is_toml_that_reads_back(run_file: str, capsys) -> None:
    assert main(["train", run_file, "--set", "train.steps=9", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["train"]["steps"] == 9
    Path("printed.toml").write_text(printed)
    assert main(["train", "printed.toml", "--print-config"]) == 0
    assert capsys.readouterr().out == printed


def test_print_config_does_not_load_torch(run_file: str) -> None:
    program = (
        "import sys; from dualflow.cli.main import main; "
        f"code = main(['train', {run_file!r}, '--print-config']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_dry_run_prints_the_plan_and_writes_nothing(run_file: str, capsys) -> None:
    before = sorted(Path().iterdir())
    assert main(["train", run_file, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "parameters: " in shown
    assert "auxiliary" in shown
    assert "tokens: 192 = 3 steps x 4 sequences x 16" in shown
    assert "training FLOPs: " in shown
    assert "hidden: muon" in shown
    assert "model.aux.0.embed_tokens.weight [259, 32]" in shown
    assert sorted(Path().iterdir()) == before


def test_training_prints_the_result_and_resuming_a_finished_run_prints_it_again(
    run_file: str, capsys
) -> None:
    assert main(["train", run_file, "--runs", "out"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("small: 3 steps, 192 tokens")
    assert f"model in {Path('out/small/model')}" in printed
    assert main(["train", "--resume", "out/small"]) == 0
    assert capsys.readouterr().out == printed
    assert main(["train", run_file, "--runs", "out"]) == 2
    assert "finished run" in capsys.readouterr().err
    assert main(["train", run_file, "--runs", "out", "--overwrite"]) == 0


def test_a_run_can_be_resumed_by_its_name_and_after_it_was_moved(run_file: str, capsys) -> None:
    assert main(["train", run_file]) == 0
    assert main(["train", "--resume", "small"]) == 0
    Path("runs/small").rename("moved")
    assert main(["train", "--resume", "moved"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to train: give CONFIG.toml, --recipe NAME or --resume RUN"),
        (["none.toml"], "cannot read the configuration none.toml"),
        (["run.toml", "--set", "train.stesp=4"], "train.stesp: unknown key; did you mean 'steps'"),
        (["run.toml", "--set", "steps"], "expected KEY=VALUE"),
        (["--resume", "runs/none"], "there is no run in runs/none"),
        (["run.toml", "--resume", "runs/none"], "leave out CONFIG"),
        (["run.toml", "--set", "data.source=none.txt"], "none.txt"),
        (["--recipe", "no-such-recipe"], "no-such-recipe"),
        (["run.toml", "--set", "train.threads=100000000"], "threads is 100000000; expected at"),
        (["run.toml", "--set", f"seed={10**30}"], "seed: expected an integer of at most 64 bits"),
        (["run.toml", "--set", "seed=" + "[" * 9999], "seed: expected an integer, found '[["),
        (["run.toml", "--runs", "run.toml"], "run.toml is a file; expected the folder"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    run_file: str, capsys, arguments: list[str], message: str
) -> None:
    assert main(["train", *arguments]) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert len(shown) == 1
    assert shown[0].startswith("dualflow train: ")
    assert message in shown[0]
    assert not Path("runs").exists()


def test_training_and_generating_open_no_connection(run_file: str) -> None:
    program = (
        "import socket, sys\n"
        "def refuse(*_): raise AssertionError('a connection was opened')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from dualflow.cli.main import main\n"
        f"code = main(['train', {run_file!r}])\n"
        "sys.exit(code or main(['generate', 'runs/small', '--prompt', 'a', '--max-tokens', '2']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def begun_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run that begins from a retrofitted model."""
    monkeypatch.chdir(tmp_path)
    text = write_tiny_text(tmp_path)
    model = add_aux(build_model(tiny_config("standard", vocab_size=259, init_std=0.02)))
    save_model(model, "dual", tokenizer_json=bytes_tokenizer().to_json())
    Path("begun.toml").write_text(f"""
initial_model = "dual"
[data]
source = {str(text)!r}
sequence_length = 16
[train]
trainable = "aux"
steps = 2
batch_size = 4
threads = 1
compile = "off"
tensorboard = "off"
""")
    return "begun.toml"


def test_dry_run_says_what_is_trained_and_what_that_costs(begun_file: str, capsys) -> None:
    assert main(["train", begun_file, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    aux = parameter_counts(tiny_config("dual", vocab_size=259)).aux
    assert "begun: dual, seed 0, begun from dual" in shown
    assert f"trained: {aux:,} (the auxiliary alone)" in shown
    assert re.search(r"training FLOPs: .* per token, \d\d% of training everything\)", shown)
    assert "model.embed_tokens.weight" not in shown


def test_a_run_begun_from_a_model_is_summed_up_and_resumed(begun_file: str, capsys) -> None:
    assert main(["train", begun_file, "--set", "model.readout.kind=aux_only"]) == 0
    printed = capsys.readouterr().out
    assert "(before training r " in printed
    assert " parameters trained at " in printed
    assert main(["train", "--resume", "runs/begun"]) == 0
    assert capsys.readouterr().out == printed
    assert main(["eval", "runs/begun"]) == 0


def test_another_initial_model_is_one_line(begun_file: str, capsys) -> None:
    assert main(["train", begun_file, "--set", "initial_model=nowhere"]) == 2
    message = capsys.readouterr().err.strip()
    assert message.count("\n") == 0
    assert "initial_model: there is no folder nowhere" in message


def test_a_frozen_primary_has_to_come_from_somewhere(run_file: str, capsys) -> None:
    assert main(["train", run_file, "--set", "train.trainable=aux"]) == 2
    assert "there is no initial_model" in capsys.readouterr().err
