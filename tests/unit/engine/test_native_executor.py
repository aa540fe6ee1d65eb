"""What the native executor adds to its kernels; what those compute is in tests/parity."""

import os

import pytest

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
