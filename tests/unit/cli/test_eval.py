"""``dualflow eval`` on a tiny model that is saved, loaded and fed with a text."""

import json
import math
from pathlib import Path

import pytest

from dualflow.checkpoint import load_model, save_model
from dualflow.cli.main import main
from dualflow.config import to_dict
from dualflow.data import DataConfig, load_tokenizer
from dualflow.evaluate.loss import evaluate_loss
from dualflow.model import build_model
from dualflow.spec import ModelConfig
from dualflow.testing import tiny_config
from dualflow.train.config import RunConfig, TrainConfig

TEXT = "".join(f"line {number} of a text that is long enough\n" for number in range(40))


def bytes_config(**changes: object) -> ModelConfig:
    size = load_tokenizer("bytes").vocab_size
    return tiny_config("dual", vocab_size=size, **changes)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = load_tokenizer("bytes")
    save_model(build_model(bytes_config()), tmp_path / "m", tokenizer_json=tokenizer.to_json())
    return tmp_path / "m"


def record(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, float]:
    assert main(["eval", *command, "--json", "--device", "cpu"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert main(["eval", *command]) == 2
    message = capsys.readouterr().err
    assert message.startswith("dualflow eval: ")
    assert message.count("\n") == 1
    return message


def test_the_whole_text(model: Path, text: Path, capsys: pytest.CaptureFixture[str]):
    found = record(
        capsys, str(model), "--data", str(text), "--split", "all", "--sequence-length", "64"
    )
    # Every byte but the first is a target, and so is the end of the text.
    assert found["tokens"] == len(TEXT)
    # Bytes are the tokens; the end-of-text token has none.
    bits = found["val_loss"] / math.log(2) * (len(TEXT) + 1) / len(TEXT)
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-9)
    assert found["val_loss_p"] is not None
    assert found["val_loss_q"] is not None


def test_windows_and_batches_of_any_size_see_every_token(
    model: Path, text: Path, capsys: pytest.CaptureFixture[str]
):
    command = (str(model), "--data", str(text), "--split", "all", "--sequence-length", "32")
    one = record(capsys, *command, "--batch-size", "1")
    many = record(capsys, *command, "--batch-size", "7")
    assert one["tokens"] == many["tokens"]
    assert one["val_loss"] == pytest.approx(many["val_loss"], rel=1e-5)


def test_a_run_brings_its_own_data(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = DataConfig(
        source=str(text), tokenizer="bytes", sequence_length=48, validation_fraction=0.25
    )
    run = tmp_path / "run"
    config = RunConfig(name="run", model=bytes_config(), data=data, train=TrainConfig(steps=1))
    run.mkdir()
    (run / "config.json").write_text(json.dumps(to_dict(config)))
    model.rename(run / "model")
    own = record(capsys, str(run))
    assert 0 < own["tokens"] < len(TEXT) / 2
    assert "validation split of" in str(own["data"])

    from dualflow.data import BatchLoader, prepare

    shards = prepare(data).validation
    loader = BatchLoader(shards, 48, 4, seed=0, shuffle=False)
    assert own["val_loss"] == pytest.approx(evaluate_loss(load_model(run), loader).loss, rel=1e-5)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_model_is_measured_quantised_or_quantised_on_the_way(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], weights
):
    options = ("--data", str(text), "--split", "all", "--sequence-length", "64")
    floats = record(capsys, str(model), *options)
    on_the_way = record(capsys, str(model), *options, "--weights", weights)
    tokenizer = load_tokenizer("bytes")
    stored = load_model(model, weights=weights)
    save_model(stored, tmp_path / "stored", tokenizer_json=tokenizer.to_json())
    found = record(capsys, str(tmp_path / "stored"), *options)
    assert found["val_loss"] == on_the_way["val_loss"]
    assert found["val_loss"] == pytest.approx(floats["val_loss"], rel=0.05)
    assert found["val_loss"] != floats["val_loss"]


def test_the_table_names_each_distribution(
    model: Path, text: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["eval", str(model), "--data", str(text), "--split", "all"]) == 0
    printed = capsys.readouterr().out
    for part in (
        "r (the model",
        "p (the primary alone",
        "q (the auxiliary alone)",
        "bits per byte",
    ):
        assert part in printed


def test_a_vocabulary_too_small_is_refused_with_numbers(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    tokenizer = load_tokenizer("bytes").to_json()
    save_model(build_model(tiny_config("dual")), tmp_path / "small", tokenizer_json=tokenizer)
    message = refused(capsys, str(tmp_path / "small"), "--data", str(text), "--split", "all")
    assert "is outside the model's vocabulary of 53 ids" in message


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--sequence-length", "129"], "--sequence-length is 129; expected 1 .. 128"),
        (["--sequence-length", "0"], "--sequence-length is 0; expected 1 .. 128"),
        (["--batch-size", "0"], "--batch-size is 0; expected at least 1"),
    ],
)
def test_sizes_that_do_not_fit(
    model: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    fault: str,
):
    assert fault in refused(capsys, str(model), "--data", str(text), *arguments)


def test_missing_things(model: Path, text: Path, capsys: pytest.CaptureFixture[str]):
    assert "give --data" in refused(capsys, str(model))
    refused(capsys, str(model / "nowhere"), "--data", str(text))
    refused(capsys, str(model), "--data", str(text) + ".gone")
    (model / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in refused(capsys, str(model), "--data", str(text))
