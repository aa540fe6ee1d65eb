"""Rotary scaling as GGUF keys and factors."""

import pytest

from dualflow.checkpoint.gguf.rope import (
    find_llama3,
    llama3_divisors,
    read_scaling,
    write_scaling,
)
from dualflow.spec import RopeScaling


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling(kind="linear", factor=8.0),
        RopeScaling(kind="yarn", factor=4.0, original_max_position=32768),
        RopeScaling(kind="yarn", factor=4.0, original_max_position=8, attention_factor=1.0),
    ],
)
def test_keys_say_the_scaling(scaling: RopeScaling | None):
    keys = {f"qwen2.{key}": value for key, value in write_scaling(scaling).items()}
    assert read_scaling(keys, "qwen2.") == scaling


@pytest.mark.parametrize(("factor", "positions"), [(8.0, 8192), (32.0, 8192), (4.0, 1024)])
def test_factors_of_llama_3_are_told_from_their_numbers(factor: float, positions: int):
    scaling = RopeScaling(kind="llama3", factor=factor, original_max_position=positions)
    divisors = llama3_divisors(scaling, 128, 500000.0)
    assert divisors[0] == 1 and divisors[-1] == factor
    assert find_llama3(divisors, 128, 500000.0) == scaling


def test_a_ramp_of_other_ends_is_refused():
    scaling = RopeScaling(
        kind="llama3", factor=8.0, original_max_position=8192, low_freq_factor=3.0
    )
    with pytest.raises(ValueError, match="not those of a llama3 scaling"):
        find_llama3(llama3_divisors(scaling, 128, 500000.0), 128, 500000.0)


def test_a_factor_under_a_kind_that_has_none_is_refused():
    keys = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}
    with pytest.raises(ValueError, match="'none' with factor 2.0"):
        read_scaling(keys, "llama.")
