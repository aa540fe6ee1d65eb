"""Routing against a row-by-row reference, and the experts' product against a loop."""

import dataclasses

import pytest
import torch

from dualflow.model import build_model
from dualflow.ops import experts, reference
from dualflow.spec import MoEConfig
from dualflow.testing.configs import MIXTURES, mixture_config

MOES: dict[str, MoEConfig] = {name: fields["moe"] for name, fields in MIXTURES.items()}


def logits_of(moe: MoEConfig, rows: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return 2 * torch.randn(rows, moe.num_experts, generator=generator, dtype=torch.float64)


def bias_of(moe: MoEConfig) -> torch.Tensor | None:
    if not moe.selection_bias:
        return None
    return torch.randn(moe.num_experts, generator=torch.Generator().manual_seed(1)).double() / 3


@pytest.mark.parametrize("k", [0, 1, 3, 4])
@pytest.mark.parametrize("name", MOES)
def test_each_row_gets_the_experts_and_weights_of_the_reference(name: str, k: int) -> None:
    moe, logits, bias = MOES[name], logits_of(MOES[name]), bias_of(MOES[name])
    got = experts.choose_experts(experts.router_scores(logits, moe), moe, k, bias)
    for row, (chosen, weights) in enumerate(zip(got.experts_XK, got.weights_XK, strict=True)):
        want = reference.choose_experts(
            logits[row].tolist(), moe, k, None if bias is None else bias.tolist()
        )
        assert chosen.tolist() == list(want)
        assert weights.tolist() == pytest.approx(list(want.values()), rel=1e-12)


@pytest.mark.parametrize("name", MOES)
def test_rows_with_numbers_of_their_own_are_as_if_alone(name: str) -> None:
    moe, bias = MOES[name], bias_of(MOES[name])
    scores = experts.router_scores(logits_of(moe, 8), moe)
    counts = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])
    got = experts.choose_experts(scores, moe, 3, bias, counts)
    assert got.used_XK is not None
    for row, count in enumerate(counts.tolist()):
        alone = experts.choose_experts(scores[row : row + 1], moe, count, bias)
        assert got.experts_XK[row, :count].tolist() == alone.experts_XK[0].tolist()
        torch.testing.assert_close(got.weights_XK[row, :count], alone.weights_XK[0])
        assert got.weights_XK[row, count:].tolist() == [0.0] * (3 - count)
        assert got.used_XK[row].tolist() == [True] * count + [False] * (3 - count)


def test_of_equal_scores_the_lower_number_is_chosen() -> None:
    moe = MOES["mixtral"]
    scores = experts.router_scores(torch.zeros(1000, moe.num_experts), moe)
    assert (experts.choose_experts(scores, moe, 2).experts_XK == torch.tensor([0, 1])).all()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_sixteen_bit_logits_are_routed_in_float32(scores: str) -> None:
    moe = MoEConfig(num_experts=64, experts_per_token=4, expert_size=1, scores=scores)  # type: ignore[arg-type]
    logits = torch.randn(10_000, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    got = experts.choose_experts(experts.router_scores(logits, moe), moe, 4)
    want = experts.choose_experts(experts.router_scores(logits.float(), moe), moe, 4)
    assert got.weights_XK.dtype == torch.float32
    assert torch.equal(got.experts_XK, want.experts_XK)
    assert torch.equal(got.weights_XK, want.weights_XK)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    moe = dataclasses.replace(MOES["deepseek_v3"], num_groups=1, groups_per_token=1)
    scores = experts.router_scores(logits_of(moe, 6), moe)
    bias = torch.zeros(moe.num_experts, dtype=torch.float64)
    bias[5] = 100.0
    got = experts.choose_experts(scores, moe, 1, bias)
    assert (got.experts_XK == 5).all()
    torch.testing.assert_close(got.weights_XK[:, 0], torch.full((6,), moe.scaling).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 8, 0], [0, 0, 0, 0]])
def test_the_grouped_product_equals_the_loop(counts: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), 16, generator=generator).to(dtype)
    matrices = torch.randn(4, 24, 16, generator=generator).to(dtype)
    pairs = experts.Pairs(torch.arange(len(x)), torch.tensor(counts))
    got = pairs.product(x, matrices)
    want = experts.product_by_loop(x.double(), matrices.double(), pairs.counts_E)
    torch.testing.assert_close(
        got.double(), want, atol=1e-4 if dtype == torch.float32 else 0.2, rtol=0.0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MOES)
def test_every_mixture_trains_in_every_format(name: str, dtype: torch.dtype) -> None:
    config = mixture_config(name, "dual")
    model = build_model(config, dtype=dtype)
    tokens = torch.randint(0, 53, (2, 9), generator=torch.Generator().manual_seed(0))
    model.loss(tokens, tokens).total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
