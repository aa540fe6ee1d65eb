"""What the native executor adds to its kernels; what those compute is in tests/parity."""

import math
import os

import pytest
import torch

from dualflow.model.quantise import quantise_model
from tests.parity.native_steps import Texts, calm_model, config_of, native, need_kernels

pytestmark = need_kernels


def test_a_fork_is_refused_where_it_would_wait_for_threads_it_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = native(calm_model(config_of()))
    texts = Texts()
    text = texts.add(20)
    executor.step(texts.rows({text: 10}))
    here = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: here + 1)
        executor.step(texts.rows({text: 5}))  # one thread: there is nobody to wait for
        patch.setattr(executor, "_threads", 2)
        with pytest.raises(RuntimeError, match="a fork"):
            executor.step(texts.rows({text: 5}))
        executor.__del__()
        assert executor._handle, "freeing would wait for them, too"


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_one_damaged_row_of_the_head_is_seen_by_every_token(weights: str) -> None:
    model = calm_model(config_of())
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    if weights == "int8":
        model.lm_head.weight.data[7] = 0.1
        model = quantise_model(model, "int8")
        scale = model.lm_head.weight_scale
        assert isinstance(scale, torch.Tensor)
        scale[7, 0] = float("nan")
    executor = native(model)
    texts = Texts()
    readout = executor.step(texts.rows({texts.add(20): 10}, read=1, aux=1))
    assert readout.r.isnan().all()
    assert readout.alpha is not None and math.isnan(readout.alpha[0])
