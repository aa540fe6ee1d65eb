"""Stacked matrices against torch.optim.Muon, one matrix at a time."""

import pytest
import torch

from dualflow.train.expert_muon import ExpertMuon


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8), (1, 12, 12)])
def test_each_expert_moves_as_a_matrix_of_its_own(
    shape: tuple[int, int, int], nesterov: bool, adjust: str
) -> None:
    generator = torch.Generator().manual_seed(4)
    stack = torch.randn(shape, generator=generator).requires_grad_()
    alone = [matrix.clone().requires_grad_() for matrix in stack.detach()]
    settings = {
        "lr": 0.03, "weight_decay": 0.2, "momentum": 0.9, "nesterov": nesterov, "ns_steps": 5,
        "adjust_lr_fn": adjust,
    }  # fmt: skip
    ours, theirs = ExpertMuon([stack], **settings), torch.optim.Muon(alone, **settings)
    for _ in range(4):
        stack.grad = torch.randn(shape, generator=generator)
        for matrix, grad in zip(alone, stack.grad, strict=True):
            matrix.grad = grad.clone()
        ours.step()
        theirs.step()
    # bfloat16 inside: a batched product may round otherwise than a single one.
    torch.testing.assert_close(stack.detach(), torch.stack(alone).detach(), atol=2e-3, rtol=0.0)


def test_a_stack_without_a_gradient_stays() -> None:
    stack = torch.ones(2, 3, 4, requires_grad=True)
    ExpertMuon([stack], lr=1.0).step()
    assert torch.equal(stack, torch.ones(2, 3, 4))
