"""From one model on disk to another: whatever we can read in, a model folder of ours out."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from dualflow.checkpoint.atomic import atomic_folder
from dualflow.checkpoint.companions import read_companions, write_companions
from dualflow.checkpoint.gguf.importer import import_gguf
from dualflow.checkpoint.huggingface import import_huggingface
from dualflow.checkpoint.imported import Imported
from dualflow.checkpoint.retrofit import add_aux
from dualflow.checkpoint.sources import SourceKind, find_source
from dualflow.checkpoint.store import (
    load_model,
    read_config,
    read_metrics,
    read_primary_config,
    read_quantised,
    write_model,
)
from dualflow.model import CausalLM, quantise_model
from dualflow.spec import AuxConfig, QuantisedFormat, ReadoutConfig

WeightFormat = Literal["auto", "float32", "bfloat16", "int8", "int4"]

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much (0: not known)."""

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ReadModel:
    """A model in memory and what goes where it goes.

    companions:     texts of its companion files by name.
    metrics:        recorded losses; empty where there are none.
    primary_config: config.json of the primary's own family, verbatim; None: the source has none.
    """

    model: CausalLM
    companions: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    primary_config: dict[str, Any] | None = None


def convert(
    source: str | Path,
    target: str | Path,
    *,
    dtype: WeightFormat = "auto",
    progress: Progress | None = None,
) -> CausalLM:
    """Write the model of ``source`` to the new folder ``target`` atomically; returns it.

    source: a GGUF file, a Hugging Face folder, a model folder, or a run folder.
    dtype:  the weights' format; ``auto`` keeps that of a folder, and takes for a GGUF file the
            smallest of float32 and bfloat16 that holds what it stores. Under ``int8`` and ``int4``
            what is no matrix stays as ``auto`` has it.

    Tokenizer, chat template, the family's own config.json and recorded losses go along; the losses
    are those of the source.

    Raises ``ValueError`` before anything is read where ``target`` exists, and where the source
    cannot be used or the conversion is not possible.
    """
    require_new(Path(target))
    read = read_model(source, dtype, progress)
    return _write(read, Path(target), dtype, progress)


def retrofit(
    source: str | Path,
    target: str | Path,
    *,
    aux: AuxConfig | None = None,
    readout: ReadoutConfig | None = None,
    dtype: WeightFormat = "auto",
    progress: Progress | None = None,
) -> CausalLM:
    """Write the standard model of ``source`` to the new folder ``target`` with auxiliary flows that
    change nothing until they are trained (``checkpoint.retrofit.add_aux``); returns it.

    source, dtype: as of ``convert``; quantised formats are made after the flows were added.
    aux, readout:  the flows and how p and q become r; by default one flow and the mixture.

    Everything goes along as in ``convert``; as r = p = q, a recorded loss is that of all
    three.

    Raises ``ValueError`` as ``convert`` does, and where the source has a second flow already or
    quantised matrices.
    """
    require_new(Path(target))
    _require_bare(source)
    read = read_model(source, "auto" if dtype in get_args(QuantisedFormat) else dtype, progress)
    _report(progress, "adding the auxiliary flow")
    metrics = read.metrics
    if "val_loss" in metrics:
        same = dict.fromkeys(("val_loss_p", "val_loss_q"), metrics["val_loss"])
        metrics = {**metrics, **same}
    dual = dataclasses.replace(read, model=add_aux(read.model, aux, readout), metrics=metrics)
    return _write(dual, Path(target), dtype, progress)


def read_model(
    source: str | Path, dtype: WeightFormat = "auto", progress: Progress | None = None
) -> ReadModel:
    """The model of ``source``, in eval mode, with what goes along. Quantised formats are those of
    the source alone: floats are left for the caller to quantise.

    Raises ``ValueError`` in one line: what was found, where, and what is supported.
    """
    if dtype not in get_args(WeightFormat):
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(get_args(WeightFormat))}")
    floats, (kind, path) = _FLOATS.get(dtype), find_source(source)
    if kind is not SourceKind.OURS:
        _report(progress, "reading tensors")
        imported = _import(kind, path, floats, progress)
        return ReadModel(imported.model, imported.companions, {}, imported.primary_config)
    stored_as = read_quantised(path)
    if stored_as is not None and dtype not in ("auto", stored_as):
        raise ValueError(
            f"{source} holds {stored_as} weights, which cannot be made {dtype}; convert the model "
            "they were made from"
        )
    _report(progress, "reading")
    model = load_model(path, dtype=floats)
    return ReadModel(model, read_companions(path), read_metrics(path), read_primary_config(path))


def require_new(target: Path) -> None:
    """Raise ``ValueError`` where something would be overwritten; an empty folder may be filled."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise ValueError(f"{target} exists already; name a new folder, or remove it first")


def _import(
    kind: SourceKind, path: Path, floats: torch.dtype | None, progress: Progress | None
) -> Imported:
    def show(done: int, total: int) -> None:
        if progress is not None:
            progress("reading tensors", done, total)

    if kind is SourceKind.GGUF:
        return import_gguf(path, floats, show)
    return import_huggingface(path, floats, show)


def _require_bare(source: str | Path) -> None:
    """Refuse a model with a second flow before its weights are read."""
    kind, path = find_source(source)
    if kind is not SourceKind.OURS:
        return
    variant = read_config(path).variant
    if variant == "dual":
        raise ValueError(
            f"{source} is a dual model already; train it further (dualflow train, initial_model), "
            "or take its primary out (dualflow export --format huggingface) and retrofit that"
        )
    if variant != "standard":
        raise ValueError(
            f"{source} is a {variant} model; an auxiliary flow can be added to a standard one"
        )


def _write(
    read: ReadModel, target: Path, dtype: WeightFormat, progress: Progress | None
) -> CausalLM:
    model = read.model
    if dtype in get_args(QuantisedFormat) and model.quantised != dtype:
        _report(progress, f"quantising to {dtype}")
        model = quantise_model(model, dtype)  # type: ignore[arg-type]
    _report(progress, "writing")
    with atomic_folder(target, replaceable=lambda folder: False) as temporary:
        write_model(
            model, temporary, metrics=read.metrics or None, primary_config=read.primary_config
        )
        write_companions(temporary, read.companions)
    return model


def _report(progress: Progress | None, stage: str) -> None:
    if progress is not None:
        progress(stage, 0, 0)
