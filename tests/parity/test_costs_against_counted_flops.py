"""The cost formulas against FLOPs that PyTorch counts while the models run on the meta device.

There attention is made of batched products over every key, hidden ones included, so `aten.bmm` is
all attention and counts what the mask hides, where the formulas count half; `aten.mm` is the rest.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dualflow.model import build_model
from dualflow.plan.costs import (
    FlopBreakdown,
    FlowFlops,
    decode_flops,
    kv_bytes_per_token,
    prefill_flops,
    train_flops,
)
from dualflow.spec import ModelConfig, Variant
from dualflow.testing.configs import FAMILIES, FLOWS, tiny_config

BATCH, LENGTH = 2, 24
FLOWING: tuple[Variant, ...] = ("dual", "phd2")
OTHER_FAMILIES = ("gpt2", "qwen3", "padded_vocabulary")

CASES = {
    **{
        f"standard-{name}": tiny_config("standard", **changes) for name, changes in FAMILIES.items()
    },
    **{f"dual-{name}": tiny_config("dual", **changes) for name, changes in FLOWS.items()},
    **{f"{v}-{name}": tiny_config(v, **FAMILIES[name]) for v in FLOWING for name in OTHER_FAMILIES},
    "two_softmax": tiny_config("two_softmax"),
    "two_softmax-aux_only": tiny_config("two_softmax", **FLOWS["coupling"]),
}


def each_case_where(applies: Callable[[ModelConfig], bool]) -> pytest.MarkDecorator:
    cases = {name: config for name, config in CASES.items() if applies(config)}
    return pytest.mark.parametrize("config", cases.values(), ids=list(cases))


each_case = each_case_where(lambda config: True)


def counted(run: Callable[[], object]) -> tuple[int, int]:
    """(FLOPs of plain products, FLOPs of batched products) of ``run``."""
    with FlopCounterMode(display=False) as counter:
        run()
    by_operation = {str(name): n for name, n in counter.get_flop_counts()["Global"].items()}
    plain, batched = (by_operation.pop(f"aten.{name}", 0) for name in ("mm", "bmm"))
    plain += by_operation.pop("aten.addmm", 0)
    assert not by_operation, f"operations that no formula stands for: {by_operation}"
    return plain, batched


def linear(part: FlopBreakdown) -> float:
    return part.qkv + part.o + part.mlp + part.head


def linears(flops: FlowFlops) -> float:
    return linear(flops.primary) + linear(flops.aux)


def attention_of_one_row(config: ModelConfig, keys: int) -> int:
    return config.num_layers * 4 * config.num_heads * config.head_size * keys


def unread_head(config: ModelConfig) -> int:
    """The primary's head row, which a model read from its auxiliary alone runs to report p."""
    is_unread = config.readout.kind == "aux_only" and not config.readout.primary_loss_weight
    return 2 * config.hidden_size * config.vocab_size if is_unread else 0


def unread_aux(config: ModelConfig) -> FlopBreakdown:
    """What r does not read but training runs to report q: shared products take every flow's rows
    forward and backward, the auxiliary's own head rows go forward alone.
    """
    if config.readout.kind != "primary_only":
        return FlopBreakdown()
    mixture = dataclasses.replace(config.readout, kind="mixture")
    aux = train_flops(dataclasses.replace(config, readout=mixture), LENGTH).aux
    return dataclasses.replace(aux, head=aux.head / 3)


@each_case
def test_training(config: ModelConfig) -> None:
    model = build_model(config, device="meta")
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device="meta")
    plain, batched = counted(lambda: model.loss(tokens, tokens).total.backward())
    flops, rows = train_flops(config, LENGTH), BATCH * LENGTH

    # What is run for the record alone, the formulas leave out altogether.
    expected = linears(flops) + unread_head(config) + linear(unread_aux(config))
    assert plain / rows == pytest.approx(expected, rel=1e-12)

    whole = flops.primary.attention + flops.aux.attention + unread_aux(config).attention
    if config.variant == "phd2":
        # A copy's own key adds a column to a mask that holds one for every copy.
        keys = LENGTH + 2 * LENGTH
        assert batched / rows == 3 * attention_of_one_row(config, keys)
        assert whole == 3 * attention_of_one_row(config, LENGTH // 2 + LENGTH // 2 + 1)
    else:
        assert batched / rows == pytest.approx(2 * whole, rel=1e-12)


# With primary_only, decoding runs no auxiliary: that is test_decoding_with_aux_off.
@each_case_where(lambda config: config.readout.kind != "primary_only")
def test_decoding(config: ModelConfig) -> None:
    model = build_model(config, device="meta")
    ids = torch.zeros(LENGTH, dtype=torch.int64, device="meta")
    cache = model.new_cache(LENGTH)
    model.step(ids[:-1], ids[:-1], cache.writers())

    def decode() -> None:
        out = model.step(ids[-1:], ids[-1:], cache.writers(), aux_pins_A=ids[:1])
        model.log_probs(out.primary_TD, out.aux_FAD)

    with torch.no_grad():
        plain, batched = counted(decode)
    flops = decode_flops(config, LENGTH)
    unread = 2 * config.hidden_size * config.vocab_size
    unread *= config.readout.kind == "aux_only"
    assert plain == linears(flops) + unread
    assert batched == flops.primary.attention + flops.aux.attention


@each_case_where(lambda c: c.variant != "phd2" and c.readout.kind != "aux_only")
def test_decoding_with_aux_off(config: ModelConfig) -> None:
    model = build_model(config, device="meta")
    ids = torch.zeros(LENGTH, dtype=torch.int64, device="meta")
    cache = model.new_cache(LENGTH)
    model.step(ids[:-1], ids[:-1], cache.writers())

    def decode() -> None:
        out = model.step(ids[-1:], ids[-1:], cache.writers())
        model.log_probs(out.primary_TD, out.aux_FAD)

    with torch.no_grad():
        plain, batched = counted(decode)
    flops = decode_flops(config, LENGTH, aux=False)
    assert (plain, batched) == (linears(flops), flops.primary.attention)


@each_case
def test_prefill_and_cache(config: ModelConfig) -> None:
    model = build_model(config, device="meta")
    ids = torch.zeros(LENGTH, dtype=torch.int64, device="meta")
    cache = model.new_cache(LENGTH)

    def prefill() -> None:
        out = model.step(ids, ids, cache.writers())
        model.lm_head(out.primary_TD[-1:])

    with torch.no_grad():
        plain, batched = counted(prefill)
    flops = prefill_flops(config, LENGTH)
    assert plain / LENGTH == pytest.approx(linears(flops), rel=1e-12)
    assert batched / LENGTH == pytest.approx(2 * flops.primary.attention, rel=1e-12)
    assert cache.nbytes_used == LENGTH * kv_bytes_per_token(config, 4)


@pytest.mark.parametrize("variant", ["dual", "phd2", "two_softmax"])
def test_the_switched_on_auxiliary_is_counted_at_all(variant: Variant) -> None:
    # Guards the tests above against a formula and a model that both forget the second flow.
    assert train_flops(tiny_config(variant), LENGTH).aux.total > 0
