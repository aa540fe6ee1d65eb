"""A tiny model and an engine for it; a test file may have its own."""

import pytest

from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.engine import Engine
from dualflow.model import CausalLM
from dualflow.testing import tiny_config
from dualflow.testing.engines import tiny_engine
from dualflow.testing.tensors import tiny_model


@pytest.fixture(scope="module")
def model() -> CausalLM:
    """A random dual-flow model over bytes, in float64."""
    return tiny_model(tiny_config("dual", vocab_size=264, real_vocab_size=259))


@pytest.fixture
def engine(model: CausalLM) -> Engine:
    return tiny_engine(model, bytes_tokenizer())
