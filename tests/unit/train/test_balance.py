"""Balancing experts: the whole batch whatever its parts, and biases that even out."""

import dataclasses

import pytest
import torch

from dualflow.model import CausalLM
from dualflow.model.balance import move_selection_bias, router_sums
from dualflow.model.kv import BatchKV
from dualflow.spec import AuxConfig, ModelConfig
from dualflow.testing.configs import MIXTURES, mixture_config
from dualflow.testing.tensors import tiny_model
from dualflow.train.balance import Balance, collapse_warning, record_of
from dualflow.train.parallel import Parallel

CPU = Parallel(device=torch.device("cpu"))
ROWS, LENGTH = 4, 11


def balanced(mixture: str, aux: AuxConfig | None = None, variant: str = "dual") -> ModelConfig:
    moe = dataclasses.replace(MIXTURES[mixture]["moe"], balance_weight=0.3, z_weight=0.2)
    return mixture_config(mixture, variant, moe=moe, aux=aux)  # type: ignore[arg-type]


def tokens() -> torch.Tensor:
    return torch.randint(0, 53, (ROWS, LENGTH), generator=torch.Generator().manual_seed(6))


@torch.no_grad()
def by_hand(model: CausalLM) -> float:
    """Row by row from what the routers did."""
    config = model.config
    moe = config.moe
    assert moe is not None
    positions = torch.arange(LENGTH).repeat(ROWS)
    kv = BatchKV(ROWS, LENGTH)
    routing = model._whole_step(tokens().flatten(), positions, kv).routing
    total, first = 0.0, ROWS * LENGTH
    flows = config.flows
    kinds = [False]
    if flows and flows.routing == "independent" and config.aux_experts_per_token:
        kinds.append(True)
    for is_aux in kinds:
        for layer in routing:
            rows = slice(first, None) if is_aux else slice(None, first)
            scores, logits = layer.scores_RE[rows], layer.logits_RE[rows]
            chosen = layer.aux if is_aux else layer.primary
            assert chosen is not None
            for expert in range(moe.num_experts):
                used = (chosen.experts_XK == expert).sum() / chosen.experts_XK.numel()
                share = (scores[:, expert] / scores.sum(-1)).mean()
                total += moe.balance_weight * moe.num_experts * float(used * share) / len(routing)
            total += moe.z_weight * float(logits.logsumexp(-1).square().mean()) / len(routing)
    return total


CASES = {
    "softmax": balanced("qwen2_moe", AuxConfig(experts_per_token=3)),
    "sigmoid": balanced("deepseek_v3", AuxConfig(num_flows=2, experts_per_token=1)),
    "a flow without experts": balanced("qwen3_moe", AuxConfig(experts_per_token=0)),
    "replay": balanced("mixtral", AuxConfig(routing="replay")),
    "standard": balanced("olmoe", variant="standard"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_the_formula(name: str) -> None:
    model = tiny_model(CASES[name])
    part = model.loss(tokens(), tokens())
    assert part.router is not None
    balance = Balance(model, CPU, ROWS * LENGTH)
    assert float(balance.loss(part.router).detach()) == pytest.approx(by_hand(model), rel=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_the_z_loss_does_not_depend_on_how_a_batch_is_split(name: str) -> None:
    config = CASES[name]
    assert config.moe is not None
    moe = dataclasses.replace(config.moe, balance_weight=0.0)
    model = tiny_model(dataclasses.replace(config, moe=moe))
    totals = []
    for size in (4, 2, 1):
        balance = Balance(model, CPU, ROWS * LENGTH)
        balance.begin()
        total = 0.0
        for rows in tokens().split(size):
            part = model.loss(rows, rows)
            assert part.router is not None
            total += float(balance.loss(part.router).detach())
        totals.append(total)
    assert totals == pytest.approx([totals[0]] * 3, rel=1e-9)


def test_counts_of_all_micro_batches_move_the_biases() -> None:
    model = tiny_model(CASES["sigmoid"])
    whole, split = Balance(model, CPU, ROWS * LENGTH), Balance(model, CPU, ROWS * LENGTH)
    biases = []
    for balance, size in ((whole, 4), (split, 1)):
        for mixture in balance._mixtures.values():
            assert mixture.selection_bias is not None
            mixture.selection_bias.weight.zero_()
        balance.begin()
        for rows in tokens().split(size):
            part = model.loss(rows, rows)
            assert part.router is not None
            balance.loss(part.router)
        balance.finish()
        (mixture,) = balance._mixtures.values()
        assert mixture.selection_bias is not None
        biases.append(mixture.selection_bias.weight.clone())
    assert torch.equal(biases[0], biases[1]) and biases[0].any()
    assert float(biases[0].mean()) == pytest.approx(0.0, abs=1e-9)


def test_a_bias_rises_where_an_expert_is_chosen_too_rarely() -> None:
    bias = torch.zeros(4)
    for _ in range(1000):
        move_selection_bias(bias, torch.tensor([10, 0, 3, 3]), 1e-3)
    assert bias.argsort().tolist()[0] == 0 and bias.argmax() == 1
    assert float(bias.mean()) == pytest.approx(0.0, abs=1e-6)


def test_a_model_without_experts_has_no_sums() -> None:
    assert router_sums([], mixture_config("mixtral")) is None


def test_loads_are_told_by_layer_and_a_lost_expert_is_named() -> None:
    model = tiny_model(CASES["softmax"])
    balance = Balance(model, CPU, ROWS * LENGTH)
    assert balance.load() == [] and collapse_warning([]) is None
    part = model.loss(tokens(), tokens())
    assert part.router is not None
    balance.loss(part.router)
    record = record_of(balance.load())
    assert {"expert_load_primary_0_max", "expert_load_auxiliary_1_min"} <= record.keys()
    assert all(value >= 0 for value in record.values())
    balance._counts_FLE = torch.tensor([[[10, 10, 0, 10, 10, 10]] * 2] * 2)
    warning = collapse_warning(balance.load())
    assert warning is not None and "expert 2 of layer 0 gets 0.00" in warning
