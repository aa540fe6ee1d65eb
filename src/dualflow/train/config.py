"""A training run as plain data: model, data, optimizer, schedule and the loop's own settings. No
torch here.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dualflow import config as configuration
from dualflow import spec
from dualflow.config import ConfigError
from dualflow.data.config import DataConfig
from dualflow.spec import ModelConfig, parameter_counts


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_at_least(config: Any, least: float, *fields: str) -> None:
    for name in fields:
        value = getattr(config, name)
        _require(value is None or value >= least, f"{name} is {value}; expected at least {least:g}")


Trainable = Literal["all", "aux"]

INITIAL_MODEL = "initial_model"
"""As ``data.tokenizer``: the tokenizer of the model that the run begins from."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What updates which parameter (``train/optimizers.py`` holds the rule) and how strongly.

    kind:             ``muon``: Muon for hidden matrices, AdamW for all else; ``adamw``: AdamW for
                      everything.
    lr:               peak learning rate of AdamW.
    muon_lr:          peak learning rate of Muon.
    embedding_lr:     peak learning rate of embeddings (a tied head is one); None: ``lr``.
    vector_lr:        peak learning rate of gains, biases, couplings and a learned readout; None:
                      ``lr``.
    weight_decay:     decoupled decay of AdamW's matrices; embeddings, gains, biases and couplings
                      never decay.
    muon_weight_decay: decoupled decay of Muon's matrices; None: ``weight_decay``.
    muon_lr_adjust:   how Muon scales its step by the shape [rows, columns] of a matrix:
                      ``original`` by sqrt(max(1, rows / columns)) (Jordan), for a muon_lr near
                      0.02; ``match_rms_adamw`` by 0.2 sqrt(max(rows, columns)) (Moonshot), for a
                      muon_lr chosen as for AdamW.
    grad_clip:        largest L2 norm of all gradients together; None: no clipping.
    """

    kind: Literal["muon", "adamw"] = "muon"
    lr: float = 3e-3
    muon_lr: float = 0.02
    embedding_lr: float | None = None
    vector_lr: float | None = None
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    muon_weight_decay: float | None = None
    muon_momentum: float = 0.95
    muon_nesterov: bool = True
    muon_steps: int = 5
    muon_lr_adjust: Literal["original", "match_rms_adamw"] = "original"
    grad_clip: float | None = 1.0

    def __post_init__(self) -> None:
        for name in ("lr", "muon_lr", "embedding_lr", "vector_lr", "eps", "grad_clip"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name} is {value}; expected more than 0")
        _require_at_least(self, 0, "weight_decay", "muon_weight_decay")
        _require(1 <= self.muon_steps < 100, f"muon_steps is {self.muon_steps}; expected 1 to 99")
        _require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"betas is {list(self.betas)}; expected two numbers within [0, 1)",
        )
        _require(
            0 <= self.muon_momentum < 1,
            f"muon_momentum is {self.muon_momentum}; expected within [0, 1)",
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The course of the learning rate, in optimizer steps; every group's rate is its peak times one
    factor.

    kind:            ``wsd``: warm-up, constant, linear decay; ``cosine``: warm-up, half a cosine.
    warmup_steps:    the factor rises linearly and is exactly 1 at this step (counted from 0).
    decay_fraction:  the part of all steps the decay of ``wsd`` takes.
    min_lr_ratio:    the factor of the very last step.
    """

    kind: Literal["wsd", "cosine"] = "wsd"
    warmup_steps: int = 100
    decay_fraction: float = 0.3
    min_lr_ratio: float = 0.05

    def __post_init__(self) -> None:
        _require_at_least(self, 0, "warmup_steps")
        for name in ("decay_fraction", "min_lr_ratio"):
            _require(
                0 <= getattr(self, name) <= 1,
                f"{name} is {getattr(self, name)}; expected within [0, 1]",
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What is trained, how long, in what portions and on what machine.

    trainable:         ``aux``: the auxiliary's tensors alone; the primary is frozen, and no
                       gradient, optimizer state or backward pass is spent on it.
    steps:             optimizer steps of the whole run.
    batch_size:        sequences of one optimizer step, over all ranks.
    micro_batch_size:  sequences of one forward and backward pass on one rank; None: the rank's
                       whole part. It bounds memory and does not change the result beyond rounding.
    precision:         ``bf16`` runs the forward pass under autocast; weights and optimizer state
                       stay float32.
    compile:           ``auto``: torch.compile where a C++ compiler works, else eager with a note.
    activation_checkpointing: keep less for the backward pass and compute it again: memory for time.
    eval_every:        validate every so many steps, and at the end; None: only at the end.
    eval_batches:      validate on the first ``eval_batches * batch_size`` sequences; None: on all
                       of them.
    checkpoint_every:  save every so many steps; None: only when the run is stopped.
    keep_last:         how many of the newest checkpoints are kept.
    log_every:         steps between two lines of metrics.
    threads:           CPU threads of one rank; None: PyTorch's choice. Results are equal bit for
                       bit only between runs with the same number of threads.
    tensorboard:       ``auto``: event files beside the metrics where tensorboard is installed.
    wandb_project:     send the metrics to Weights & Biases under this project; None: do not.
    """

    trainable: Trainable = "all"
    steps: int
    batch_size: int = 16
    micro_batch_size: int | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: Literal["auto", "on", "off"] = "auto"
    activation_checkpointing: bool = False
    eval_every: int | None = None
    eval_batches: int | None = None
    checkpoint_every: int | None = None
    keep_last: int = 2
    log_every: int = 10
    device: str = "auto"
    threads: int | None = None
    tensorboard: Literal["auto", "on", "off"] = "auto"
    wandb_project: str | None = None

    def __post_init__(self) -> None:
        _require_at_least(
            self, 1, "steps", "batch_size", "micro_batch_size", "eval_every", "eval_batches"
        )
        _require_at_least(self, 1, "checkpoint_every", "keep_last", "log_every", "threads")
        # Far beyond any machine, OpenMP ends the whole process instead of raising.
        _require(
            self.threads is None or self.threads <= _MOST_THREADS,
            f"threads is {self.threads}; expected at most {_MOST_THREADS}",
        )
        _require(
            re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device) is not None,
            f"device is {self.device!r}; expected auto, cpu, mps, cuda or cuda:N",
        )


_MOST_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One complete run. Runs of equal ``fingerprint()`` have the same losses, up to rounding.

    initial_model:   folder of the model, or of the run, that training begins from; None: values
                     drawn by ``seed``. ``model`` is then that model's config, but for what
                     ``train/initial.py`` lets differ.
    initial_digest:  identity of that model by content; filled in when the run begins.
    """

    name: str
    seed: int = 0
    initial_model: str | None = None
    initial_digest: str | None = None
    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig

    def __post_init__(self) -> None:
        _require(
            re.fullmatch(r"[\w][\w.+=-]*", self.name) is not None,
            f"name is {self.name!r}; expected letters, digits and _ . + = - "
            "(it becomes the run's folder)",
        )
        _require(0 <= self.seed < 2**63, f"seed is {self.seed}; expected 0 or more, below 2**63")
        _require(
            self.data.sequence_length <= self.model.max_position,
            f"data.sequence_length is {self.data.sequence_length}, but the model has positions for "
            f"{self.model.max_position} (model.max_position)",
        )
        _require(self.initial_model != "", "initial_model is empty")
        _require(
            self.initial_model is not None or self.data.tokenizer != INITIAL_MODEL,
            f"data.tokenizer is {INITIAL_MODEL!r}, but there is no initial_model to take it from",
        )
        if self.train.trainable == "aux":
            self._check_aux_is_trainable()
        readout = self.model.readout
        _require(
            self.train.trainable == "aux"
            or not readout.standalone_primary
            or readout.primary_loss_weight > 0,
            "model.readout.standalone_primary is set, but nothing keeps p a model of its own while "
            "everything is trained for q: set train.trainable = 'aux', "
            "model.readout.primary_loss_weight above 0, or take it back",
        )

    def _check_aux_is_trainable(self) -> None:
        _require(
            parameter_counts(self.model).aux > 0,
            f"train.trainable is 'aux', but this {self.model.variant!r} model has no tensors of an "
            "auxiliary; add an auxiliary flow with `dualflow retrofit` first",
        )
        _require(
            self.model.readout.kind != "primary_only",
            "train.trainable is 'aux', but model.readout.kind 'primary_only' reads nothing from "
            "the auxiliary; choose another readout",
        )

    def identity(self) -> dict[str, Any]:
        """The fields that decide the losses, flat: ``{"optimizer.lr": 0.003, ...}``.

        Left out: the name, and what only decides where, how fast, or how often something is
        written. A model to begin from counts by its content, wherever it lies.
        """
        flat = _flatten(configuration.to_dict(self))
        free = {"name", "initial_model", "data.cache_dir"}
        free |= {f"train.{name}" for name in _FREE_TRAIN_FIELDS}
        return {key: value for key, value in flat.items() if key not in free}

    def fingerprint(self) -> str:
        """SHA-256 of ``identity()``, in hexadecimal."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()


# fmt: off
_FREE_TRAIN_FIELDS = frozenset({
    "micro_batch_size", "compile", "activation_checkpointing", "eval_every", "eval_batches",
    "checkpoint_every", "keep_last", "log_every", "device", "threads", "tensorboard",
    "wandb_project",
})
# fmt: on


def read_run_config(
    path: str | Path, base: RunConfig | None = None, assignments: Iterable[str] = ()
) -> RunConfig:
    """The run a TOML file (or a run's config.json) describes, laid over ``base`` where one is
    given, with ``--set`` ``assignments`` laid over both.

    ``[model]`` may begin with ``preset = "demo"`` (any name of ``spec.PRESETS``); its other keys
    then override the preset's. With ``initial_model`` the model is the one in that folder, and
    ``[model]`` may be left out or name what is to be read out otherwise; ``data.tokenizer`` is then
    that model's own unless it is given. Raises ``ConfigError`` that names the key, and
    ``ValueError`` where there is no such model.
    """
    path = Path(path)
    table = _read_json(path) if path.suffix == ".json" else configuration.read_toml(path)
    table.setdefault("name", base.name if base else path.stem)
    return _compose(base, configuration.overlay(table, _assigned(assignments)))


def with_assignments(config: RunConfig, assignments: Iterable[str]) -> RunConfig:
    """``config`` with ``--set`` assignments laid over it; raises as ``read_run_config`` does."""
    return _compose(config, _assigned(assignments))


def _assigned(assignments: Iterable[str]) -> dict[str, Any]:
    changes = configuration.assigned(assignments)
    if "initial_model" in changes:
        changes.setdefault("initial_digest", None)  # that of the one named before is not its own
    return changes


def _compose(base: RunConfig | None, table: Mapping[str, Any]) -> RunConfig:
    table = _with_named_model(table, base.train.trainable if base else "all")
    if base is None:
        return configuration.from_dict(RunConfig, table)
    return configuration.merge(base, table)


def _with_named_model(table: Mapping[str, Any], trainable: str) -> Mapping[str, Any]:
    """``table`` with the whole model of the folder or the preset that it names; ``trainable`` is
    what is trained unless the table says otherwise.
    """
    model, folder = table.get("model", {}), table.get("initial_model")
    preset = model.get("preset") if isinstance(model, Mapping) else None
    if isinstance(folder, str) and folder and table.get("initial_digest") is None:
        if preset is not None:
            raise ConfigError("model.preset and initial_model exclude each other; leave one out")
        return _with_initial_model(table, folder, trainable)
    if preset is None:
        return table
    try:
        chosen = spec.preset(str(preset))
    except ValueError as error:
        raise ConfigError(f"model.preset: {error}") from error
    changes = {key: value for key, value in model.items() if key != "preset"}
    whole = configuration.to_dict(configuration.merge(chosen, changes))
    return {**table, "model": whole}


def _with_initial_model(table: Mapping[str, Any], folder: str, trainable: str) -> dict[str, Any]:
    # Not above: checkpoints need torch, a configuration does not.
    from dualflow.train.initial import initial_config, initial_digest

    train = table.get("train", {})
    if isinstance(train, Mapping):
        trainable = train.get("trainable", trainable)
    model = initial_config(folder, table.get("model", {}), frozen=trainable == "aux")
    whole = configuration.overlay(table, {"model": configuration.to_dict(model)})
    whole["initial_digest"] = initial_digest(folder)
    data = whole.get("data", {})
    if isinstance(data, Mapping):  # what is no table is told by who reads it
        whole["data"] = {"tokenizer": INITIAL_MODEL, **data}
    return whole


def with_vocabulary(config: RunConfig, vocab_size: int) -> RunConfig:
    """``config`` fitted to a tokenizer of ``vocab_size`` ids: ids the text cannot have become
    padding rows, but for a model that was there before.

    Raises ``ConfigError`` where the model has too few rows.
    """
    if vocab_size > config.model.num_real_tokens:
        raise ConfigError(
            f"the data's tokenizer has {vocab_size} ids, but the model has room for "
            f"{config.model.num_real_tokens} (model.vocab_size); "
            f"set model.vocab_size to at least {vocab_size}"
        )
    if vocab_size == config.model.num_real_tokens or config.initial_model is not None:
        return config
    model = dataclasses.replace(config.model, real_vocab_size=vocab_size)
    return dataclasses.replace(config, model=model)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"{path} is not valid JSON: {reason}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path} holds a JSON {type(table).__name__}; expected an object")
    return table


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
