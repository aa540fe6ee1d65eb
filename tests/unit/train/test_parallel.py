import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dualflow.checkpoint.tensors import load_tensors, save_tensors
from dualflow.data.loader import Batch
from dualflow.model import build_model
from dualflow.testing.configs import flow_config
from dualflow.train import parallel as parallel_module
from dualflow.train.config import OptimizerConfig
from dualflow.train.machine import autocast_for
from dualflow.train.optimizers import Optimizers
from dualflow.train.parallel import Parallel, join_ranks
from dualflow.train.step import IGNORED, optimizer_step


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_two_ranks(batch_file: Path, output: Path, trainable: str) -> None:
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    script = Path(__file__).with_name("two_ranks.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(batch_file), str(output), trainable],
            env={**shared, "WORLD_SIZE": "2", "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=100) for process in processes] == [0, 0]


@pytest.mark.parametrize("trainable", ["all", "aux"])
def test_two_ranks_of_four_have_the_gradient_and_loss_of_one_rank_of_eight(
    tmp_path: Path, trainable: str
) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 53, (8, 64), generator=generator)
    targets = torch.randint(0, 53, (8, 64), generator=generator)
    for row in range(8):
        targets[row, 3 + 8 * row :] = IGNORED  # most counted targets are on rank 1
    save_tensors(tmp_path / "batch.safetensors", {"tokens": tokens, "targets": targets})
    run_two_ranks(tmp_path / "batch.safetensors", tmp_path, trainable)

    model = build_model(flow_config("primary_loss", init_std=0.05))
    if trainable == "aux":
        model.freeze_primary()
    report = optimizer_step(
        model.loss,
        Optimizers(model, OptimizerConfig()),
        Batch(tokens, targets, None, ()),
        step=1,
        micro_batch_size=8,
        grad_clip=None,
        autocast=autocast_for("fp32", torch.device("cpu")),
        parallel=Parallel(),
    )
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    first, second = (load_tensors(tmp_path / f"rank{rank}.safetensors") for rank in range(2))
    for found in (first, second):
        losses = found.pop("loss").tolist()
        assert losses == pytest.approx([report.loss.r, report.loss.p, report.grad_norm], rel=1e-5)
        assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(first[name], second[name]), name
        assert torch.allclose(first[name], gradient, rtol=0, atol=1e-6), name


def test_one_rank_needs_no_process_group() -> None:
    device = torch.device("cpu")
    parallel = join_ranks(device)
    assert (parallel.rank, parallel.world_size, parallel.is_main) == (0, 1, True)
    values = torch.tensor([1.0, 2.0])
    assert parallel.sum_(values) is values
    assert parallel.gather(values) == [values]
    assert parallel.any(True)
    parallel.barrier()
    parallel.sum_gradients([values])


def test_gradients_travel_in_buckets_of_one_number_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_module, "_BUCKET_ELEMENTS", 10)
    sizes = [4, 5, 3, 20, 1]
    gradients = [torch.zeros(size) for size in sizes]
    gradients.append(torch.zeros(2, dtype=torch.bfloat16))
    buckets = parallel_module._buckets(gradients)
    assert [[g.numel() for g in bucket] for bucket in buckets] == [[4, 5], [3], [20], [1], [2]]
