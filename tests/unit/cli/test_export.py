"""``dualflow export``: every form read back by whoever it is for."""

import dataclasses
from pathlib import Path

import pytest
import torch

from dualflow.checkpoint import load_model, save_model
from dualflow.checkpoint.convert import convert, read_model, retrofit
from dualflow.cli.main import main
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.spec import ModelConfig
from dualflow.testing.tensors import same, tiny_model

CONFIG = ModelConfig(
    vocab_size=259, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
    intermediate_size=64, max_position=64,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dual model that was trained a little, with a text beside it."""
    metrics = {"val_loss": 2.5}
    source = tiny_model(CONFIG, dtype=torch.float32)
    tokenizer = bytes_tokenizer().to_json()
    save_model(source, tmp_path / "source", tokenizer_json=tokenizer, metrics=metrics)
    retrofit(tmp_path / "source", tmp_path / "dual")
    return tmp_path / "dual"


def export(folder: Path, target: Path, form: str, *options: str) -> int:
    return main(["export", str(folder), str(target), "--format", form, *options])


def test_the_primary_as_a_hugging_face_folder_comes_back_bit_for_bit(folder, tmp_path, capsys):
    assert export(folder, tmp_path / "stock", "huggingface") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{tmp_path / 'stock'}: Hugging Face folder of the primary, ")
    assert shown.err == (
        "the primary alone was written, without the auxiliary flow "
        "(validation loss: p, which this is, 2.5000, r 2.5000)\n"
    )
    back = read_model(tmp_path / "stock")
    source = load_model(tmp_path / "source")
    for name, tensor in source.state_dict().items():
        assert same(back.model.state_dict()[name], tensor), name
    assert "tokenizer.json" in back.companions


def test_transformers_reads_the_stock_folder(folder, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    options = ("--dtype", "bfloat16")
    assert export(folder, tmp_path / "stock", "huggingface", *options) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stock", dtype="auto")
    assert type(model).__module__.startswith("transformers.models.")
    assert model.dtype == torch.bfloat16
    ours = load_model(tmp_path / "source").model.embed_tokens.weight
    assert same(model.get_input_embeddings().weight.data, ours.data.bfloat16())


@pytest.mark.parametrize(("dtype", "kind"), [("auto", "F32"), ("q8_0", "Q8_0")])
def test_the_primary_as_a_gguf_file(tmp_path, capsys, dtype, kind):
    pytest.importorskip("gguf")
    from dualflow.checkpoint.gguf.file import read_gguf
    from dualflow.testing.gguf import VOCAB_SIZE, write_tiny_gguf

    config = dataclasses.replace(CONFIG, vocab_size=VOCAB_SIZE)
    source = tiny_model(config, dtype=torch.float32)
    retrofit(write_tiny_gguf(tmp_path / "in.gguf", config, source.state_dict()), tmp_path / "dual")
    assert export(tmp_path / "dual", tmp_path / "out.gguf", "gguf", "--dtype", dtype) == 0
    assert "GGUF file of the primary" in capsys.readouterr().out
    assert read_gguf(tmp_path / "out.gguf").tensors["blk.0.ffn_up.weight"].format == kind
    if kind == "F32":
        back = read_model(tmp_path / "out.gguf").model
        for name, tensor in source.state_dict().items():
            assert same(back.state_dict()[name], tensor), name


def test_the_whole_for_transformers_is_a_model_of_ours_too(folder, tmp_path, capsys):
    pytest.importorskip("transformers")
    assert export(folder, tmp_path / "whole", "transformers") == 0
    shown = capsys.readouterr()
    assert "transformers folder" in shown.out
    assert shown.err == ""
    assert (tmp_path / "whole/modeling_dualflow.py").is_file()
    source, back = read_model(folder), read_model(tmp_path / "whole")
    assert back.model.config.flows == source.model.config.flows
    assert back.metrics == source.metrics
    for name, tensor in source.model.state_dict().items():
        assert same(back.model.state_dict()[name], tensor), name


def test_a_standard_model_is_exported_without_remarks(folder, tmp_path, capsys):
    assert export(tmp_path / "source", tmp_path / "stock", "huggingface") == 0
    assert capsys.readouterr().err == ""


def refused(capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert code == 2
    message = capsys.readouterr().err
    assert message.startswith("dualflow export: ")
    assert message.count("\n") == 1
    return message


def test_quantised_weights_are_refused(folder, tmp_path, capsys):
    convert(folder, tmp_path / "int8", dtype="int8")
    for form in ("huggingface", "gguf", "transformers"):
        message = refused(capsys, export(tmp_path / "int8", tmp_path / "x", form))
        assert "int8 weights, which other programs do not read" in message


def test_q8_0_belongs_to_gguf(folder, tmp_path, capsys):
    code = export(folder, tmp_path / "x", "huggingface", "--dtype", "q8_0")
    assert "--dtype q8_0 belongs to --format gguf" in refused(capsys, code)


def test_nothing_is_overwritten(folder, tmp_path, capsys):
    (tmp_path / "mine.gguf").write_text("mine")
    code = export(folder, tmp_path / "mine.gguf", "gguf")
    assert "exists already; name a new" in refused(capsys, code)
    assert (tmp_path / "mine.gguf").read_text() == "mine"


def test_a_primary_that_nothing_was_trained_to_read_is_refused(tmp_path, capsys):
    from dualflow.testing import tiny_config

    save_model(tiny_model(tiny_config("phd2")), tmp_path / "phd2")
    code = export(tmp_path / "phd2", tmp_path / "x", "huggingface")
    assert "phd2" in refused(capsys, code)
