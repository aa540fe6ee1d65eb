"""Whether the tensors of a folder are those its config.json needs: every one there, none beside
them, each of the right sizes and number format. Headers alone are read.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from dualflow.checkpoint.tensors import FLOATS, TensorEntry
from dualflow.model import build_model
from dualflow.model.flows import is_aux
from dualflow.model.quantise import quantised_matrices, with_quantised_modules
from dualflow.spec import ModelConfig, QuantisedFormat

PRIMARY_FILE = "model.safetensors"
AUX_FILE = "aux.safetensors"

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put before the names of what they wrap."""

_CODES: dict[QuantisedFormat, str] = {"int8": "I8", "int4": "U8"}


class Expected(NamedTuple):
    """One tensor that has to be there: its sizes and the number formats it may have."""

    shape: tuple[int, ...]
    formats: tuple[str, ...] = tuple(FLOATS)


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors by canonical name, each once: a tied head goes by the embedding's name."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            tensors[name] = tensor
    return tensors


def expected_tensors(
    place: Path, config: ModelConfig, quantised: QuantisedFormat | None
) -> dict[str, Expected]:
    """What ``config`` needs, found without the memory for it: a config that lies costs nothing."""
    try:
        model = build_model(config, device="meta")
        if quantised:
            with_quantised_modules(model, quantised)
    except (RuntimeError, OverflowError, MemoryError) as error:
        raise ValueError(
            f"{place / 'config.json'} describes a model that cannot be built: {error}"
        ) from error
    expected = {name: Expected(tuple(t.shape)) for name, t in stored_tensors(model).items()}
    for module, matrix in quantised_matrices(model).items():
        for name, _ in matrix.named_buffers():
            formats = (_CODES[matrix.kind],) if name == "weight" else ("F16",)
            expected[f"{module}.{name}"] = expected[f"{module}.{name}"]._replace(formats=formats)
    return expected


def check_counts(place: Path, config: ModelConfig, count: int) -> None:
    """Raise ``ValueError`` where ``count`` stored tensors cannot be those of so many layers and
    flows: a crafted number is refused before anything is built or counted for it.
    """
    flows = max(1, config.num_flows)  # one without tensors of its own in a layer is possible
    if config.num_layers > count or config.num_layers * flows > 16 * count:
        raise ValueError(
            f"{place}: config.json has num_layers {config.num_layers:,} and "
            f"{config.num_flows:,} auxiliary flows, the files {count:,} tensors"
        )


def check_strict(
    place: Path,
    expected: Mapping[str, Expected],
    headers: Mapping[str, Mapping[str, TensorEntry]],
) -> None:
    """Raise ``ValueError`` that names every tensor of ``headers`` that is missing, unexpected or
    otherwise than ``expected``.
    """
    problems: list[str] = []
    together = AUX_FILE not in headers and any(map(is_aux, headers.get(PRIMARY_FILE, ())))
    for file, belongs in ((PRIMARY_FILE, False), (AUX_FILE, True)):
        wanted = {name: t for name, t in expected.items() if is_aux(name) == belongs}
        if together:  # as transformers writes it
            wanted = {} if belongs else dict(expected)
        found = headers.get(file)
        if found is None:
            problems += [f"{file} is missing (with {_few(wanted)})"] if wanted else []
            continue
        prefixes = sorted({prefix for name in found if (prefix := _wrapper_prefix(name))})
        if prefixes:
            listed = ", ".join(map(repr, prefixes))
            problems.append(
                f"{file}: names begin with {listed}, put there by a wrapper "
                "(torch.compile, DistributedDataParallel); save the bare model under its own names"
            )
            continue
        problems += _compare(file, wanted, found)
    if problems:
        raise ValueError(f"{place} does not fit its config.json: " + "; ".join(problems))


def _compare(
    file: str, wanted: Mapping[str, Expected], found: Mapping[str, TensorEntry]
) -> list[str]:
    problems: list[str] = []
    if missing := wanted.keys() - found.keys():
        problems.append(f"{file}: missing {_few(missing)}")
    if unexpected := found.keys() - wanted.keys():
        problems.append(f"{file}: unexpected {_few(unexpected)}")
    both = sorted(wanted.keys() & found.keys())
    if shapes := [
        f"{n} {list(found[n].shape)}, expected {list(wanted[n].shape)}"
        for n in both
        if found[n].shape != wanted[n].shape
    ]:
        problems.append(f"{file}: other shape: {_few(shapes, sort=False)}")
    otherwise: dict[tuple[str, ...], list[str]] = {}
    for name in both:
        if found[name].dtype not in wanted[name].formats:
            otherwise.setdefault(wanted[name].formats, []).append(f"{name} ({found[name].dtype})")
    for formats, names in otherwise.items():
        kinds = ("one of " if len(formats) > 1 else "") + ", ".join(formats)
        problems.append(f"{file}: not {kinds}: {_few(names, sort=False)}")
    return problems


def _few(names: Iterable[str], sort: bool = True) -> str:
    listed = sorted(names) if sort else list(names)
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return ", ".join(listed[:8]) + more


def _wrapper_prefix(name: str) -> str | None:
    for prefix in ("module.", *_WRAPPERS):
        if name.startswith(prefix) or (prefix in _WRAPPERS and f".{prefix}" in name):
            return prefix
    return None
