"""The mixture loss against the naive float64 loss, at the places where it bends."""

import pytest
import torch

from dualflow.model.readout import read_targets
from dualflow.ops import mixture, reference
from dualflow.spec import ReadoutConfig

VOCAB = 11


def logits(
    sharpness: float, rows: int = 6, flows: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Primary logits whose collision probability grows with ``sharpness``, auxiliary logits,
    targets.
    """
    generator = torch.Generator().manual_seed(0)
    primary = torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64)
    primary[:, 3] += sharpness
    aux = torch.randn(flows, rows, VOCAB, generator=generator, dtype=torch.float64)
    targets = torch.tensor([3, 0, 3, 5, 10, 3][:rows])
    return primary.requires_grad_(), aux.requires_grad_(), targets


@pytest.mark.parametrize("sharpness", [0.0, 2.0, 3.0, 5.0, 12.0])
@pytest.mark.parametrize("alpha_gradient", [True, False])
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_equals_the_naive_loss_in_value_and_gradients(
    sharpness: float, alpha_gradient: bool, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixture, "LOGITS_PER_CHUNK", 2 * VOCAB)
    primary, aux, targets = logits(sharpness)
    readout = ReadoutConfig(alpha_gradient=alpha_gradient, primary_loss_weight=weight)
    sums = mixture.sum_over_chunks(
        lambda p, a, t: read_targets(readout, p, a, t), primary, aux, targets, VOCAB
    )
    assert sums.p is not None
    loss = sums.r + weight * sums.p
    expected = reference.mixture_loss(
        primary, aux, targets, alpha_gradient=alpha_gradient, primary_loss_weight=weight
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    mine = torch.autograd.grad(loss, (primary, aux))
    theirs = torch.autograd.grad(expected, (primary, aux))
    torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("weights", [(0.0, 0.0, 0.0), (0.4, 1.3, -0.7), (-30.0, 0.0, 0.0)])
@pytest.mark.parametrize("sharpness", [0.0, 3.0])
def test_a_learned_alpha_equals_the_naive_loss_in_value_and_gradients(
    sharpness: float, weights: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixture, "LOGITS_PER_CHUNK", 2 * VOCAB)
    primary, aux, targets = logits(sharpness)
    weight = torch.tensor(weights, dtype=torch.float64, requires_grad=True)
    readout = ReadoutConfig(kind="learned")
    sums = mixture.sum_over_chunks(
        lambda p, a, t: read_targets(readout, p, a, t, weight), primary, aux, targets, VOCAB
    )
    expected = reference.mixture_loss(primary, aux, targets, alpha_weight=weight)
    assert sums.r.item() == pytest.approx(expected.item(), rel=1e-10)
    mine = torch.autograd.grad(sums.r, (primary, aux, weight))
    theirs = torch.autograd.grad(expected, (primary, aux, weight))
    torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


def test_sharpness_reaches_both_sides_of_one_half() -> None:
    collisions = [logits(s)[0].softmax(-1).square().sum(-1) for s in (0.0, 3.0, 12.0)]
    assert (collisions[0] < 0.5).all() and (collisions[2] > 0.99).all()
    assert ((collisions[1] > 0.5).any() and (collisions[1] < 0.95).any())  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("target", [0, 4])
def test_one_hot_primary_gives_finite_loss_and_gradients(dtype: torch.dtype, target: int) -> None:
    primary = torch.full((1, VOCAB), -200.0, dtype=dtype)
    primary[0, 4] = 200.0
    aux = torch.zeros(1, 1, VOCAB, dtype=dtype)
    primary.requires_grad_()
    aux.requires_grad_()
    r, p, _ = read_targets(ReadoutConfig(), primary, aux, torch.tensor([target]))
    assert p is not None and torch.isfinite(r).all()
    if target == 4:
        assert r.item() == pytest.approx(0.0, abs=1e-6)
    for gradient in torch.autograd.grad(r.sum(), (primary, aux)):
        assert torch.isfinite(gradient).all()


def test_float32_stays_close_to_float64_where_the_primary_is_nearly_certain() -> None:
    """1 − α as Σp(1 − p): a subtraction from 1 would lose it below 1e-7."""
    for sharpness in (15.0, 20.0, 25.0):
        primary, aux, _ = logits(sharpness)
        targets = torch.zeros(6, dtype=torch.long)
        exact = read_targets(ReadoutConfig(), primary, aux, targets).r
        rough = read_targets(ReadoutConfig(), primary.float(), aux.float(), targets).r
        torch.testing.assert_close(rough.double(), exact, rtol=0.05, atol=0.7)


def test_readouts_sum_to_one() -> None:
    from dualflow.model.readout import read_all

    for kind in ("mixture", "aux_only", "primary_only"):
        primary, aux, _ = logits(2.0)
        read = read_all(ReadoutConfig(kind=kind), primary, aux)
        torch.testing.assert_close(read.r.exp().sum(-1), torch.ones(6, dtype=torch.float64))


def test_uncounted_targets_change_nothing() -> None:
    primary, aux, targets = logits(1.0)
    readout = ReadoutConfig()

    def total(target: torch.Tensor) -> torch.Tensor:
        return mixture.sum_over_chunks(
            lambda p, a, t: read_targets(readout, p, a, t), primary, aux, target, VOCAB
        ).r

    some = targets.clone()
    some[2:] = -100
    first = mixture.sum_over_chunks(
        lambda p, a, t: read_targets(readout, p, a, t), primary[:2], aux[:, :2], targets[:2], VOCAB
    ).r
    torch.testing.assert_close(total(some), first)
