"""The model a run begins from: its configuration, its identity by content, its weights in float32,
and what goes along with it to the end of the run.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dualflow import config as configuration
from dualflow.checkpoint.companions import TOKENIZER, read_companions
from dualflow.checkpoint.locate import (
    find_model_folder,
    missing_weights,
    read_model_config,
)
from dualflow.checkpoint.store import load_model, read_config, read_primary_config, read_quantised
from dualflow.checkpoint.strict import AUX_FILE, PRIMARY_FILE, is_aux, stored_tensors
from dualflow.checkpoint.tensors import FLOATS, read_header
from dualflow.config import ConfigError
from dualflow.data.tokenizers import Tokenizer
from dualflow.folders import expand_home
from dualflow.model import CausalLM, build_model
from dualflow.model.moe import keeps_format
from dualflow.spec import ModelConfig


@dataclass(frozen=True)
class Origin:
    """What a model keeps of what it was made from, beside the weights.

    companions:      texts of the files that go where it goes, by name.
    primary_config:  the configuration of the family it was imported from; None: there is none.
    main_format:     number format of most stored weights ("BF16"), and of all that ``formats`` does
                     not name; None: weights are stored as they are trained, in float32.
    formats:         the other stored formats by tensor name.
    """

    companions: Mapping[str, str] = field(default_factory=dict, repr=False)
    primary_config: Mapping[str, Any] | None = field(default=None, repr=False)
    main_format: str | None = None
    formats: Mapping[str, str] = field(default_factory=dict)

    def format_of(self, name: str) -> str | None:
        """The stored format of a tensor; None: float32, as it is trained."""
        return self.formats.get(name, self.main_format)


def find_initial(named: str) -> Path:
    """The model folder that ``initial_model`` means. Raises ``ValueError`` that names the field."""
    try:
        place = find_model_folder(expand_home(named))
        read_model_config(place)
        if not (place / PRIMARY_FILE).exists():
            raise ValueError(missing_weights(place))
        stored_as = read_quantised(place)
    except ValueError as error:
        raise ValueError(
            f"initial_model: {error}; other checkpoints are brought in with `dualflow convert` or "
            "`dualflow retrofit`"
        ) from error
    if stored_as is not None:
        raise ValueError(
            f"initial_model {named} holds {stored_as} weights, which cannot be trained; name the "
            "float model they were made from, and quantise the result"
        )
    return place


def initial_config(named: str, changes: Mapping[str, Any], frozen: bool = False) -> ModelConfig:
    """The configuration of the model in folder ``named`` with a run's ``[model]`` laid over it.

    frozen: the primary is not trained, so that a p which was a model of its own stays one.

    Raises ``ConfigError`` where a change needs other tensors or makes another model.
    """
    initial = read_config(find_initial(named))
    if not isinstance(changes, Mapping):
        raise ConfigError(f"model: expected a table, found {changes!r}")
    readout = changes.get("readout")
    if isinstance(readout, Mapping) and readout.get("kind", "aux_only") != "aux_only":
        changes = {**changes, "readout": {"standalone_primary": False, **readout}}
    model = configuration.merge(_Model(initial), {"model": changes}).model
    check_fits(initial, model)
    if frozen and initial.has_primary_readout and not model.has_primary_readout:
        readout = dataclasses.replace(model.readout, standalone_primary=True)
        model = dataclasses.replace(model, readout=readout)
    return model


@dataclass(frozen=True)
class _Model:
    """Gives messages about the fields in it their full name."""

    model: ModelConfig


def check_fits(initial: ModelConfig, model: ModelConfig) -> None:
    """Raise ``ConfigError`` unless ``model`` is ``initial``, but for a readout that needs no other
    tensors.
    """
    found, wanted = (configuration.to_dict(config) for config in (initial, model))
    changed = [
        f"model.{name} is {wanted[name]!r}, but that of initial_model is {found[name]!r}"
        for name in found
        if name != "readout" and found[name] != wanted[name]
    ]
    if changed:
        raise ConfigError(
            f"{'; '.join(changed[:3])}; only model.readout can differ from the model that a run "
            "begins from"
        )
    kinds = initial.readout.kind, model.readout.kind
    if "learned" in kinds and kinds[0] != kinds[1]:
        raise ConfigError(
            f"model.readout.kind is {kinds[1]!r}, but that of initial_model is {kinds[0]!r}; "
            "'learned' has weights of its own: choose it when the auxiliary is added "
            "(`dualflow retrofit`)"
        )


def initial_digest(named: str) -> str:
    """SHA-256 over the weights and the tokenizer of the model in folder ``named``, in hexadecimal;
    the same wherever it lies.
    """
    place, digest = find_initial(named), hashlib.sha256()
    for name in (PRIMARY_FILE, AUX_FILE, TOKENIZER):
        if (place / name).is_file():
            with (place / name).open("rb") as file:
                digest.update(
                    f"{name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode()
                )
    return digest.hexdigest()


def check_digest(named: str, digest: str | None) -> None:
    """Raise ``ValueError`` where the model in folder ``named`` is no longer the one that a run was
    begun with.
    """
    if initial_digest(named) != digest:
        raise ValueError(
            f"initial_model {named} is not the model that this run began from: its weights or its "
            "tokenizer were changed since; put that model back, or start a new run"
        )


def load_initial(named: str, config: ModelConfig, device: torch.device) -> CausalLM:
    """The model in folder ``named``, read out as ``config`` says, in float32 whatever it is stored
    in: bfloat16 would lose small updates.
    """
    place = find_initial(named)
    model = load_model(place, device=device, dtype=torch.float32)
    check_fits(model.config, config)
    if model.config == config:
        return model
    weights = model.state_dict()
    other = build_model(config, None, device, torch.float32)
    other.load_state_dict(weights)
    return other


def read_origin(named: str) -> Origin:
    """What goes along with the model in folder ``named``.

    Raises ``ValueError`` for float64 weights, which training in float32 would not keep.
    """
    place = find_initial(named)
    sizes: dict[str, int] = {}
    formats: dict[str, str] = {}
    for file in (PRIMARY_FILE, AUX_FILE):
        for name, entry in read_header(place / file).items() if (place / file).exists() else ():
            formats[name] = entry.dtype
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.end - entry.begin
    if wide := [name for name, kind in formats.items() if kind == "F64"]:
        raise ValueError(
            f"initial_model {named} holds float64 weights ({wide[0]}), and training keeps float32; "
            "convert it with `dualflow convert --dtype float32` first"
        )
    main = max(sizes, key=lambda kind: sizes[kind])
    # What is trained beside the primary is stored like most of it, whatever it began as.
    others = {n: kind for n, kind in formats.items() if kind != main and not is_aux(n)}
    return Origin(read_companions(place), read_primary_config(place), main, others)


def store_as(model: CausalLM, origin: Origin) -> str | None:
    """Convert weights in place to the formats that they are stored in; trained no more.

    A tensor that was not trained is then what it was, bit for bit. Where float16 cannot hold what
    was trained, everything stays float32, and a note says so.
    """
    tensors = stored_tensors(model)
    wanted = {
        name: torch.float32 if keeps_format(name) else FLOATS[origin.format_of(name) or "F32"]
        for name in tensors
    }
    for name, tensor in tensors.items():
        if bool((tensor.detach().abs() > torch.finfo(wanted[name]).max).any()):
            return f"{name} has values too large for {wanted[name]}: the model is stored in float32"
    for name, tensor in tensors.items():
        tensor.data = tensor.data.to(wanted[name])
    return None


def check_tokenizer(named: str, tokenizer_json: str, eos_token: str | None) -> None:
    """Raise ``ValueError`` unless the data's tokenizer is that of the model in folder ``named``."""
    own = find_initial(named) / TOKENIZER
    if not own.is_file():
        return
    first, second = (
        Tokenizer.from_json(text, eos_token)
        for text in (own.read_text(encoding="utf-8"), tokenizer_json)
    )
    if first.to_json() != second.to_json():
        raise ValueError(
            f"the data's tokenizer ({second.vocab_size:,} ids) is not that of initial_model "
            f"({first.vocab_size:,} ids); leave data.tokenizer out, or set it to 'initial_model'"
        )
