"""Checkpoints: a model folder with the trainer's state beside it, whole or not there, and exact to
the last bit.

``checkpoints/step-00000123/`` holds what ``dualflow.checkpoint`` writes plus

* ``trainer.safetensors``: the optimizers' state under ``optimizer/``, the random generators' under
  ``random/``;
* ``trainer.json``: step, tokens, seconds, the loader's position, the last validation and the one
  before the first step, the run's identity, the number formats its model is stored in at the end,
  a digest of every file of tensors.

``checkpoints/latest`` names the newest one.
"""

import hashlib
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dualflow.checkpoint.atomic import atomic_folder, write_atomic
from dualflow.checkpoint.companions import read_companions, write_companions
from dualflow.checkpoint.locate import is_model_folder, read_json
from dualflow.checkpoint.store import read_primary_config, write_model
from dualflow.checkpoint.tensors import FLOATS, load_tensors, save_tensors
from dualflow.train.config import RunConfig
from dualflow.train.initial import Origin
from dualflow.train.optimizers import Optimizers
from dualflow.train.parallel import Parallel
from dualflow.train.run_folder import RunFolder, write_json

FORMAT_VERSION = 1


@dataclass
class Progress:
    """How far a run has come.

    step:           optimizer steps done.
    tokens:         positions trained on, over all ranks.
    train_seconds:  wall time spent in optimizer steps; validation, saving and compilation are not
                    in it.
    validation:     the last validation's metrics record.
    initial_validation: that of the model the run began from, before the first step.
    """

    step: int = 0
    tokens: int = 0
    train_seconds: float = 0.0
    validation: dict[str, Any] | None = None
    initial_validation: dict[str, Any] | None = None


@dataclass(frozen=True)
class TrainerState:
    """What a checkpoint holds beside the model."""

    progress: Progress
    loader: dict[str, Any]
    config: dict[str, Any]
    fingerprint: str
    origin: Origin
    tensors: dict[str, Tensor] = field(repr=False)


def save_checkpoint(
    checkpoints: Path,
    model: nn.Module,
    optimizers: Optimizers,
    progress: Progress,
    loader: Mapping[str, Any],
    config: RunConfig,
    *,
    origin: Origin,
    parallel: Parallel,
) -> Path | None:
    """Write ``step-N``, point ``latest`` at it, remove all but the newest ``train.keep_last``; rank
    0 writes.

    Every rank calls it: each contributes the state of its random generator. Returns the folder,
    None on other ranks.
    """
    tensors = {f"optimizer/{name}": tensor for name, tensor in optimizers.state_tensors().items()}
    tensors |= {f"random/{name}": tensor for name, tensor in random_state(parallel).items()}
    if not parallel.is_main:
        return None
    folder = checkpoints / f"step-{progress.step:08d}"
    with atomic_folder(folder, replaceable=is_model_folder) as temporary:
        write_folder(model, temporary, origin, losses_of(progress.validation))
        save_tensors(temporary / "trainer.safetensors", tensors)
        header = {
            "format_version": FORMAT_VERSION,
            "digests": _digests(temporary),
            **asdict(progress),
            "loader": dict(loader),
            "fingerprint": config.fingerprint(),
            "config": config.identity(),
            "stored_as": {"main": origin.main_format, "others": dict(origin.formats)},
        }
        write_json(temporary / "trainer.json", header)
    write_atomic(
        checkpoints / "latest", lambda path: path.write_text(folder.name + "\n", encoding="utf-8")
    )
    _prune(checkpoints, config.train.keep_last, newest=folder)
    return folder


def write_folder(
    model: nn.Module, folder: Path, origin: Origin, metrics: Mapping[str, Any] | None
) -> None:
    """Write a run's model into an existing ``folder``, with all that goes along with it."""
    write_model(model, folder, metrics=metrics, primary_config=origin.primary_config)
    write_companions(folder, origin.companions)


def find_checkpoint(checkpoints: Path) -> Path | None:
    """The checkpoint to resume from: the one ``latest`` names, else the one of the highest step;
    None: there is none.
    """
    whole = [path for path in _steps(checkpoints) if (path / "trainer.json").is_file()]
    try:
        named = (checkpoints / "latest").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):  # absent or damaged: the folders speak for themselves
        named = ""
    return next((path for path in whole if path.name == named), whole[-1] if whole else None)


def read_checkpoint(folder: Path, config: RunConfig) -> TrainerState:
    """The trainer's state in ``folder``, for a run of ``config``.

    Raises ``ValueError`` where a file is missing or damaged, or where the checkpoint's run differs
    from ``config`` in anything that decides the losses; the message names those fields.
    """
    path = folder / "trainer.json"
    try:
        header = read_json(path)
        if header.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"format_version is {header.get('format_version')}; "
                f"this dualflow reads {FORMAT_VERSION}"
            )
        progress = _progress(header)
        tensors = load_tensors(folder / "trainer.safetensors")
        _check_digests(folder, header.get("digests", {}))
        state = TrainerState(
            progress,
            _field(header, "loader", dict),
            _field(header, "config", dict),
            _field(header, "fingerprint", str),
            _origin(folder, header),
            tensors,
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path.parent} is not a checkpoint that can be resumed: {error}; "
            "remove this folder to go on from the checkpoint before it"
        ) from error
    _check_identity(folder, state, config)
    return state


def _progress(header: Mapping[str, Any]) -> Progress:
    before = {"initial_validation": None, **header}  # the first versions did not write it
    return Progress(
        step=_field(header, "step", int),
        tokens=_field(header, "tokens", int),
        train_seconds=_field(header, "train_seconds", int, float),
        validation=_validation(header, "validation"),
        initial_validation=_validation(before, "initial_validation"),
    )


def _validation(header: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    validation = _field(header, name, dict, type(None))
    if validation is not None:
        for counted in ("step", "tokens"):
            _field(validation, counted, int)
        for loss in ("loss", "loss_p", "loss_q"):
            _field(validation, loss, int, float, type(None))
    return validation


def _origin(folder: Path, header: Mapping[str, Any]) -> Origin:
    stored_as = _field({"stored_as": {"main": None, "others": {}}, **header}, "stored_as", dict)
    main = _field(stored_as, "main", str, type(None))
    others = _field(stored_as, "others", dict)
    if wrong := [kind for kind in (main or "F32", *others.values()) if str(kind) not in FLOATS]:
        raise ValueError(f"stored_as names {wrong[0]!r}; expected any of {', '.join(FLOATS)}")
    return Origin(read_companions(folder), read_primary_config(folder), main, others)


def _field(table: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """``table[name]``, which has to be of one of ``kinds``."""
    if name not in table:
        raise ValueError(f"{name} is missing")
    value = table[name]
    if type(value) not in kinds:
        expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"{name} is {value!r}; expected {expected}")
    return value


def _digests(folder: Path) -> dict[str, str]:
    """A hash of each file of tensors: the format has none, and a flipped bit still loads."""
    digests: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _check_digests(folder: Path, saved: Any) -> None:
    """Refuse files that are not those that were saved; a checkpoint without digests is taken."""
    if not isinstance(saved, dict):
        raise ValueError(f"digests is {saved!r}; expected a table")
    found = _digests(folder)
    if changed := [name for name in saved if name in found and saved[name] != found[name]]:
        raise ValueError(f"{changed[0]} is not as it was saved: the file is damaged or was changed")


def restore(state: TrainerState, optimizers: Optimizers, parallel: Parallel) -> None:
    """Put the optimizers and this rank's random generators back where they were when ``state`` was
    saved.
    """
    optimizers.load_state_tensors(_under(state.tensors, "optimizer/"))
    generators = _under(state.tensors, "random/")
    own = generators.get(f"cpu/{parallel.rank}")
    if own is None:
        ranks = sum(name.startswith("cpu/") for name in generators)
        raise ValueError(
            f"the checkpoint was saved by {ranks} ranks, now there are {parallel.world_size}; "
            "resume with as many"
        )
    torch.set_rng_state(own)
    if torch.cuda.is_available() and f"cuda/{parallel.rank}" in generators:
        torch.cuda.set_rng_state(generators[f"cuda/{parallel.rank}"])


def random_state(parallel: Parallel) -> dict[str, Tensor]:
    """The states of all ranks' random generators, as byte tensors."""
    states = {f"cpu/{rank}": t for rank, t in enumerate(parallel.gather(torch.get_rng_state()))}
    if torch.cuda.is_available() and parallel.world_size == 1:
        states["cuda/0"] = torch.cuda.get_rng_state()
    return states


def losses_of(validation: Mapping[str, Any] | None) -> dict[str, Any]:
    """A validation record under the names of model folders and results; None where nothing was
    validated yet.
    """
    names = {
        "val_loss": "loss",
        "val_loss_p": "loss_p",
        "val_loss_q": "loss_q",
        "step": "step",
        "tokens": "tokens",
    }
    return {name: None if validation is None else validation[key] for name, key in names.items()}


def check_finished(folder: RunFolder, config: RunConfig) -> None:
    """Raise ``ValueError`` unless the finished run in ``folder`` is the one that ``config``
    describes.
    """
    recorded = folder.read_config()
    if config.model.real_vocab_size is None:  # set from the data, which is not read again
        rows = recorded.model.real_vocab_size
        config = replace(config, model=replace(config.model, real_vocab_size=rows))
    if recorded.fingerprint() != config.fingerprint():
        _refuse(folder.path, recorded.identity(), config)


def _check_identity(folder: Path, state: TrainerState, config: RunConfig) -> None:
    if state.fingerprint != config.fingerprint():
        _refuse(folder, state.config, config)


def _refuse(folder: Path, recorded: Mapping[str, Any], config: RunConfig) -> NoReturn:
    now = config.identity()
    changed = [
        f"{key} ({recorded.get(key)!r} there, {now.get(key)!r} now)"
        for key in sorted(recorded.keys() | now.keys())
        if recorded.get(key) != now.get(key)
    ]
    raise ValueError(
        f"{folder} belongs to a run of another configuration: "
        f"{', '.join(changed[:5]) or 'it was edited'}; "
        "a run is resumed as it was begun: take these back, start a new run under another name or "
        "in another folder, or overwrite this one"
    )


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _steps(checkpoints: Path) -> list[Path]:
    """Checkpoint folders by step, oldest first."""
    found = [path for path in checkpoints.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _prune(checkpoints: Path, keep: int, newest: Path) -> None:
    for left_over in checkpoints.glob(".step-*.tmp-*"):  # of a process killed while it was saving
        shutil.rmtree(left_over, ignore_errors=True)
    # A checkpoint beyond the newest one is left over from a run that was taken up again at an
    # earlier step.
    number = int(newest.name.removeprefix("step-"))
    steps = _steps(checkpoints)
    later = [path for path in steps if int(path.name.removeprefix("step-")) > number]
    earlier = [path for path in steps if path not in later]
    for path in later + earlier[:-keep]:
        doomed = path.with_name(f".{path.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)  # so that a folder half removed never looks like a checkpoint
        shutil.rmtree(doomed, ignore_errors=True)
