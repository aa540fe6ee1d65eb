"""A training run as plain data: model, data, optimizer, schedule and the loop's own settings. No
torch here.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dualflow import config as configuration
from dualflow import spec
from dualflow.config import ConfigError
from dualflow.data.config import DataConfig
from dualflow.spec import ModelConfig


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_at_least(config: Any, least: float, *fields: str) -> None:
    for name in fields:
        value = getattr(config, name)
        _require(value is None or value >= least, f"{name} is {value}; expected at least {least:g}")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What updates which parameter (``train/optimizers.py`` holds the rule) and how strongly.

    kind:             ``muon``: Muon for hidden matrices, AdamW for all else; ``adamw``: AdamW for
                      everything.
    lr:               peak learning rate of AdamW.
    muon_lr:          peak learning rate of Muon.
    embedding_lr:     peak learning rate of embeddings (a tied head is one); None: ``lr``.
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
        for name in ("lr", "muon_lr", "embedding_lr", "eps", "grad_clip"):
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
    """How long, in what portions and on what machine.

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
    """One complete run. Runs of equal ``fingerprint()`` have the same losses, up to rounding."""

    name: str
    seed: int = 0
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

    def identity(self) -> dict[str, Any]:
        """The fields that decide the losses, flat: ``{"optimizer.lr": 0.003, ...}``.

        Left out: the name, and what only decides where, how fast, or how often something is
        written.
        """
        flat = _flatten(configuration.to_dict(self))
        free = {"name", "data.cache_dir", *(f"train.{name}" for name in _FREE_TRAIN_FIELDS)}
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


def read_run_config(path: str | Path, base: RunConfig | None = None) -> RunConfig:
    """The run a TOML file (or a run's config.json) describes, laid over ``base`` where one is
    given.

    ``[model]`` may begin with ``preset = "demo"`` (any name of ``spec.PRESETS``); its other keys
    then override the preset's. Raises ``ConfigError`` that names the key.
    """
    path = Path(path)
    table = _read_json(path) if path.suffix == ".json" else configuration.read_toml(path)
    model = table.get("model")
    if isinstance(model, Mapping) and "preset" in model:
        changes = {key: value for key, value in model.items() if key != "preset"}
        try:
            chosen = spec.preset(str(model["preset"]))
        except ValueError as error:
            raise ConfigError(f"model.preset: {error}") from error
        table["model"] = configuration.to_dict(configuration.merge(chosen, changes))
    table.setdefault("name", base.name if base else path.stem)
    return (
        configuration.from_dict(RunConfig, table)
        if base is None
        else configuration.merge(base, table)
    )


def with_vocabulary(config: RunConfig, vocab_size: int) -> RunConfig:
    """``config`` fitted to a tokenizer of ``vocab_size`` ids: ids the text cannot have become
    padding rows.

    Raises ``ConfigError`` where the model has too few rows.
    """
    if vocab_size > config.model.num_real_tokens:
        raise ConfigError(
            f"the data's tokenizer has {vocab_size} ids, but the model has room for "
            f"{config.model.num_real_tokens} (model.vocab_size); "
            f"set model.vocab_size to at least {vocab_size}"
        )
    if vocab_size == config.model.num_real_tokens:
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
