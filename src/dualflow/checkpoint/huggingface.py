"""Hugging Face folders into models of ours: config.json, safetensors, tokenizer.

Nothing is guessed (``checkpoint.families`` says what is known): a key of config.json that we do not
know is refused by name, and so is a tensor that is missing, unexpected or of another shape.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from dualflow.checkpoint.casting import cast
from dualflow.checkpoint.families import (
    HEAD,
    SUPPORTED,
    Family,
    Location,
    Names,
    find_family,
    rows_axis,
)
from dualflow.checkpoint.huggingface_folder import StoredWeights
from dualflow.checkpoint.huggingface_text import companions_of, real_ids
from dualflow.checkpoint.imported import Imported
from dualflow.checkpoint.locate import MODEL_TYPE, read_json
from dualflow.checkpoint.strict import expected_tensors
from dualflow.checkpoint.tensors import FLOATS
from dualflow.model import build_model
from dualflow.spec import ModelConfig

Progress = Callable[[int, int], None]
"""Called with the number of tensors read and their total."""

Wanted = dict[str, list[tuple[str, Location]]]
"""Tensors to read by the name they are stored under: which of ours lie in each, and where."""


def is_huggingface(path: Path) -> bool:
    """Whether ``path`` is a folder whose config.json names a model that is not one of ours."""
    try:
        table = read_json(path / "config.json")
    except ValueError:
        return False
    named = "model_type" in table or bool(table.get("architectures"))
    return named and table.get("model_type") != MODEL_TYPE


def import_huggingface(
    folder: str | Path, dtype: torch.dtype | None = None, progress: Progress | None = None
) -> Imported:
    """The model in a Hugging Face folder, in eval mode, with its tokenizer and its config.json.

    dtype: the floating-point format of every weight; None keeps each as it is stored.

    Ids past the tokenizer's last are padding (``real_vocab_size``). A folder whose tokenizer cannot
    be had as a tokenizer.json is read without it, and a warning says so.

    Raises ``ValueError`` in one line that names the file and what is wrong with it: another
    architecture, an unknown or unsupported key, a missing, unexpected or misshapen tensor, pickled
    weights, damage, values that are not finite or too large for ``dtype``.
    """
    place = _place(folder)
    path = place / "config.json"
    table = read_json(path)
    try:
        family = find_family(table)
        config = family.read(table)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    stored = StoredWeights(place)
    wanted = _match(place, family, config, stored)
    if dtype is None:
        _check_stacks(place, wanted, stored)
    companions = companions_of(place, table, config.vocab_size)
    real = real_ids(companions, place)
    if real is not None and real < config.vocab_size:
        config = dataclasses.replace(config, real_vocab_size=real)
    # Built without memory first: there is never a second copy in another number format.
    model = build_model(config, None, "meta", dtype or _main_dtype(stored, wanted))
    model.to_empty(device="cpu")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for done, name in enumerate(sorted(wanted, key=stored.place)):
            if progress is not None:
                progress(done, len(wanted))
            tensor = stored.read(name)
            if not bool(tensor.isfinite().all()):
                raise ValueError(
                    f"{place}: {name} holds values that are not finite; the weights are damaged"
                )
            tensor = cast(tensor, dtype, f"{place}: {name}")
            for ours, location in wanted[name]:
                _fill(parameters[ours], _part(tensor, location), location.expert)
    if progress is not None:
        progress(len(wanted), len(wanted))
    return Imported(model.eval(), companions, table)


def _place(folder: str | Path) -> Path:
    path = Path(folder)
    if path.is_dir():
        if not (path / "config.json").exists():
            names = sorted(inside.name for inside in path.iterdir())
            found = f"it holds {', '.join(names[:5])}" if names else "it is empty"
            raise ValueError(f"{path} holds no config.json ({found}); {SUPPORTED}")
        return path
    if path.exists():
        raise ValueError(
            f"{path} is a file; expected the folder that holds config.json and safetensors; "
            f"{SUPPORTED}"
        )
    hint = ""
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(folder)):
        hint = (
            "; if this is the name of a model on a hub, download it yourself first: dualflow reads "
            "local folders and never the network"
        )
    raise ValueError(f"there is no folder {folder}{hint}; {SUPPORTED}")


def _match(place: Path, family: Family, config: ModelConfig, stored: StoredWeights) -> Wanted:
    """Where every tensor of ours lies: all of the folder's are used, and no other is needed."""
    # A crafted number of layers is refused before anything is built for it.
    if config.num_layers > len(stored.entries):
        raise ValueError(
            f"{place}: config.json has {config.num_layers:,} layers, the files "
            f"{len(stored.entries):,} tensors"
        )
    names = family.names_in(stored.entries)
    experts = names.count_separate(config)
    if experts > len(stored.entries):
        raise ValueError(
            f"{place}: config.json has {experts:,} experts in all layers, the files "
            f"{len(stored.entries):,} tensors"
        )
    whole = names.whole(stored.entries)
    found = {name for name in whole if not names.is_buffer(name)}
    shapes, parts = _expected(place, names, config)
    head = names.embedding if config.tie_embeddings else HEAD
    if config.tie_embeddings and HEAD in found:
        found = _one_of_two(place, head, whole, found, stored)
        if head not in found:
            shapes[HEAD], parts[HEAD] = shapes.pop(head), parts.pop(head)
    _check(place, family, shapes, {name: whole[name] for name in found}, stored)
    return {whole[name]: inside for name, inside in parts.items()}


def _expected(
    place: Path, names: Names, config: ModelConfig
) -> tuple[dict[str, tuple[int, ...]], Wanted]:
    """Shapes of the tensors a family stores for ``config``, and what of ours lies in each."""
    shapes: dict[str, tuple[int, ...]] = {}
    parts: Wanted = {}
    for ours, tensor in expected_tensors(place, config, None).items():
        for location in names.locate(ours, config):
            shapes[location.name] = location.shape(tensor.shape)
            parts.setdefault(location.name, []).append((ours, location))
    return shapes, parts


def _one_of_two(
    place: Path, embedding: str, whole: Mapping[str, str], found: set[str], stored: StoredWeights
) -> set[str]:
    """The names without the one of a tied head's two that is not needed."""
    if embedding not in found:
        return found
    first, second = stored.read(whole[embedding]), stored.read(whole[HEAD])
    if first.dtype != second.dtype or not torch.equal(first, second):
        raise ValueError(
            f"{place}: {HEAD} and {whole[embedding]} differ, but config.json ties them; set "
            "tie_word_embeddings to false there to keep both, or remove the one that is not meant"
        )
    return found - {HEAD}


def _check(
    place: Path,
    family: Family,
    shapes: Mapping[str, tuple[int, ...]],
    found: Mapping[str, str],
    stored: StoredWeights,
) -> None:
    """Raise ``ValueError`` naming what is missing, unexpected or otherwise than expected."""
    problems = []
    if missing := sorted(shapes.keys() - found.keys()):
        hint = " (config.json does not tie it to the embedding)" if HEAD in missing else ""
        problems.append(f"missing {_few(missing)}{hint}")
    if unexpected := sorted(found.keys() - shapes.keys()):
        problems.append(f"unexpected {_few([found[name] for name in unexpected])}")
    both = {name: stored.entries[found[name]] for name in sorted(shapes.keys() & found.keys())}
    other = [
        f"{found[name]} {list(entry.shape)}, expected {list(shapes[name])}"
        for name, entry in both.items()
        if entry.shape != shapes[name]
    ]
    if other:
        problems.append(f"other shape: {_few(other)}")
    formats = [f"{found[name]} ({e.dtype})" for name, e in both.items() if e.dtype not in FLOATS]
    if formats:
        problems.append(f"not one of {', '.join(FLOATS)}: {_few(formats)}")
    if problems:
        raise ValueError(
            f"{place}: the tensors are not those that its config.json ({family.model_type}) needs: "
            + "; ".join(problems)
        )


def _check_stacks(place: Path, wanted: Wanted, stored: StoredWeights) -> None:
    """Raise ``ValueError`` where the tensors that one of ours stacks differ in their format."""
    first: dict[str, str] = {}
    for name, parts in wanted.items():
        for ours, _ in parts:
            other = first.setdefault(ours, name)
            formats = stored.entries[other].dtype, stored.entries[name].dtype
            if formats[0] != formats[1]:
                raise ValueError(
                    f"{place}: {other} is {formats[0]} and {name} {formats[1]}; experts are kept "
                    "in one format, so name one (dtype) that all weights are read as"
                )


def _main_dtype(stored: StoredWeights, wanted: Wanted) -> torch.dtype:
    """The format of most weights: what the model is built in before each tensor gets its own."""
    sizes: dict[str, int] = {}
    for name in wanted:
        entry = stored.entries[name]
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + math.prod(entry.shape)
    return FLOATS[max(sizes, key=lambda name: sizes[name])]


def _part(tensor: Tensor, location: Location) -> Tensor:
    turned = tensor.t() if location.transposed else tensor
    return turned.chunk(location.count, rows_axis(turned.dim()))[location.index]


def _fill(parameter: Tensor, tensor: Tensor, expert: int | None) -> None:
    if parameter.dtype != tensor.dtype:
        parameter.data = torch.empty_like(parameter, dtype=tensor.dtype)
    (parameter if expert is None else parameter[expert]).copy_(tensor)


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
