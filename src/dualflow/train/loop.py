"""The training loop: step, log, validate, save, until the last step or a signal."""

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from dualflow.checkpoint.atomic import atomic_folder
from dualflow.checkpoint.locate import is_model_folder
from dualflow.plan import costs
from dualflow.spec import parameter_counts
from dualflow.train.balance import collapse_warning, record_of
from dualflow.train.checkpoints import (
    check_finished,
    losses_of,
    save_checkpoint,
    write_folder,
)
from dualflow.train.config import RunConfig
from dualflow.train.display import Display, Style, open_display
from dualflow.train.initial import initial_digest, store_as
from dualflow.train.interrupt import StopSignals, TrainingInterrupted
from dualflow.train.machine import choose_device, set_up_machine
from dualflow.train.parallel import Parallel, join_ranks, leave_ranks
from dualflow.train.run_folder import Resume, RunFolder, claim, held, timestamp, write_json
from dualflow.train.schedule import learning_rate_factor
from dualflow.train.setup import Run, set_up, validation_loader
from dualflow.train.step import NonFiniteError, StepReport, optimizer_step
from dualflow.train.validate import validation_loss


def run_training(
    config: RunConfig, runs_folder: str | Path, *, resume: Resume, overwrite: bool, progress: Style
) -> dict[str, Any]:
    """``dualflow.train.train``, which documents the arguments."""
    set_up_machine(config.train)
    device = choose_device(config.train.device)
    parallel = join_ranks(device)
    display = open_display(progress if parallel.is_main else "none", config.name)
    folder = RunFolder(Path(runs_folder) / config.name)
    try:
        with held(folder) if parallel.is_main else nullcontext():
            resumed = _claim(folder, parallel, resume, overwrite)
            config = _with_digest(config, folder, resumed)
            if resumed and (result := folder.read_result()) is not None:
                check_finished(folder, config)
                display.note(f"{folder.path} is finished already")
                return result
            run = set_up(config, folder, device, parallel, resumed=resumed, note=display.note)
            try:
                return _train(run, display)
            finally:
                for sink in run.sinks:
                    sink.close()
    finally:
        display.close()
        leave_ranks()


def _claim(folder: RunFolder, parallel: Parallel, resume: Resume, overwrite: bool) -> bool:
    """``claim`` by rank 0, and its answer for all ranks."""
    resumed = claim(folder, resume=resume, overwrite=overwrite) if parallel.is_main else False
    return parallel.any(resumed)


def _with_digest(config: RunConfig, folder: RunFolder, resumed: bool) -> RunConfig:
    """``config`` with the identity of the model it begins from, where it came without. A run that
    is there knows it, should that model be gone.
    """
    if config.initial_model is None or config.initial_digest is not None:
        return config
    try:
        digest = initial_digest(config.initial_model)
    except ValueError:
        recorded = folder.read_config() if resumed else None
        if recorded is None or recorded.initial_model != config.initial_model:
            raise
        digest = recorded.initial_digest
    return replace(config, initial_digest=digest)


def _train(run: Run, display: Display) -> dict[str, Any]:
    """Take the steps that are left; returns the result. Raises ``TrainingInterrupted`` after saving
    on a signal.
    """
    train = run.config.train
    display.begin(run.progress.step, run.total_steps)
    with StopSignals(display.alert, echoes=run.parallel.world_size > 1) as signals:
        while True:
            over = run.progress.step == run.total_steps
            begins = run.progress.step == 0 and run.config.initial_model is not None
            # Asked again here, not at the end of a step, so that a run stopped in between makes up
            # for it.
            if (over or begins or _due(run, train.eval_every)) and not _is_validated(run):
                _validate(run, display, signals)
            if run.parallel.any(signals.received is not None):
                _stop(run, signals)
            if _due(run, train.checkpoint_every) and run.saved_step != run.progress.step:
                _save(run)
            if over:
                return _finish(run, display)
            report = _step(run)
            if run.progress.step % train.log_every == 0 or run.progress.step == run.total_steps:
                _log(run, display, _train_record(run, report))
                _warn_about_experts(run, display)


def _step(run: Run) -> StepReport:
    """One optimizer step on the loader's next batch."""
    config, state = run.config, run.progress
    begun = time.perf_counter()
    run.optimizers.set_factor(learning_rate_factor(state.step, run.total_steps, config.schedule))
    try:
        report = optimizer_step(
            run.loss.function,
            run.optimizers,
            next(run.loader),
            step=state.step + 1,
            micro_batch_size=run.micro_batch_size,
            grad_clip=config.optimizer.grad_clip,
            autocast=run.autocast,
            parallel=run.parallel,
            balance=run.balance,
        )
    except NonFiniteError as error:
        kept = (
            f"the checkpoint of step {run.saved_step} is kept"
            if run.saved_step
            else "no checkpoint was saved yet"
        )
        raise NonFiniteError(f"{error}; {kept}") from error
    seconds = time.perf_counter() - begun
    state.step += 1
    state.tokens += run.step_tokens
    state.train_seconds += seconds
    run.unlogged.add(run.step_tokens, seconds)
    return report


def _validate(run: Run, display: Display, signals: StopSignals) -> None:
    """Measure and log the validation losses; a signal ends it without a record, which a resumed run
    then makes.
    """
    loader = validation_loader(run)
    if loader is None:
        return
    loss = validation_loss(
        run.loss.function,
        loader,
        micro_batch_size=run.micro_batch_size,
        max_batches=run.config.train.eval_batches,
        autocast=run.autocast,
        parallel=run.parallel,
        stop=lambda: signals.received is not None,
        grad=run.loss.is_compiled,
    )
    if loss is None:
        return
    position = {"step": run.progress.step, "tokens": run.progress.tokens}
    record = {"kind": "validation", **position, "loss": loss.r, "loss_p": loss.p, "loss_q": loss.q}
    run.progress.validation = record
    if run.progress.step == 0:
        run.progress.initial_validation = record
    _log(run, display, record)


def _train_record(run: Run, report: StepReport) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": run.progress.step,
        "tokens": run.progress.tokens,
        "loss": report.loss.r,
        "lr": run.optimizers.learning_rate,
        "grad_norm": report.grad_norm,
        "tokens_per_second": run.unlogged.take_rate(),
        **(record_of(run.balance.load()) if run.balance else {}),
    }


def _warn_about_experts(run: Run, display: Display) -> None:
    """Say once that an expert is hardly chosen any more."""
    warning = collapse_warning(run.balance.load()) if run.balance else None
    if warning is not None and not run.has_warned:
        run.has_warned = True
        display.note(f"step {run.progress.step}: {warning}")


def _log(run: Run, display: Display, record: dict[str, Any]) -> None:
    for sink in run.sinks:
        sink.write(record)
    display.update(record)


def _save(run: Run) -> None:
    save_checkpoint(
        run.folder.checkpoints,
        run.model,
        run.optimizers,
        run.progress,
        run.loader.state_dict(),
        run.config,
        origin=run.origin,
        parallel=run.parallel,
    )
    run.saved_step = run.progress.step


def _stop(run: Run, signals: StopSignals) -> None:
    """Save what a signal interrupted, and raise ``TrainingInterrupted``."""
    if run.saved_step != run.progress.step:
        _save(run)
    raise TrainingInterrupted(
        f"stopped and saved at step {run.progress.step} of {run.total_steps}; continue with "
        f"`dualflow train --resume {run.folder.path}`",
        signals.received,
    )


def _finish(run: Run, display: Display) -> dict[str, Any]:
    """Write the final model and result.json; returns what the latter holds."""
    losses, result = losses_of(run.progress.validation), _result(run)
    if run.parallel.is_main:
        if note := store_as(run.model, run.origin):
            display.note(note)
        with atomic_folder(run.folder.model, replaceable=is_model_folder) as temporary:
            write_folder(run.model, temporary, run.origin, losses if losses["step"] else None)
        write_json(run.folder.result, result)
    run.parallel.barrier()
    return result


def _result(run: Run) -> dict[str, Any]:
    """What result.json holds."""
    config, state = run.config, run.progress
    losses, before = losses_of(state.validation), losses_of(state.initial_validation)
    context, trainable = config.data.sequence_length, config.train.trainable
    counts = parameter_counts(config.model)
    names = ("val_loss", "val_loss_p", "val_loss_q")
    initial = {f"{name}_initial": before[name] for name in names}
    return {
        "name": config.name,
        "variant": config.model.variant,
        "seed": config.seed,
        "tokens": state.tokens,
        "steps": state.step,
        **{name: losses[name] for name in names},
        **(initial if config.initial_model is not None else {}),
        "params": counts.total,
        "params_primary": counts.primary,
        "params_aux": counts.aux,
        "params_trainable": counts.aux if trainable == "aux" else counts.total,
        "trainable": trainable,
        "prefill_flops_per_token": costs.prefill_flops_per_token(config.model, context),
        "decode_flops_per_token": costs.decode_flops_per_token(config.model, context),
        "train_flops_per_token": costs.train_flops_per_token(config.model, context, trainable),
        "kv_bytes_per_token": costs.kv_bytes_per_token(config.model),
        "train_seconds": round(state.train_seconds, 3),
        "finished": timestamp(),
    }


def _due(run: Run, every: int | None) -> bool:
    return every is not None and run.progress.step > 0 and run.progress.step % every == 0


def _is_validated(run: Run) -> bool:
    last = run.progress.validation
    return last is not None and last["step"] == run.progress.step
