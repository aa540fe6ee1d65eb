from contextlib import nullcontext

import pytest
import torch

from dualflow.data import BatchLoader, ShardSet
from dualflow.model import build_model
from dualflow.testing.configs import tiny_config
from dualflow.train.parallel import Parallel
from dualflow.train.step import MeanLoss
from dualflow.train.validate import validation_loss

MODEL = build_model(tiny_config("dual", init_std=0.05))


def loader() -> BatchLoader:
    """Ten windows of 16: three batches of four, the last one half filled."""
    tokens = [(7 * i + i * i) % 53 for i in range(150)]
    shards = ShardSet.from_documents([tokens], vocab_size=53, eos_id=0)
    return BatchLoader(shards, 16, 4, seed=0, shuffle=False)


def losses(micro_batch_size: int, *, grad: bool = False, **settings: object) -> MeanLoss | None:
    options = {"max_batches": None, "stop": lambda: False} | settings
    return validation_loss(
        MODEL.loss,
        loader(),
        micro_batch_size=micro_batch_size,
        autocast=nullcontext,
        parallel=Parallel(),
        grad=grad,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
@pytest.mark.parametrize("grad", [False, True])
def test_losses_are_means_over_every_token_whatever_the_split(
    micro_batch_size: int, grad: bool
) -> None:
    found = losses(micro_batch_size, grad=grad)
    shards = loader().shards
    padded = torch.full((160,), 0)
    padded[:150] = torch.from_numpy(shards.tokens.astype("int64"))
    targets = torch.full((160,), -100)
    targets[:149] = padded[1:150]
    with torch.no_grad():
        whole = MODEL.loss(padded.view(10, 16), targets.view(10, 16), None)
    assert found is not None
    assert found.count == int(whole.count) == 149
    for name in ("r", "p", "q"):
        expected = float(getattr(whole, name)) / 149
        assert getattr(found, name) == pytest.approx(expected, rel=1e-5)


def test_a_limit_takes_the_first_batches() -> None:
    found = losses(4, max_batches=2)
    assert found is not None
    assert found.count == 2 * 4 * 16


def test_every_micro_batch_has_the_same_shape() -> None:
    shapes = set()

    def spy(tokens, targets, documents):
        shapes.add(tokens.shape)
        return MODEL.loss(tokens, targets, documents)

    validation_loss(
        spy, loader(), micro_batch_size=3, max_batches=None, autocast=nullcontext,
        parallel=Parallel(), stop=lambda: False, grad=False,
    )  # fmt: skip
    assert shapes == {(3, 16)}


def test_a_stop_ends_it_without_a_value() -> None:
    assert losses(4, stop=lambda: True) is None
