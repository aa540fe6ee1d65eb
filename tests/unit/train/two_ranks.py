"""One of the ranks of ``test_parallel.py``: a step on its part of the batch; writes the
gradients.
"""

import sys
from pathlib import Path

import torch

from dualflow.checkpoint.tensors import load_tensors, save_tensors
from dualflow.data.loader import Batch
from dualflow.model import build_model
from dualflow.testing.configs import flow_config
from dualflow.train.config import OptimizerConfig
from dualflow.train.machine import autocast_for
from dualflow.train.optimizers import Optimizers
from dualflow.train.parallel import join_ranks, leave_ranks
from dualflow.train.step import optimizer_step


def main(batch_file: str, output: str, trainable: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    parallel = join_ranks(device)
    whole = load_tensors(batch_file)
    share = len(whole["tokens"]) // parallel.world_size
    rows = slice(parallel.rank * share, (parallel.rank + 1) * share)
    model = build_model(flow_config("primary_loss", init_std=0.05))
    if trainable == "aux":
        model.freeze_primary()
    optimizers = Optimizers(model, OptimizerConfig())
    report = optimizer_step(
        model.loss,
        optimizers,
        Batch(whole["tokens"][rows], whole["targets"][rows], None, ()),
        step=1,
        micro_batch_size=2,
        grad_clip=None,
        autocast=autocast_for("fp32", device),
        parallel=parallel,
    )
    gathered = parallel.gather(torch.tensor([parallel.rank]))
    assert [int(t) for t in gathered] == list(range(parallel.world_size))
    assert parallel.any(parallel.rank == 1)
    assert not parallel.any(False)
    tensors = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    tensors["loss"] = torch.tensor([report.loss.r, report.loss.p, report.grad_norm])
    save_tensors(Path(output, f"rank{parallel.rank}.safetensors"), tensors)
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
