"""Peak memory of the mixture loss: in row chunks, against one that holds all logits at once.

Both compute −log r of every row, forward and backward, with the same functions; the gradients they
leave (of the hidden rows and of the head) are part of both peaks.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch

from dualflow.bench.loss_probe import Probe, Reading
from dualflow.bench.measurement import Measurement
from dualflow.bench.timing import SILENT, Samples, Watcher

MIB = 2**20
_TIMEOUT_SECONDS = 600


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


def measure_loss_memory(case: LossMemoryCase, watcher: Watcher = SILENT) -> Iterator[Measurement]:
    """MiB above the inputs, one measurement for every number of chunks.

    Raises ``ValueError`` where a reading cannot be taken, such as for want of memory.
    """
    counts = (None, *case.chunk_counts)
    what = f"loss-memory: {case.rows} rows × {case.vocab_size}, D {case.hidden_size}"
    readings: dict[int | None, list[Reading]] = {count: [] for count in counts}
    total = case.repetitions * len(counts)
    for number in range(total):
        watcher.at(what, number, total)
        count = counts[number % len(counts)]
        readings[count].append(read_in_fresh_process(_probe(case, count)))
    watcher.at(what, total, total)
    naive = readings[None]
    for count in case.chunk_counts:
        chunked = readings[count]
        yield Measurement(
            benchmark="loss-memory",
            case=f"{case.rows} rows × {case.vocab_size} ids, D {case.hidden_size}, {count} chunks",
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
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
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


def _probe(case: LossMemoryCase, chunks: int | None) -> Probe:
    probe = Probe(
        rows=case.rows,
        vocab_size=case.vocab_size,
        hidden_size=case.hidden_size,
        rows_per_chunk=None,
        threads=torch.get_num_threads(),
    )
    return probe if chunks is None else replace(probe, rows_per_chunk=case.rows // chunks)


def _difference(a: Reading, b: Reading) -> float:
    """The larger of the relative differences of value and of gradient."""
    return max(
        abs(a.loss - b.loss) / abs(a.loss),
        abs(a.gradient_norm - b.gradient_norm) / abs(a.gradient_norm),
    )
