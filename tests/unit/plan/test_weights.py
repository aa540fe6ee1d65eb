"""Bytes of weights, worked out by hand. Against real models: tests/parity."""

import dataclasses

import pytest

from dualflow.plan import matrix_bytes, weight_bytes
from dualflow.spec import AuxConfig, ModelConfig, preset, standard_twin

SMALL = ModelConfig(
    vocab_size=10, hidden_size=40, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=7,
    tie_embeddings=True, mlp="gelu",
)  # fmt: skip


def test_a_matrix_by_hand():
    assert matrix_bytes(3, 40, "float32") == 480
    assert matrix_bytes(3, 40, "bfloat16") == 240
    assert matrix_bytes(3, 40, "int8") == 3 * (40 + 2 * 2)
    assert matrix_bytes(3, 40, "int4") == 3 * (20 + 2 * (2 + 2))
    assert matrix_bytes(1, 33, "int4") == 17 + 2 * 4


def test_full_groups_take_what_gguf_blocks_take():
    assert matrix_bytes(1, 32, "int8") == 34  # Q8_0
    assert matrix_bytes(1, 32, "int4") == 20  # Q4_1


def test_a_model_by_hand():
    rows = 10 + 40 + 20 + 20 + 40 + 7  # of 40 inputs: embedding, q, k, v, o, up
    expected = rows * (40 + 4) + 40 * (7 + 2) + 3 * 40 * 4  # and down, of 7; three gains
    assert weight_bytes(SMALL, "int8").primary == expected
    assert weight_bytes(SMALL, "int8", "bfloat16").primary == expected - 3 * 40 * 2
    dual = weight_bytes(dataclasses.replace(SMALL, variant="dual"), "int8")
    assert dual.primary == expected
    assert dual.aux == 10 * (40 + 4) + (40 + 7 + 40) * 4  # E2 and the couplings
    assert dual.total == dual.primary + dual.aux


def test_lora_stays_in_floats():
    def aux(rank: int) -> int:
        flows = AuxConfig(owns=("o_proj",), lora_rank=rank)
        return weight_bytes(dataclasses.replace(SMALL, variant="dual", aux=flows), "int4").aux

    assert aux(2) - aux(1) == (40 + 40) * 4


def test_the_sizes_that_the_peers_list():
    config = preset("smollm2-135m")
    found = [round(weight_bytes(config, w).total / 1e6) for w in ("float32", "bfloat16", "int8")]
    assert found == [538, 269, 143]


@pytest.mark.parametrize("weights", ["float32", "int8", "int4"])
def test_the_primary_of_a_dual_model_weighs_what_its_twin_does(weights):
    dual = dataclasses.replace(preset("llama-120m"), variant="dual")
    assert weight_bytes(dual, weights).primary == weight_bytes(standard_twin(dual), weights).total


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="weights are 'int3'; expected one of float64, .*int4"):
        weight_bytes(SMALL, "int3")  # type: ignore[arg-type]
