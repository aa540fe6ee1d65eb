"""Everything a run needs before its first step, built from its configuration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from dualflow.checkpoint.companions import TOKENIZER
from dualflow.checkpoint.store import load_model
from dualflow.data import BatchLoader, PreparedData, prepare
from dualflow.model import CausalLM, build_model
from dualflow.train.balance import Balance
from dualflow.train.checkpoints import Progress, find_checkpoint, read_checkpoint, restore
from dualflow.train.compilation import Loss, compile_loss
from dualflow.train.config import INITIAL_MODEL, RunConfig, with_vocabulary
from dualflow.train.initial import (
    Origin,
    check_digest,
    check_tokenizer,
    find_initial,
    load_initial,
    read_origin,
)
from dualflow.train.logs import Sink, check_sinks, open_sinks
from dualflow.train.machine import autocast_for
from dualflow.train.optimizers import Optimizers
from dualflow.train.parallel import Parallel
from dualflow.train.run_folder import RunFolder, truncate_metrics, write_records
from dualflow.train.schedule import effective_warmup
from dualflow.train.step import Autocast, LossFunction

Note = Callable[[str], None]


@dataclass
class Throughput:
    """Tokens and seconds of the optimizer steps since the last line of metrics."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count one step."""
        self.tokens += tokens
        self.seconds += seconds

    def take_rate(self) -> float:
        """Tokens per second since the last call."""
        rate = self.tokens / max(self.seconds, 1e-9)
        self.tokens, self.seconds = 0, 0.0
        return round(rate, 1)


@dataclass
class Run:
    """A run between its set-up and its end.

    config:       with the model fitted to the data's vocabulary.
    origin:       what the model keeps of the one that the run began from.
    total_steps:  the step the run ends with: ``train.steps``, or fewer where the data may be read
                  only once.
    saved_step:   the step of the newest checkpoint; None: there is none.
    balance:      of a model with experts; ``has_warned``: that one of them is lost was said.
    """

    config: RunConfig
    folder: RunFolder
    device: torch.device
    parallel: Parallel
    data: PreparedData
    loader: BatchLoader
    model: CausalLM
    origin: Origin
    loss: Loss
    autocast: Autocast
    optimizers: Optimizers
    micro_batch_size: int
    total_steps: int
    progress: Progress
    saved_step: int | None
    sinks: Sequence[Sink]
    balance: Balance | None = None
    has_warned: bool = False
    unlogged: Throughput = field(default_factory=Throughput)

    @property
    def step_tokens(self) -> int:
        """Positions of one global batch."""
        return self.config.train.batch_size * self.config.data.sequence_length


def set_up(
    config: RunConfig,
    folder: RunFolder,
    device: torch.device,
    parallel: Parallel,
    *,
    resumed: bool,
    note: Note,
) -> Run:
    """Prepare data, build or restore model, optimizers and loader, and write the run's records.

    Raises ``ValueError`` where the configuration does not fit data, ranks, model or checkpoint.
    """
    check_sinks(config)
    checkpoint = find_checkpoint(folder.checkpoints) if resumed else None
    if checkpoint is None:
        _check_initial(config, folder)
    data = _prepare_data(config, checkpoint, parallel, note)
    config = with_vocabulary(config, data.vocab_size)
    state = read_checkpoint(checkpoint, config) if checkpoint else None
    origin = state.origin if state else _origin(config, data)
    loader = _training_loader(config, data, parallel)
    torch.manual_seed(config.seed)
    model = _model(config, checkpoint, device)
    optimizers = Optimizers(model, config.optimizer)
    note(optimizers.table())
    rows = _micro_batch_size(config, parallel)
    autocast = autocast_for(config.train.precision, device)
    loss = _loss(model, config, rows, device, autocast, note)
    optimizers.zero_grad()
    total_steps = _total_steps(config, loader)
    note(f"{loss.note}; {_describe(config, total_steps, data)}")
    if state:
        restore(state, optimizers, parallel)
        loader.load_state_dict(state.loader)
        note(f"resuming at step {state.progress.step}")
    progress = state.progress if state else Progress()
    if parallel.is_main:
        write_records(folder, config, device, parallel.world_size, resumed=resumed)
        truncate_metrics(folder.metrics, progress.step if state else -1)
    return Run(
        config=config,
        folder=folder,
        device=device,
        parallel=parallel,
        data=data,
        loader=loader,
        model=model,
        origin=origin,
        loss=loss,
        autocast=autocast,
        optimizers=optimizers,
        balance=_balance(model, config, parallel),
        micro_batch_size=rows,
        total_steps=total_steps,
        progress=progress,
        saved_step=progress.step if state else None,
        sinks=open_sinks(config, folder, progress.step) if parallel.is_main else (),
    )


def _model(config: RunConfig, checkpoint: Path | None, device: torch.device) -> CausalLM:
    """The model in float32, which the optimizers need to keep small updates: fresh, the one to
    begin from, or as it was saved.
    """
    if checkpoint:
        model = load_model(checkpoint, device=device, dtype=torch.float32)
    elif config.initial_model is not None:
        model = load_initial(config.initial_model, config.model, device)
    else:
        model = build_model(config.model, seed=config.seed, device=device)
    if config.train.trainable == "aux":
        model.freeze_primary()
    model.set_activation_checkpointing(config.train.activation_checkpointing)
    return model.train()


def _check_initial(config: RunConfig, folder: RunFolder) -> None:
    """Raise ``ValueError`` unless the model to begin from is the one that ``config`` means."""
    if config.initial_model is None:
        if config.train.trainable == "aux":
            raise ValueError(
                "train.trainable is 'aux', but there is no initial_model: the primary would stay "
                "as it was drawn; name the folder of the model whose auxiliary is to be trained"
            )
        return
    check_digest(config.initial_model, config.initial_digest)
    place = find_initial(config.initial_model).resolve()
    if place.is_relative_to(folder.path.resolve()):
        raise ValueError(
            f"initial_model {config.initial_model} lies in the folder of this very run, which it "
            "would replace; give the run another name (--set name=...)"
        )


def _origin(config: RunConfig, data: PreparedData) -> Origin:
    """What goes along with a run's model from its first step on."""
    tokenizer = {TOKENIZER: data.tokenizer_json}
    if config.initial_model is None:
        return Origin(tokenizer)
    check_tokenizer(config.initial_model, data.tokenizer_json, config.data.eos_token)
    origin = read_origin(config.initial_model)
    return replace(origin, companions=tokenizer | dict(origin.companions))


def _prepare_data(
    config: RunConfig, checkpoint: Path | None, parallel: Parallel, note: Note
) -> PreparedData:
    """The data; one rank fills the cache, the others then find it there. The tokenizer of the model
    to begin from is in every checkpoint too.
    """
    if config.data.tokenizer == INITIAL_MODEL:
        assert config.initial_model is not None
        place = checkpoint or find_initial(config.initial_model)
        config = replace(config, data=replace(config.data, tokenizer=str(place)))
    shown: set[str] = set()

    def stage(name: str, _done: int, _total: int) -> None:
        if name not in shown:
            shown.add(name)
            note(f"data: {name}")

    if parallel.is_main:
        data = prepare(config.data, stage)
    parallel.barrier()
    if not parallel.is_main:
        data = prepare(config.data)
    for text in data.notes:
        note(text)
    return data


def _training_loader(config: RunConfig, data: PreparedData, parallel: Parallel) -> BatchLoader:
    return BatchLoader(
        data.train,
        config.data.sequence_length,
        config.train.batch_size,
        config.seed,
        rank=parallel.rank,
        world_size=parallel.world_size,
        on_end=config.data.on_end,
    )


def _wanted_compilation(config: RunConfig, note: Note) -> Literal["auto", "on", "off"]:
    """``train.compile``, but that a model with experts is compiled only where that is asked for."""
    if config.model.moe is None or config.train.compile != "auto":
        return config.train.compile
    note("a model with experts is not compiled: torch knows their product in bfloat16 alone")
    return "off"


def _balance(model: CausalLM, config: RunConfig, parallel: Parallel) -> Balance | None:
    if config.model.moe is None:
        return None
    return Balance(model, parallel, config.train.batch_size * config.data.sequence_length)


def validation_loader(run: Run) -> BatchLoader | None:
    """A fresh pass over this rank's part of the validation split, in order; None where nothing is
    held out.
    """
    if not run.data.validation.num_windows(run.config.data.sequence_length):
        return None
    return BatchLoader(
        run.data.validation,
        run.config.data.sequence_length,
        run.config.train.batch_size,
        run.config.seed,
        rank=run.parallel.rank,
        world_size=run.parallel.world_size,
        shuffle=False,
    )


def _total_steps(config: RunConfig, loader: BatchLoader) -> int:
    if loader.on_end == "stop":
        return min(config.train.steps, loader.batches_per_epoch)
    return config.train.steps


def _micro_batch_size(config: RunConfig, parallel: Parallel) -> int:
    share = config.train.batch_size // parallel.world_size
    return min(config.train.micro_batch_size or share, share)


def _loss(
    model: CausalLM,
    config: RunConfig,
    rows: int,
    device: torch.device,
    autocast: Autocast,
    note: Note,
) -> Loss:
    return compile_loss(
        model.loss,
        _wanted_compilation(config, note),
        lambda function: _trial(function, config, rows, device, autocast),
    )


def _trial(
    loss: LossFunction, config: RunConfig, rows: int, device: torch.device, autocast: Autocast
) -> None:
    """One forward and backward pass over made-up tokens of the shapes training will use."""
    tokens_BS = torch.zeros((rows, config.data.sequence_length), dtype=torch.int64, device=device)
    documents_BS = torch.zeros_like(tokens_BS) if config.data.document_mask else None
    with autocast():
        sums = loss(tokens_BS, tokens_BS.clone(), documents_BS)
    sums.total.backward()


def _describe(config: RunConfig, total_steps: int, data: PreparedData) -> str:
    tokens = total_steps * config.train.batch_size * config.data.sequence_length
    passes = tokens / max(1, data.train.num_tokens)
    text = f"{total_steps} steps, {tokens:,} tokens "
    text += f"({passes:.2f} passes over {data.train.num_tokens:,})"
    if total_steps < config.train.steps:
        text += f"; fewer than train.steps {config.train.steps}, because data.on_end is 'stop'"
    warmup = effective_warmup(total_steps, config.schedule)
    if warmup < config.schedule.warmup_steps:
        wanted = config.schedule.warmup_steps
        text += f"; warm-up shortened from {wanted} to {warmup} steps to fit the run"
    return text
