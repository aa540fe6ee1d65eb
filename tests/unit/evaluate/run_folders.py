"""Synthetic run folders, as training leaves them, with numbers that a test can foresee."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Curve = Sequence[tuple[int, float]]
"""(tokens, loss of r) of each validation; the last is the result."""


def write_run(
    folder: Path,
    *,
    variant: str = "standard",
    seed: int = 0,
    curve: Curve = ((100, 3.0), (200, 2.0)),
    name: str | None = None,
    train_flops: float = 10.0,
    loss_p: float | None = None,
    loss_q: float | None = None,
    result: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a finished run; ``result`` and ``config`` are laid over what it would hold."""
    folder.mkdir(parents=True)
    name = name or folder.name
    settings: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "model": {"variant": variant},
        "data": {"source": "python-stdlib", "cache_dir": str(folder)},
        "train": {"steps": 10, "threads": seed},
    }
    tokens, loss = curve[-1]
    figures: dict[str, Any] = {
        "name": name,
        "variant": variant,
        "seed": seed,
        "tokens": tokens,
        "steps": 10,
        "val_loss": loss,
        "val_loss_p": loss_p,
        "val_loss_q": loss_q,
        "params": 1000,
        "params_primary": 1000,
        "params_aux": 0,
        "prefill_flops_per_token": 4.0,
        "decode_flops_per_token": 5.0,
        "train_flops_per_token": train_flops,
        "kv_bytes_per_token": 64,
        "train_seconds": 1.0,
        "finished": "2025-01-01T00:00:00+00:00",
    }
    lines: list[dict[str, Any]] = [
        {"kind": "train", "step": 1, "tokens": 1, "loss": 9.0, "lr": 0.1, "grad_norm": 1.0}
    ]
    for at, value in curve:
        point = {"kind": "validation", "step": at, "tokens": at, "loss": value}
        lines.append({**point, "loss_p": loss_p, "loss_q": loss_q})
    write_json(folder / "config.json", {**settings, **(config or {})})
    write_json(folder / "result.json", {**figures, **(result or {})})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def change_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object in a file."""
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **changes})


def write_pair_of_groups(root: Path) -> None:
    """Three seeds of standard and of dual: differences of the final loss −0.1, −0.3, +0.1.

    Both see 200 tokens; a token of dual costs twice the training FLOPs.
    """
    finals = {0: (2.0, 1.9), 1: (2.2, 1.9), 2: (2.1, 2.2)}
    for seed, (standard, dual) in finals.items():
        write_run(root / f"standard-seed{seed}", seed=seed, curve=((100, 3.0), (200, standard)))
        write_run(
            root / f"dual-seed{seed}",
            variant="dual",
            seed=seed,
            curve=((100, 3.1), (200, dual)),
            train_flops=20.0,
            loss_p=dual + 0.05,
            loss_q=dual + 0.02,
            result={"params": 1500, "decode_flops_per_token": 9.6},
        )
