"""The suite ``core``: training, loss memory, decode and prefill, in about five minutes on two
cores; quick, in less than one.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from dualflow.bench import CORE
from dualflow.bench.inference import measure_decode, measure_prefill
from dualflow.bench.loss_memory import LossMemoryCase, measure_loss_memory
from dualflow.bench.measurement import Measurement
from dualflow.bench.pairs import build_pair
from dualflow.bench.timing import SILENT, Watcher
from dualflow.bench.training import TrainingCase, measure_training
from dualflow.recipes.demo import demo
from dualflow.spec import PRESETS, ModelConfig
from dualflow.train.machine import keep_freed_memory

MEDIUM = ModelConfig(
    vocab_size=4096, hidden_size=256, num_layers=6, num_heads=4, intermediate_size=768,
    max_position=1024, tie_embeddings=True,
)  # fmt: skip
"""Large enough for matrix products to take most of a training step."""

PROMPT = 128


@dataclass(frozen=True, kw_only=True)
class InferenceCase:
    """A standard model, whose dual is made of it; repetitions and new tokens by its speed."""

    name: str
    model: ModelConfig
    new_tokens: int
    decode_repetitions: int
    prefill_repetitions: int
    prompts: tuple[int, ...] = (128, 512)
    precisions: tuple[str, ...] = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a whole run of the suite measures."""

    training: tuple[TrainingCase, ...]
    loss_memory: tuple[LossMemoryCase, ...]
    inference: tuple[InferenceCase, ...]


def full_sizes() -> Sizes:
    """The sizes that results are quoted from."""
    recipe = demo("standard")
    return Sizes(
        training=(
            TrainingCase(
                name="demo", model=recipe.model, optimizer=recipe.optimizer,
                batch_size=recipe.train.batch_size, sequence_length=recipe.data.sequence_length,
                eager_repetitions=5, compiled_repetitions=15,
            ),
            TrainingCase(
                name="D 256 × 6 layers", model=MEDIUM, optimizer=recipe.optimizer,
                batch_size=8, sequence_length=256, eager_repetitions=3, compiled_repetitions=7,
            ),
        ),
        loss_memory=(
            # The second count of each is what training takes.
            LossMemoryCase(
                rows=2048, vocab_size=32768, hidden_size=64, chunk_counts=(4, 16, 64)
            ),
            LossMemoryCase(
                rows=4096, vocab_size=32768, hidden_size=256, chunk_counts=(4, 32)
            ),
        ),
        inference=(
            InferenceCase(
                name="demo", model=recipe.model,
                new_tokens=64, decode_repetitions=15, prefill_repetitions=15,
            ),
            InferenceCase(
                name="smollm2-135m", model=PRESETS["smollm2-135m"],
                new_tokens=16, decode_repetitions=5, prefill_repetitions=5,
            ),
        ),
    )  # fmt: skip


def quick_sizes() -> Sizes:
    """Small stand-ins, to see that everything runs. Their figures say little."""
    full = full_sizes()
    two_layers = dataclasses.replace(full.training[0].model, num_layers=2)
    return Sizes(
        training=(
            dataclasses.replace(
                full.training[0], name="demo, 2 layers", model=two_layers, batch_size=4,
                eager_repetitions=3, compiled_repetitions=3,
            ),
        ),
        loss_memory=(
            LossMemoryCase(rows=512, vocab_size=16384, hidden_size=64, chunk_counts=(4,)),
        ),
        inference=tuple(
            dataclasses.replace(
                case, name=f"{case.name}, 2 layers",
                model=dataclasses.replace(case.model, num_layers=2),
                new_tokens=8, decode_repetitions=3, prefill_repetitions=3, prompts=(128,),
            )
            for case in full.inference
        ),
    )  # fmt: skip


def measure_core(
    names: Collection[str] = tuple(CORE),
    *,
    sizes: Sizes | None = None,
    watcher: Watcher = SILENT,
) -> Iterator[Measurement]:
    """The benchmarks ``names`` of ``bench.CORE``, in its order; measured as the iterator is read.

    Raises ``ValueError`` for an unknown name.
    """
    if unknown := [name for name in names if name not in CORE]:
        raise ValueError(f"there is no benchmark {unknown[0]!r}; known: {', '.join(CORE)}")
    return _measure(names, sizes or full_sizes(), watcher)


def _measure(names: Collection[str], sizes: Sizes, watcher: Watcher) -> Iterator[Measurement]:
    # Training sets this; it stays for the process, so every benchmark gets it, whatever is run.
    keep_freed_memory()
    for name in CORE:
        if name in names:
            yield from _RUN[name](sizes, watcher)


def _training(sizes: Sizes, watcher: Watcher) -> Iterator[Measurement]:
    for case in sizes.training:
        yield from measure_training(case, watcher)


def _loss_memory(sizes: Sizes, watcher: Watcher) -> Iterator[Measurement]:
    for case in sizes.loss_memory:
        yield from measure_loss_memory(case, watcher)


def _decode(sizes: Sizes, watcher: Watcher) -> Iterator[Measurement]:
    for case in sizes.inference:
        pair = build_pair(case.name, case.model)
        for precision in case.precisions:
            yield measure_decode(
                pair,
                precision=precision,
                prompt_tokens=PROMPT,
                new_tokens=case.new_tokens,
                repetitions=case.decode_repetitions,
                watcher=watcher,
            )


def _prefill(sizes: Sizes, watcher: Watcher) -> Iterator[Measurement]:
    for case in sizes.inference:
        pair = build_pair(case.name, case.model)
        for precision in case.precisions:
            for prompt in case.prompts:
                yield measure_prefill(
                    pair,
                    precision=precision,
                    prompt_tokens=prompt,
                    repetitions=case.prefill_repetitions,
                    watcher=watcher,
                )


_RUN: dict[str, Callable[[Sizes, Watcher], Iterator[Measurement]]] = {
    "training": _training,
    "loss-memory": _loss_memory,
    "decode": _decode,
    "prefill": _prefill,
}
assert _RUN.keys() == CORE.keys()
