"""A pass's time is that of its reading or of its multiplying."""

import dataclasses

import pytest

from dualflow.plan.roofline import Machine, PassShape, model_work, pass_seconds
from dualflow.spec import PRESETS, AuxConfig, ReadoutConfig, parameter_counts
from dualflow.testing import tiny_config

SMOLLM2 = PRESETS["smollm2-135m"]
DUAL = dataclasses.replace(SMOLLM2, variant="dual")


def test_a_pass_reads_the_models_matrices() -> None:
    work = model_work(SMOLLM2, bytes_per_weight=1)
    gains = (2 * SMOLLM2.num_layers + 1) * SMOLLM2.hidden_size
    assert work.layer_bytes + work.head_bytes == parameter_counts(SMOLLM2).total - gains
    assert work.aux_rows == 0 and work.aux_flops == 0
    assert model_work(SMOLLM2, 2).layer_bytes == 2 * work.layer_bytes
    assert model_work(SMOLLM2, 2).kv_bytes == 30 * 2 * 3 * 64 * 4


def test_auxiliary_rows_multiply_all_but_keys_and_values() -> None:
    work = model_work(DUAL, bytes_per_weight=1)
    assert work.primary_flops == 2 * work.layer_bytes
    assert work.aux_flops == 2 * work.shared_bytes
    assert work.aux_head_flops == work.head_flops == 2 * work.head_bytes
    two = model_work(dataclasses.replace(DUAL, aux=AuxConfig(num_flows=2)), 1)
    assert (two.aux_flops, two.aux_rows) == (2 * work.aux_flops, 2)


def test_few_rows_wait_for_the_weights_and_many_for_the_multiplier() -> None:
    work = model_work(DUAL, bytes_per_weight=2)
    machine = Machine(bytes_per_second=1e9, flops_per_second=1e11, seconds_per_pass=0.5)
    one = pass_seconds(work, machine, PassShape(primary_rows=1, read_rows=1))
    assert one == pytest.approx(0.5 + (work.layer_bytes + work.head_bytes) / 1e9)
    both = PassShape(primary_rows=1, read_rows=1, aux_positions=1)
    assert pass_seconds(work, machine, both) == one
    many = pass_seconds(work, machine, PassShape(primary_rows=1000))
    assert many == pytest.approx(0.5 + 1000 * work.primary_flops / 1e11)
    cached = pass_seconds(work, machine, PassShape(primary_rows=1, read_rows=1, keys=1000))
    assert cached == pytest.approx(one + 1000 * work.kv_bytes / 1e9)


def test_auxiliary_rows_alone_leave_the_key_and_value_matrices_unread() -> None:
    work = model_work(DUAL, bytes_per_weight=2)
    machine = Machine(bytes_per_second=1.0, flops_per_second=1e30, seconds_per_pass=0.0)
    seconds = pass_seconds(work, machine, PassShape(aux_positions=3))
    assert seconds == work.shared_bytes + work.head_bytes
    second = model_work(tiny_config("two_softmax"))
    seconds = pass_seconds(second, machine, PassShape(aux_positions=3))
    assert seconds == second.head_bytes


@pytest.mark.parametrize("variant", ["standard", "dual", "phd2", "two_softmax"])
def test_every_variant_has_its_work(variant) -> None:
    work = model_work(tiny_config(variant))
    assert work.primary_flops == 2 * work.layer_bytes / 4
    assert (work.aux_head_flops > 0) == (variant != "standard")
    assert (work.aux_flops > 0) == (variant in ("dual", "phd2"))
    only = tiny_config("dual", readout=ReadoutConfig(kind="aux_only"))
    assert model_work(only).primary_flops == work.primary_flops
