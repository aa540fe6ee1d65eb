"""What the CPU computes, a CUDA device computes too. Run with ``make gpu``."""

from typing import Any

import pytest
import torch

from dualflow.model import build_model
from dualflow.model.generate import FinishEvent, GenerationParams, generate
from dualflow.model.sampling import SamplingParams
from dualflow.testing import tiny_config
from dualflow.testing.steps import EVERY_KIND
from dualflow.testing.tensors import random_tokens, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("name", EVERY_KIND)
def test_loss_and_gradients_equal_the_cpus(name: str) -> None:
    config = EVERY_KIND[name]
    tokens, targets = random_tokens(config, 3, 20), random_tokens(config, 3, 20, seed=1)
    grads: list[dict[str, torch.Tensor]] = []
    losses: list[float] = []
    for device in ("cpu", "cuda"):
        model = tiny_model(config).to(device)
        total = model.loss(tokens.to(device), targets.to(device)).total
        total.backward()
        losses.append(total.item())
        grads.append({n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None})
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    for key, gradient in grads[0].items():
        torch.testing.assert_close(grads[1][key], gradient, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", EVERY_KIND)
def test_greedy_tokens_equal_the_cpus(name: str) -> None:
    config = EVERY_KIND[name]
    prompt = random_tokens(config, 9).tolist()
    params = GenerationParams(max_tokens=20, sampling=SamplingParams(temperature=0.0))
    written = []
    for device in ("cpu", "cuda"):
        events = generate(tiny_model(config).to(device), prompt, params)
        written.append([e.token_id for e in events if not isinstance(e, FinishEvent)])
    assert written[0] == written[1]


def test_bf16_autocast_and_compile_train() -> None:
    config = tiny_config("dual", init_std=0.02)
    model: Any = build_model(config, device="cuda")
    loss = torch.compile(model.loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = random_tokens(config, 8, 33).cuda()
    means = []
    for _ in range(30):
        with torch.autocast("cuda", torch.bfloat16):
            sums = loss(tokens[:, :-1], tokens[:, 1:])
        mean = sums.total / sums.count
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(mean.item())
    assert means[-1] < 0.7 * means[0]
