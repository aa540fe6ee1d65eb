"""From one model on disk to another: a GGUF file or a model folder in, a model folder out."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from dualflow.checkpoint.atomic import atomic_folder
from dualflow.checkpoint.companions import read_companions, write_companions
from dualflow.checkpoint.gguf import import_gguf
from dualflow.checkpoint.locate import find_model_folder
from dualflow.checkpoint.retrofit import add_aux as with_aux
from dualflow.checkpoint.store import load_model, read_metrics, read_quantised, write_model
from dualflow.model import CausalLM, quantise_model
from dualflow.spec import QuantisedFormat

WeightFormat = Literal["auto", "float32", "bfloat16", "int8", "int4"]

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much (0: not known)."""

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class _Source:
    model: CausalLM
    companions: dict[str, str]
    metrics: dict[str, Any]


def convert(
    source: str | Path,
    target: str | Path,
    *,
    dtype: WeightFormat = "auto",
    add_aux: bool = False,
    progress: Progress | None = None,
) -> CausalLM:
    """Write the model of ``source`` to the new folder ``target`` atomically; returns it.

    source:   a GGUF file of the Llama family, a model folder, or a run folder.
    dtype:    the weights' format; ``auto`` keeps that of a folder, and takes for a GGUF file the
              smallest of float32 and bfloat16 that holds what it stores. Under ``int8`` and
              ``int4`` what is no matrix stays as ``auto`` has it.
    add_aux:  give a standard model an auxiliary flow that changes nothing (``retrofit.add_aux``).

    Tokenizer, chat template and recorded losses go along; the losses are those of the source.

    Raises ``ValueError`` before anything is read where ``target`` exists, and where the source
    cannot be used or the conversion is not possible.
    """
    if dtype not in get_args(WeightFormat):
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(get_args(WeightFormat))}")
    report = progress or (lambda stage, done, total: None)
    _require_new(Path(target))
    read = _read(Path(source), _FLOATS.get(dtype), dtype, report)
    model, metrics = read.model, read.metrics
    if add_aux:
        report("adding the auxiliary flow", 0, 0)
        model = with_aux(model)
        if "val_loss" in metrics:  # r = p = q
            metrics = {**metrics, "val_loss_p": metrics["val_loss"]}
            metrics["val_loss_q"] = metrics["val_loss"]
    if dtype in get_args(QuantisedFormat) and model.quantised != dtype:
        report(f"quantising to {dtype}", 0, 0)
        model = quantise_model(model, dtype)  # type: ignore[arg-type]
    report("writing", 0, 0)
    with atomic_folder(target, replaceable=lambda folder: False) as temporary:
        write_model(model, temporary, metrics=metrics or None)
        write_companions(temporary, read.companions)
    return model


def _require_new(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise ValueError(f"{target} exists already; name a new folder, or remove it first")


def _read(
    source: Path, floats: torch.dtype | None, dtype: WeightFormat, report: Progress
) -> _Source:
    if _is_gguf(source):
        imported = import_gguf(
            source, floats, lambda done, total: report("reading tensors", done, total)
        )
        return _Source(imported.model, imported.companions, {})
    place = find_model_folder(source)
    stored_as = read_quantised(place)
    if stored_as is not None and dtype not in ("auto", stored_as):
        raise ValueError(
            f"{source} holds {stored_as} weights, which cannot be made {dtype}; convert the model "
            "they were made from"
        )
    report("reading", 0, 0)
    model = load_model(place, dtype=floats)
    return _Source(model, read_companions(place), read_metrics(place))


def _is_gguf(path: Path) -> bool:
    """Whether a file says it is one, by its name or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
