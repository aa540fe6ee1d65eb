"""Time of a training step, dual against standard, next to the FLOPs counted for both.

Two readings of each setting: forward and backward alone, which is what the counted FLOPs are of,
and the whole optimizer step, in which the update costs both models nearly the same.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dualflow.bench.measurement import Measurement
from dualflow.bench.pairs import made_up_tokens
from dualflow.bench.timing import SILENT, Watcher, paired, seconds_of
from dualflow.data.loader import Batch
from dualflow.model import build_model
from dualflow.plan.costs import train_flops_per_token
from dualflow.recipes.demo import as_dual
from dualflow.spec import ModelConfig
from dualflow.train.compilation import find_cpp_compiler
from dualflow.train.config import OptimizerConfig
from dualflow.train.machine import autocast_for
from dualflow.train.optimizers import Optimizers
from dualflow.train.parallel import Parallel
from dualflow.train.step import LossFunction, optimizer_step


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """One model and batch.

    model:  a standard model; the dual one is made of it.
    eager_repetitions, compiled_repetitions: how many readings; 0 leaves that out.
    """

    name: str
    model: ModelConfig
    optimizer: OptimizerConfig
    batch_size: int
    sequence_length: int
    eager_repetitions: int
    compiled_repetitions: int

    @property
    def counted_ratio(self) -> float:
        """FLOPs of a dual training token over those of a standard one."""
        standard, dual = (
            train_flops_per_token(config, self.sequence_length)
            for config in (self.model, as_dual(self.model))
        )
        return dual / standard


def measure_training(case: TrainingCase, watcher: Watcher = SILENT) -> Iterator[Measurement]:
    """Milliseconds of forward and backward, and of the whole step: eager, then compiled.

    Compiled rows are left out, with a note, where there is no working C++ compiler.
    """
    standard, dual = _Trainee(case, case.model), _Trainee(case, as_dual(case.model))
    if case.eager_repetitions:
        yield from _measure(case, standard, dual, watcher, compiled=False)
    if case.compiled_repetitions:
        problem = _compile(case, (standard, dual), watcher)
        if problem is None:
            yield from _measure(case, standard, dual, watcher, compiled=True)
        else:
            watcher.note(f"training: {case.name} is measured eager only: {problem}")


class _Trainee:
    """One model in training, on one batch."""

    def __init__(self, case: TrainingCase, config: ModelConfig) -> None:
        self.model = build_model(config).train()
        self.loss: LossFunction = self.model.loss
        self._optimizers = Optimizers(self.model, case.optimizer)
        self._grad_clip = case.optimizer.grad_clip
        ids_BS = made_up_tokens(config, case.batch_size, case.sequence_length + 1)
        tokens_BS, targets_BS = ids_BS[:, :-1].contiguous(), ids_BS[:, 1:].contiguous()
        self._batch = Batch(tokens_BS, targets_BS, None, sample_ids=())
        self._parallel = Parallel()
        self._steps = 0

    def forward_backward(self) -> None:
        """All gradients of the batch, and no update."""
        self._optimizers.zero_grad()
        sums = self.loss(self._batch.tokens_BS, self._batch.targets_BS, None)
        (sums.total / self._batch.tokens_BS.numel()).backward()

    def step(self) -> None:
        """What the trainer does once per step."""
        self._steps += 1
        optimizer_step(
            self.loss,
            self._optimizers,
            self._batch,
            step=self._steps,
            micro_batch_size=len(self._batch.tokens_BS),
            grad_clip=self._grad_clip,
            autocast=autocast_for("fp32", self._parallel.device),
            parallel=self._parallel,
        )


def _measure(
    case: TrainingCase, standard: _Trainee, dual: _Trainee, watcher: Watcher, *, compiled: bool
) -> Iterator[Measurement]:
    works: dict[str, Callable[[_Trainee], None]] = {
        "forward and backward": _Trainee.forward_backward,
        "whole step": _Trainee.step,
    }
    mode = "compiled" if compiled else "eager"
    size = f"{case.batch_size} × {case.sequence_length} tokens"
    for name, work in works.items():
        samples = paired(
            lambda work=work: seconds_of(lambda: work(standard)),
            lambda work=work: seconds_of(lambda: work(dual)),
            case.compiled_repetitions if compiled else case.eager_repetitions,
            what=f"training: {case.name}, {name}, {mode}",
            watcher=watcher,
        )
        yield Measurement(
            benchmark="training",
            case=f"{case.name}, {size}, {name}",
            model=case.name,
            precision="fp32",
            compiled=compiled,
            unit="ms",
            samples=samples.scaled(1e3),
            counted_ratio=case.counted_ratio,
        )


def _compile(
    case: TrainingCase, trainees: tuple[_Trainee, _Trainee], watcher: Watcher
) -> str | None:
    """Compile both losses; returns what went wrong, if anything. Both must be compiled before
    either is measured: compiled code is kept per process, and a reset would drop the first's.
    """
    if find_cpp_compiler() is None:
        return "no working C++ compiler was found"
    torch.compiler.reset()
    try:
        for number, trainee in enumerate(trainees):
            watcher.at(f"training: compiling {case.name}", number, len(trainees))
            trainee.loss = torch.compile(trainee.model.loss, dynamic=False)
            trainee.forward_backward()
    except Exception as error:  # a compiler may raise anything
        return (
            f"torch.compile failed ({type(error).__name__}: {' '.join(str(error).split())[:160]})"
        )
    return None
