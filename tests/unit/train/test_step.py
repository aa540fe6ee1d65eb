import dataclasses
import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from dualflow.data.loader import Batch
from dualflow.model import CausalLM, build_model
from dualflow.testing.configs import flow_config, tiny_config
from dualflow.train.config import OptimizerConfig
from dualflow.train.machine import autocast_for
from dualflow.train.optimizers import Optimizers
from dualflow.train.parallel import Parallel
from dualflow.train.step import IGNORED, NonFiniteError, StepReport, optimizer_step

PRIMARY_LOSS = flow_config("primary_loss", init_std=0.05)


def uneven_batch(rows: int = 8, length: int = 64) -> Batch:
    """Rows with 3 to 60 counted targets."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 53, (rows, length), generator=generator)
    targets = torch.randint(0, 53, (rows, length), generator=generator)
    for row in range(rows):
        targets[row, 3 + (57 * row) // max(1, rows - 1) :] = IGNORED
    return Batch(tokens, targets, None, tuple(range(rows)))


def take_step(
    model: CausalLM,
    batch: Batch,
    micro_batch_size: int,
    *,
    grad_clip: float | None = None,
    precision: str = "fp32",
) -> StepReport:
    optimizers = Optimizers(model, OptimizerConfig())
    return optimizer_step(
        model.loss,
        optimizers,
        batch,
        step=1,
        micro_batch_size=micro_batch_size,
        grad_clip=grad_clip,
        autocast=autocast_for(precision, torch.device("cpu")),
        parallel=Parallel(),
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=0, atol=1e-6 * max(1, largest)), name


@pytest.mark.parametrize("micro_batch_size", [4, 3, 2, 1])
def test_accumulated_gradients_and_loss_equal_those_of_the_big_batch(micro_batch_size: int) -> None:
    batch = uneven_batch()
    whole, split = build_model(PRIMARY_LOSS), build_model(PRIMARY_LOSS)
    expected = take_step(whole, batch, 8)
    found = take_step(split, batch, micro_batch_size)
    assert_close(gradients(split), gradients(whole))
    assert found.loss.r == pytest.approx(expected.loss.r, rel=1e-6)
    assert found.loss.p == pytest.approx(expected.loss.p, rel=1e-6)
    assert found.loss.count == expected.loss.count == int((batch.targets_BS != IGNORED).sum())
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


def test_the_gradient_is_that_of_the_mean_over_counted_targets() -> None:
    batch = uneven_batch()
    model, oracle = build_model(PRIMARY_LOSS), build_model(PRIMARY_LOSS)
    take_step(model, batch, 2)
    sums = oracle.loss(batch.tokens_BS, batch.targets_BS, None)
    assert sums.p is not None
    ((sums.r + 0.3 * sums.p) / sums.count).backward()
    assert_close(gradients(model), gradients(oracle))


def test_a_last_window_that_is_not_full_counts_with_its_own_number() -> None:
    batch = uneven_batch(rows=10)
    whole, split = build_model(PRIMARY_LOSS), build_model(PRIMARY_LOSS)
    take_step(whole, batch, 10)
    take_step(split, batch, 4)
    assert_close(gradients(split), gradients(whole))


def test_clipping_acts_once_on_the_whole_gradient() -> None:
    batch = uneven_batch()
    whole, split = build_model(PRIMARY_LOSS), build_model(PRIMARY_LOSS)
    report = take_step(whole, batch, 8, grad_clip=0.01)
    take_step(split, batch, 2, grad_clip=0.01)
    assert report.grad_norm > 0.01
    clipped = math.sqrt(sum(float(g.square().sum()) for g in gradients(split).values()))
    assert clipped == pytest.approx(0.01, rel=1e-4)
    assert_close(gradients(split), gradients(whole))


def test_a_batch_without_targets_changes_nothing_by_its_gradient() -> None:
    batch = dataclasses.replace(
        uneven_batch(), targets_BS=torch.full((8, 64), IGNORED, dtype=torch.int64)
    )
    model = build_model(PRIMARY_LOSS)
    report = take_step(model, batch, 4)
    assert report.loss.r is None
    assert report.loss.count == 0
    assert report.grad_norm == 0.0


def test_a_loss_that_is_no_number_is_an_error_naming_the_step_before_any_weight_changes() -> None:
    model = build_model(tiny_config())
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[0] = math.nan
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(NonFiniteError, match=r"step 1: the loss is nan; a lower optimizer\.lr"):
        take_step(model, uneven_batch(), 4)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) or name == "model.norm.weight"


def test_a_gradient_that_is_no_number_is_an_error_naming_its_tensors() -> None:
    model = build_model(tiny_config())
    model.get_parameter("model.norm.weight").register_hook(lambda gradient: gradient * math.inf)
    before = model.lm_head.weight.clone()
    with pytest.raises(NonFiniteError, match=r"not finite in model\.norm\.weight;"):
        take_step(model, uneven_batch(), 4)
    assert torch.equal(model.lm_head.weight, before)


def test_bf16_runs_the_forward_pass_alone_in_bf16() -> None:
    model = build_model(tiny_config("dual"))
    weight = dict(model.named_parameters())["model.layers.0.self_attn.q_proj.weight"]
    report = take_step(model, uneven_batch(), 4, precision="bf16")
    assert weight.dtype == torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    exact = take_step(build_model(tiny_config("dual")), uneven_batch(), 4)
    assert report.loss.r != exact.loss.r
    assert report.loss.r == pytest.approx(exact.loss.r, rel=0.02)


def test_fp32_is_no_autocast() -> None:
    assert autocast_for("fp32", torch.device("cpu")) is nullcontext
