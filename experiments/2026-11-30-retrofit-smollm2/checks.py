"""What a retrofit must not change, measured on SmolLM2-135M: r = p before training, and every bit
of the primary after it.

python experiments/2026-11-30-retrofit-smollm2/checks.py MODEL     (a folder or GGUF file)
"""

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from dualflow import AuxConfig, ReadoutConfig
from dualflow.checkpoint.convert import convert, retrofit
from dualflow.checkpoint.export import export_huggingface
from dualflow.checkpoint.store import load_model, load_tokenizer_of, read_primary_config
from dualflow.checkpoint.tensors import load_tensors
from dualflow.data.config import DataConfig
from dualflow.model import AuxRows, BatchKV, CausalLM
from dualflow.train import RunConfig, TrainConfig, train

TOKENS = 2000
LORA = AuxConfig(owns=("q_proj", "o_proj", "mlp"), lora_rank=8)


def main() -> None:
    """Check, print, and write checks.json beside this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert(arguments.model, folder / "source")
        ids = real_tokens(folder / "source")
        for kind in ("mixture", "learned", "aux_only"):
            born = folder / kind
            readout = ReadoutConfig(kind=kind)  # type: ignore[arg-type]
            retrofit(folder / "source", born, aux=LORA, readout=readout)
            rows.append({"check": "r = p at birth", "readout": kind, **distance(born, ids)})
        rows.append({"check": "primary after training", **primary_after_training(folder)})
    for row in rows:
        row |= {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
        }
        print(json.dumps(row))
    path = Path(__file__).with_name("checks.json")
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def real_tokens(folder: Path) -> torch.Tensor:
    """The first tokens of two modules of the standard library."""
    text = Path(json.decoder.__file__).read_text() + Path(argparse.__file__).read_text()
    return torch.tensor(load_tokenizer_of(folder).encode(text)[:TOKENS])


@torch.no_grad()
def distance(folder: Path, ids: torch.Tensor) -> dict[str, Any]:
    """The largest difference of any probability of r from p's, over the whole vocabulary."""
    model = load_model(folder)
    positions = torch.arange(len(ids))
    kv = [BatchKV(1, len(ids))] * model.config.num_layers
    out = model.step(ids, positions, kv, aux=AuxRows(ids, positions))
    assert out.aux_FAD is not None
    worst = 0.0
    for rows in positions.split(100):
        read = model.log_probs(out.primary_TD[rows], out.aux_FAD[:, rows])
        assert read.p is not None
        worst = max(worst, float((read.r.exp() - read.p.exp()).abs().max()))
    return {"tokens": len(ids), "dtype": str(model.dtype), "largest_difference": worst}


def primary_after_training(folder: Path) -> dict[str, Any]:
    """Train the auxiliary a little; compare the exported primary with the exported source."""
    model = load_model(folder / "mixture")
    config = RunConfig(
        name="trained",
        model=model.config,
        initial_model=str(folder / "mixture"),
        data=DataConfig(tokenizer="initial_model", sequence_length=128),
        train=TrainConfig(steps=3, batch_size=2, trainable="aux", compile="off", eval_batches=1),
    )
    result = train(config, folder)
    trained = load_model(folder / "trained" / "model")
    moved = changed(model, trained)
    for name, exported in (("source", load_model(folder / "source")), ("trained", trained)):
        primary = read_primary_config(folder / "source")
        export_huggingface(exported, folder / f"{name}-stock", primary_config=primary)
    ours, theirs = (
        load_tensors(folder / f"{name}-stock" / "model.safetensors")
        for name in ("trained", "source")
    )
    differing = [n for n in theirs if n not in ours or not torch.equal(ours[n], theirs[n])]
    return {
        "steps": result["steps"],
        "auxiliary_tensors_moved": len(moved),
        "primary_tensors": len(theirs),
        "primary_tensors_differing": len(differing) + len(ours.keys() - theirs.keys()),
        "loss_p_before": result["val_loss_p_initial"],
        "loss_p_after": result["val_loss_p"],
    }


def changed(before: CausalLM, after: CausalLM) -> list[str]:
    """Names of the tensors that differ."""
    values = after.state_dict()
    return [n for n, tensor in before.state_dict().items() if not torch.equal(tensor, values[n])]


if __name__ == "__main__":
    main()
