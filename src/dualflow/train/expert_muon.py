"""Muon for experts' matrices stacked [E, rows, columns]: each matrix as torch.optim.Muon updates
it, all of them in one batched product.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_TINY = 1e-7


class ExpertMuon(torch.optim.Optimizer):
    """Momentum, orthogonalised matrix by matrix (Jordan et al. 2024), decoupled weight decay.

    Arguments and state are those of ``torch.optim.Muon``. An expert that no row chose still
    moves by its momentum, as a matrix without gradient would there.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float = 1e-3, weight_decay: float = 0.1,
        momentum: float = 0.95, nesterov: bool = True, ns_steps: int = 5,
        adjust_lr_fn: str = "original",
    ) -> None:  # fmt: skip
        super().__init__(
            params,
            {
                "lr": lr, "weight_decay": weight_decay, "momentum": momentum,
                "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            },
        )  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every stack that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for stack in group["params"]:
                if stack.grad is not None:
                    self._update(stack, stack.grad, group)
        return loss

    def _update(self, stack: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[stack], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        rows, columns = stack.shape[1:]
        if group["adjust_lr_fn"] == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        else:
            scale = math.sqrt(max(1.0, rows / columns))
        stack.mul_(1 - group["lr"] * group["weight_decay"])
        update = orthogonalised(update, group["ns_steps"]).to(stack.dtype)
        stack.add_(update, alpha=-group["lr"] * scale)


def orthogonalised(stack_ERC: Tensor, steps: int) -> Tensor:
    """Each matrix with its singular values pulled towards 1, by Newton and Schulz's iteration in
    bfloat16.
    """
    a, b, c = _COEFFICIENTS
    x = stack_ERC.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_TINY)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
