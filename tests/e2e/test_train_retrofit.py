"""From a model without an auxiliary to a trained one, by commands alone."""

import json
from pathlib import Path

import pytest
import torch

from dualflow.checkpoint import load_model, load_tensors, save_model
from dualflow.cli.main import main
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.model import build_model
from dualflow.testing.configs import family_config
from dualflow.testing.runs import write_tiny_text

RUN = """
initial_model = "dual"
[data]
source = "tiny.txt"
sequence_length = 16
[optimizer]
lr = 1e-2
[train]
trainable = "aux"
steps = 6
batch_size = 4
threads = 1
compile = "off"
tensorboard = "off"
"""


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "olmo2"])
@pytest.mark.parametrize("readout", ["mixture", "aux_only", "learned"])
def test_a_retrofitted_model_learns_beside_a_primary_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, family: str, readout: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_text(tmp_path)
    model = build_model(family_config(family, vocab_size=259, init_std=0.05), seed=1)
    save_model(model.bfloat16(), "plain", tokenizer_json=bytes_tokenizer().to_json())
    Path("run.toml").write_text(RUN)
    threads = torch.get_num_threads()
    try:
        assert main(["retrofit", "plain", "dual", "--lora-rank", "2", "--readout", readout]) == 0
        assert main(["train", "run.toml"]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(Path("runs/run/result.json").read_text())
    assert result["val_loss"] < result["val_loss_initial"]
    assert result["val_loss_p"] == result["val_loss_p_initial"]
    assert result["val_loss_initial"] == pytest.approx(result["val_loss_p_initial"], abs=1e-5)
    primary = Path("runs/run/model/model.safetensors").read_bytes()
    assert primary == Path("dual/model.safetensors").read_bytes()
    found, source = (
        load_tensors("runs/run/model/model.safetensors"),
        load_tensors("plain/model.safetensors"),
    )
    assert found.keys() == source.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in source.items())
    assert load_model("runs/run").config.readout.kind == readout
    capsys.readouterr()
    assert main(["generate", "runs/run", "--prompt", "the cat", "--max-tokens", "4"]) == 0
