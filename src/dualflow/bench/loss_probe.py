"""One reading of the mixture loss's peak memory, in a process of its own.

``python -m dualflow.bench.loss_probe JSON`` runs ``Probe(**JSON)`` and prints a ``Reading`` as
JSON. A process has one peak for all its life, so every reading needs a fresh one.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualflow.model.readout import read_targets
from dualflow.ops.mixture import LOGITS_PER_CHUNK, TargetLogProbs, sum_over_chunks
from dualflow.spec import ReadoutConfig
from dualflow.train.machine import keep_freed_memory

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The loss of ``rows`` rows over a vocabulary of V ids from hidden rows of D numbers, forward
    and backward.

    rows_per_chunk: None holds the logits of all rows at once under plain autograd; else as in
                    training: row chunks, recomputed in the backward pass.
    keep_freed:     let the allocator keep what is freed, as training does for speed.
    """

    rows: int
    vocab_size: int
    hidden_size: int
    rows_per_chunk: int | None
    threads: int
    keep_freed: bool = False


@dataclass(frozen=True)
class Reading:
    """peak_bytes: how far resident memory rose above what the inputs and the process take.
    loss, gradient_norm: what was computed, for comparison.
    """

    peak_bytes: int
    loss: float
    gradient_norm: float


def run(probe: Probe) -> Reading:
    """Take the reading. In a process with a history it is too low, unless the system can reset
    the peak.
    """
    torch.set_num_threads(probe.threads)
    if probe.keep_freed:
        keep_freed_memory()
    small = Probe(rows=4, vocab_size=8, hidden_size=8, rows_per_chunk=2, threads=probe.threads)
    _forward_backward(small, _inputs(small))  # libraries and threads take their memory now
    inputs = _inputs(probe)
    _reset_peak()
    before = resident_bytes()
    loss = _forward_backward(probe, inputs)
    peak = peak_bytes()
    gradients = [x.grad for x in inputs if x.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return Reading(max(0, peak - before), float(loss), float(norm))


def resident_bytes() -> int:
    """Resident memory of this process now; the peak so far where the system does not tell."""
    return _status_bytes("VmRSS") or peak_bytes()


def peak_bytes() -> int:
    """The largest resident memory of this process so far. Raises ``ValueError`` on a system that
    does not tell.
    """
    if (peak := _status_bytes("VmHWM")) is not None:
        return peak
    try:
        import resource
    except ImportError as error:
        raise ValueError("this system does not tell a process its peak memory") from error
    # In KiB, except on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status_bytes(field: str) -> int | None:
    try:
        text = _STATUS.read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def _reset_peak() -> None:
    """Let the peak begin at what is resident now (Linux); elsewhere imports may hide small
    peaks.
    """
    try:
        _CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError:
        return


def _inputs(probe: Probe) -> list[Tensor]:
    """Primary rows [T, D], auxiliary rows [1, T, D], head [V, D], targets [T]."""
    generator = torch.Generator().manual_seed(0)
    rows, width = probe.rows, probe.hidden_size
    shapes = ((rows, width), (1, rows, width), (probe.vocab_size, width))
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    # Logits then vary by about 1: neither flat nor one-hot.
    inputs[2].div_(width**0.5)
    targets = torch.randint(probe.vocab_size, (rows,), generator=generator)
    return [*(x.requires_grad_() for x in inputs), targets]


def _forward_backward(probe: Probe, inputs: list[Tensor]) -> Tensor:
    primary_TD, aux_FTD, head_VD, targets_T = inputs

    def score(primary: Tensor, aux: Tensor, targets: Tensor) -> TargetLogProbs:
        return read_targets(ReadoutConfig(), primary @ head_VD.T, aux @ head_VD.T, targets)

    if probe.rows_per_chunk is None:
        loss = -score(primary_TD, aux_FTD, targets_T).r.sum()
    else:
        # The vocabulary's size serves only to choose the rows of a chunk; this one gives them.
        size = LOGITS_PER_CHUNK // probe.rows_per_chunk
        loss = sum_over_chunks(score, primary_TD, aux_FTD, targets_T, size).r
    loss.backward()
    return loss.detach()


def main(argument: str) -> None:
    """Print the reading of the probe that ``argument`` describes."""
    wanted: dict[str, Any] = json.loads(argument)
    print(json.dumps(asdict(run(Probe(**wanted)))))


if __name__ == "__main__":
    main(sys.argv[1])
