"""Peak memory of the mixture loss: in row chunks, against one that holds all logits at once.

Both compute −log r of every row, forward and backward, with the same functions; the gradients they
leave (of the hidden rows and of the head) are part of both peaks.

Resident memory is what the allocator holds, not what tensors need: left to itself, glibc keeps some
of what is freed, a different part each time. So the allocator is told to give large blocks back at
once; and once more, with the chunks that training takes, to keep them, as training has it.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from dualflow.bench.loss_probe import Probe, Reading
from dualflow.bench.measurement import Measurement
from dualflow.bench.timing import SILENT, Samples, Watcher
from dualflow.ops.mixture import LOGITS_PER_CHUNK

MIB = 2**20
_TIMEOUT_SECONDS = 600

_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""For glibc: blocks from 128 KiB up go back to the system when freed. Others ignore it."""


@dataclass(frozen=True, kw_only=True)
class LossMemoryCase:
    """Rows, vocabulary and width of one loss, and into how many chunks it is cut."""

    rows: int
    vocab_size: int
    hidden_size: int
    chunk_counts: tuple[int, ...]
    repetitions: int = 1

    def __post_init__(self) -> None:
        for count in self.chunk_counts:
            # Powers of two keep the rows of a chunk exact.
            if not 1 < count <= self.rows or self.rows % count or count & (count - 1):
                raise ValueError(
                    f"{count} chunks of {self.rows} rows; expected a power of two, above 1, that "
                    "divides the rows"
                )

    @property
    def training_chunks(self) -> int:
        """The chunks that training would cut these rows into."""
        return math.ceil(self.rows / max(1, LOGITS_PER_CHUNK // self.vocab_size))


@dataclass(frozen=True)
class _Setting:
    """``chunks`` None: naive."""

    chunks: int | None
    keep_freed: bool = False


def measure_loss_memory(case: LossMemoryCase, watcher: Watcher = SILENT) -> Iterator[Measurement]:
    """MiB above the inputs, one measurement for every number of chunks, and one as in training.

    Raises ``ValueError`` where a reading cannot be taken, such as for want of memory.
    """
    chunked = [_Setting(count) for count in case.chunk_counts]
    if case.training_chunks > 1:
        chunked.append(_Setting(case.training_chunks, keep_freed=True))
    settings = list(dict.fromkeys([*(_Setting(None, s.keep_freed) for s in chunked), *chunked]))
    readings: dict[_Setting, list[Reading]] = {setting: [] for setting in settings}
    size = f"{case.rows} rows × {case.vocab_size} ids, D {case.hidden_size}"
    total = case.repetitions * len(settings)
    for number in range(total):
        watcher.at(f"loss-memory: {size}", number, total)
        setting = settings[number % len(settings)]
        readings[setting].append(read_in_fresh_process(_probe(case, setting)))
    watcher.at(f"loss-memory: {size}", total, total)
    for setting in chunked:
        kept = ", as in training" if setting.keep_freed else ""
        yield _measurement(
            f"{size}, {setting.chunks} chunks{kept}",
            readings[_Setting(None, setting.keep_freed)],
            readings[setting],
        )


def _measurement(case: str, naive: list[Reading], chunked: list[Reading]) -> Measurement:
    return Measurement(
        benchmark="loss-memory",
        case=case,
        model=None,
        precision="fp32",
        compiled=False,
        unit="MiB",
        sides=("naive", "chunked"),
        samples=Samples(
            tuple(reading.peak_bytes / MIB for reading in naive),
            tuple(reading.peak_bytes / MIB for reading in chunked),
        ),
        value_difference=max(map(_difference, naive, chunked)),
    )


def read_in_fresh_process(probe: Probe) -> Reading:
    """``probe`` by a Python of its own. Raises ``ValueError`` with what that one last said."""
    command = [sys.executable, "-m", "dualflow.bench.loss_probe", json.dumps(asdict(probe))]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
            env={**os.environ, **_GIVE_BACK},
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"loss-memory: {probe.rows} rows took more than {_TIMEOUT_SECONDS} s"
        ) from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        # What a process killed by the kernel for want of memory leaves is a negative code.
        raise ValueError(
            f"loss-memory: the process for {probe.rows} rows × {probe.vocab_size} ids ended with "
            f"code {done.returncode} ({said}); is there enough memory?"
        )
    return Reading(**json.loads(done.stdout))


def _probe(case: LossMemoryCase, setting: _Setting) -> Probe:
    return Probe(
        rows=case.rows,
        vocab_size=case.vocab_size,
        hidden_size=case.hidden_size,
        rows_per_chunk=None if setting.chunks is None else math.ceil(case.rows / setting.chunks),
        threads=torch.get_num_threads(),
        keep_freed=setting.keep_freed,
    )


def _difference(a: Reading, b: Reading) -> float:
    """The larger of the relative differences of value and of gradient."""
    return max(
        abs(a.loss - b.loss) / abs(a.loss),
        abs(a.gradient_norm - b.gradient_norm) / abs(a.gradient_norm),
    )
