"""Tiny random models of every architecture, exported, and llama.cpp's logits beside ours:
families.py FOLDER (made by ../peers/setup.sh). Writes results-families.json beside this file.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from dualflow.checkpoint.gguf.exporter import export_gguf
from dualflow.checkpoint.gguf.tokenizer import import_tokenizer
from dualflow.model import BatchKV, CausalLM
from dualflow.spec import ModelConfig, RopeScaling
from dualflow.testing.gguf import FAMILY_SWITCHES, family_config, tokenizer_metadata
from dualflow.testing.tensors import random_tokens, tiny_model

HERE = Path(__file__).parent
LENGTH = 100
HEADS = ((8, 2), (6, 1), (4, 4))

YARN = RopeScaling(kind="yarn", factor=4.0, original_max_position=32)
LINEAR = RopeScaling(kind="linear", factor=2.0)
VARIANTS: tuple[tuple[str, dict], ...] = (
    ("llama", {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}),
    ("llama", {"tie_embeddings": False, "head_dim": 12, "rope_scaling": LINEAR}),
    ("llama", {"norm_offset": True}),
    ("qwen2", {"rope_scaling": dataclasses.replace(YARN, attention_factor=1.0)}),
    ("qwen3", {"attention_bias": True, "rope_scaling": YARN, "tie_embeddings": True}),
    ("gemma2", {"sliding_layers": (1,)}),
    ("gemma3", {"sliding_window": None, "sliding_layers": None, "local_rope_theta": None}),
    ("gemma3", {"sliding_layers": (0, 3), "final_softcap": 5.0, "tie_embeddings": False}),
    ("gemma3", {"rope_scaling": None, "local_rope_theta": None}),
    ("olmo2", {"sliding_window": 20, "sliding_layers": (0, 1), "rope_scaling": YARN,
               "local_rope_theta": 10000.0}),
    ("olmo2", {"tie_embeddings": True, "sliding_window": 20}),
    ("gpt2", {"tie_embeddings": False}),
)  # fmt: skip
"""Beside what ``family_config`` has: an architecture and what is otherwise."""


def main() -> int:
    """Export, run and compare."""
    parser = argparse.ArgumentParser(description="llama.cpp's logits beside ours.")
    parser.add_argument("folder", type=Path, help="what ../peers/setup.sh made")
    parser.add_argument("--out", type=Path, default=HERE / "results-families.json")
    options = parser.parse_args()
    configs = [(name, {}, family_config(name, *heads)) for name in FAMILY_SWITCHES
               for heads in HEADS]  # fmt: skip
    configs += [
        (name, changes, dataclasses.replace(family_config(name), **changes))
        for name, changes in VARIANTS
    ]
    companions, _ = import_tokenizer(tokenizer_metadata())
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for place, (name, changes, config) in enumerate(configs):
            model = random_model(config)
            tokens = random_tokens(config, LENGTH)
            file = Path(temporary) / f"{place}.gguf"
            export_gguf(model, file, companions=companions)
            theirs, peer = llama_cpp(options.folder / "llama" / "bin" / "python", file, tokens)
            rows.append(compare(name, changes, config, logits(model, tokens), theirs, peer))
            print(rows[-1], file=sys.stderr)
    options.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return int(any(row["largest_difference"] > row["allowed"] for row in rows))


def random_model(config: ModelConfig) -> CausalLM:
    """Matrices are large, so that every position and every head counts."""
    model = tiny_model(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model


@torch.inference_mode()
def logits(model: CausalLM, tokens: torch.Tensor) -> np.ndarray:
    """[T, V] of the whole sequence at once."""
    kv = [BatchKV(1, len(tokens))] * model.config.num_layers
    out = model.step(tokens, torch.arange(len(tokens)), kv)
    return model.logits(out.primary_TD).numpy()


def llama_cpp(python: Path, file: Path, tokens: torch.Tensor) -> tuple[np.ndarray, str]:
    """Logits [T, V], and llama.cpp's version."""
    task = json.dumps({"tokens": tokens.tolist(), "out": str(file.with_suffix(".npy"))})
    command = [python, HERE / "llama_cpp_worker.py", file]
    answer = subprocess.run(command, input=task, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(f"{file}: {answer.stderr[-600:]}")
    return np.load(file.with_suffix(".npy")), json.loads(answer.stdout)["version"]


def compare(
    name: str, changes: dict, config: ModelConfig, ours: np.ndarray, theirs: np.ndarray, peer: str
) -> dict:
    """One row. llama.cpp reads GELU from a table of 16-bit numbers, which others do not have."""
    return {
        "architecture": name,
        "heads": f"{config.num_heads}/{config.kv_heads}",
        "changes": ", ".join(f"{key}={plain(value)}" for key, value in changes.items()),
        "positions": len(ours),
        "largest_logit": float(np.abs(ours).max()),
        "largest_difference": float(np.abs(ours - theirs).max()),
        "allowed": 1e-2 if config.mlp in ("gelu", "geglu") else 1e-4,
        "same_best_token": float((ours.argmax(1) == theirs.argmax(1)).mean()),
        "versions": f"dualflow {version('dualflow')}, torch {torch.__version__}, {peer}",
    }


def plain(value: object) -> object:
    """A value as few characters say it."""
    return value.kind if isinstance(value, RopeScaling) else value


if __name__ == "__main__":
    sys.exit(main())
