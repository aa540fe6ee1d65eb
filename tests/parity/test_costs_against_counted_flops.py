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
from dualflow.spec import AuxConfig, ModelConfig, Variant, parameter_counts
from dualflow.testing.configs import (
    FAMILIES,
    FLOWS,
    MIXTURES,
    family_config,
    mixture_config,
    tiny_config,
)

BATCH, LENGTH = 2, 24
FLOWING: tuple[Variant, ...] = ("dual", "phd2")
OTHER_FAMILIES = ("gpt2", "qwen3", "padded_vocabulary", "mistral", "gemma2", "gemma3", "olmo2")

CASES = {
    **{
        f"standard-{name}": tiny_config("standard", **changes) for name, changes in FAMILIES.items()
    },
    **{f"dual-{name}": tiny_config("dual", **changes) for name, changes in FLOWS.items()},
    **{f"{v}-{name}": tiny_config(v, **FAMILIES[name]) for v in FLOWING for name in OTHER_FAMILIES},
    **{
        f"{variant}-{name}": mixture_config(name, variant)
        for variant in ("standard", "dual", "phd2")
        for name in MIXTURES
    },
    "dual-three experts": mixture_config(
        "qwen2_moe", "dual", aux=AuxConfig(num_flows=2, experts_per_token=3)
    ),
    "dual-no experts": mixture_config("qwen3_moe", "dual", aux=AuxConfig(experts_per_token=0)),
    "dual-replay": mixture_config("olmoe", "dual", aux=AuxConfig(routing="replay")),
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


def without_windows(config: ModelConfig) -> ModelConfig:
    """The same matrices; PyTorch counts what a window's mask hides."""
    return dataclasses.replace(
        config, sliding_window=None, sliding_layers=None, local_rope_theta=None
    )


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

    seen = train_flops(without_windows(config), LENGTH)
    unread = unread_aux(without_windows(config))
    whole = seen.primary.attention + seen.aux.attention + unread.attention
    if config.variant == "phd2":
        # A copy's own key adds a column to a mask that holds one for every copy.
        keys = LENGTH + 2 * LENGTH
        assert batched / rows == 3 * attention_of_one_row(config, keys)
        assert whole == 3 * attention_of_one_row(config, LENGTH // 2 + LENGTH // 2 + 1)
    else:
        assert batched / rows == pytest.approx(2 * whole, rel=1e-12)


def frozen_cases() -> dict[str, ModelConfig]:
    """All that has an auxiliary to train, and flows whose first trained tensor comes late: what
    lies before it passes no gradient on.
    """
    late = {
        "query": AuxConfig(embedding="tied", couplings=("query",)),
        "output": AuxConfig(embedding="tied", couplings=("output",)),
        "o_proj": AuxConfig(embedding="tied", couplings=(), owns=("o_proj",)),
        "mlp": AuxConfig(embedding="tied", couplings=(), owns=("mlp",), lora_rank=2),
        "head": AuxConfig(embedding="tied", couplings=(), owns=("lm_head",), lora_rank=3),
        "norms": AuxConfig(embedding="tied", couplings=(), flow_norms="separate"),
    }
    cases = CASES | {f"late-{name}": tiny_config("dual", aux=aux) for name, aux in late.items()}
    for family in ("gemma2", "gemma3", "olmo2"):
        cases[f"late-norms-{family}"] = family_config(family, "dual", aux=late["norms"])
    return {
        name: config
        for name, config in cases.items()
        if parameter_counts(config).aux > 0 and config.readout.kind != "primary_only"
    }


@pytest.mark.parametrize("config", frozen_cases().values(), ids=list(frozen_cases()))
def test_training_beside_a_frozen_primary(config: ModelConfig) -> None:
    model = build_model(config, device="meta")
    model.freeze_primary()
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device="meta")
    plain, batched = counted(lambda: model.loss(tokens, tokens).total.backward())
    flops, rows = train_flops(config, LENGTH, "aux"), BATCH * LENGTH

    expected = linears(flops) + unread_head(config)
    assert plain / rows == pytest.approx(expected, rel=1e-12)
    seen = train_flops(without_windows(config), LENGTH, "aux")
    whole = seen.primary.attention + seen.aux.attention
    assert batched / rows == pytest.approx(2 * whole, rel=1e-12)
    assert flops.total < train_flops(config, LENGTH).total


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
    seen = decode_flops(without_windows(config), LENGTH)
    assert batched == seen.primary.attention + seen.aux.attention


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
    seen = decode_flops(without_windows(config), LENGTH, aux=False)
    assert (plain, batched) == (linears(flops), seen.primary.attention)


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
    seen = prefill_flops(without_windows(config), LENGTH)
    assert batched / LENGTH == pytest.approx(2 * seen.primary.attention, rel=1e-12)
    assert cache.nbytes_used == LENGTH * kv_bytes_per_token(config, 4)


@pytest.mark.parametrize("variant", ["dual", "phd2", "two_softmax"])
def test_the_switched_on_auxiliary_is_counted_at_all(variant: Variant) -> None:
    # Guards the tests above against a formula and a model that both forget the second flow.
    assert train_flops(tiny_config(variant), LENGTH).aux.total > 0
