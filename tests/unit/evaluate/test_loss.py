"""The evaluated loss against log-probabilities summed one target at a time."""

import dataclasses
import math

import pytest
import torch

from dualflow.data.loader import Batch
from dualflow.evaluate.loss import EvaluatedLoss, evaluate_loss
from dualflow.model import CausalLM, build_model
from dualflow.spec import Variant
from dualflow.testing import tiny_config


def model_of(variant: Variant = "dual") -> CausalLM:
    return build_model(tiny_config(variant), seed=1, dtype=torch.float64)


def batches() -> list[Batch]:
    """Three batches of unequal size, some targets uncounted: a mean of means would be wrong."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size, counted in ((3, 11), (2, 5), (1, 2)):
        ids = torch.randint(0, 53, (size, 12), generator=generator)
        targets = ids[:, 1:].clone()
        targets[:, counted:] = -100
        found.append(Batch(ids[:, :-1], targets, None, sample_ids=()))
    return found


def oracle(model: CausalLM, data: list[Batch]) -> tuple[list[float], int]:
    """Mean −log r, −log p, −log q from whole distributions, a sequence at a time."""
    sums, count = [0.0, 0.0, 0.0], 0
    for batch in data:
        for tokens, targets in zip(batch.tokens_BS, batch.targets_BS, strict=True):
            positions = torch.arange(len(tokens))
            cache = model.new_cache(len(tokens))
            out = model.step(tokens, positions, cache.writers(), aux_pins_A=positions)
            read = model.log_probs(out.primary_TD, out.aux_FAD)
            for t, target in enumerate(targets.tolist()):
                if target >= 0:
                    count += 1
                    for i, log_probs in enumerate(read):
                        sums[i] -= float(log_probs[t, target]) if log_probs is not None else 0.0
    return [total / count for total in sums], count


@torch.no_grad()
def test_losses_of_a_dual_model():
    model = model_of()
    found = evaluate_loss(model, batches())
    (r, p, q), count = oracle(model, batches())
    assert found.tokens == count == 3 * 11 + 2 * 5 + 2
    assert (found.loss, found.loss_p, found.loss_q) == pytest.approx((r, p, q), abs=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["standard", "phd2"])
def test_a_model_of_one_distribution_has_no_p_and_no_q(variant: Variant):
    model = model_of(variant)
    found = evaluate_loss(model, batches())
    assert found.loss == pytest.approx(oracle(model, batches())[0][0], abs=1e-12)
    assert found.loss_p is None
    assert found.loss_q is None


def test_document_ids_reach_the_model():
    model, data = model_of(), batches()[:1]
    whole = evaluate_loss(model, data).loss
    documents = torch.arange(11).expand(3, -1) // 4
    masked = dataclasses.replace(data[0], document_ids_BS=documents)
    assert evaluate_loss(model, [masked]).loss != whole


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool):
    model = model_of().train(training)
    evaluate_loss(model, batches())
    assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("where", ["tokens_BS", "targets_BS"])
def test_an_id_beyond_the_vocabulary_is_refused(where: str):
    (batch, *_) = batches()
    getattr(batch, where)[0, 0] = 53
    with pytest.raises(ValueError, match=r"token id 53 is outside .* of 53 ids \(0 \.\. 52\)"):
        evaluate_loss(model_of(), [batch])


def test_a_padding_id_is_refused():
    model = build_model(tiny_config("standard", vocab_size=64, real_vocab_size=53))
    (batch, *_) = batches()
    batch.targets_BS[0, 0] = 60
    with pytest.raises(ValueError, match="token id 60 is outside the model's vocabulary of 53"):
        evaluate_loss(model, [batch])


def test_a_negative_id_is_refused():
    (batch, *_) = batches()
    batch.tokens_BS[0, 0] = -1
    with pytest.raises(ValueError, match="token id -1"):
        evaluate_loss(model_of(), [batch])


def test_nothing_to_count_is_refused():
    (batch, *_) = batches()
    batch.targets_BS.fill_(-100)
    for data in ([], [batch]):
        with pytest.raises(ValueError, match="no counted target"):
            evaluate_loss(model_of(), data)


def test_bits_per_byte_by_hand():
    # A loss of 2 ln 2 is 2 bits per token; at 4 bytes per token, half a bit per byte.
    found = EvaluatedLoss(
        loss=2 * math.log(2), loss_p=None, loss_q=None, tokens=1, bytes_per_token=4.0
    )
    assert found.bits_per_byte == pytest.approx(0.5)
    assert found.perplexity == pytest.approx(4.0)


def test_unknown_bytes_and_boundless_perplexity():
    found = EvaluatedLoss(loss=1e4, loss_p=None, loss_q=None, tokens=1)
    assert found.bits_per_byte is None
    assert found.perplexity == math.inf
