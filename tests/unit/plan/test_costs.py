"""The cost formulas against counts done by hand, known ratios, and each other."""

import dataclasses

import pytest

from dualflow.plan.costs import (
    FlopBreakdown,
    decode_flops,
    decode_flops_per_token,
    kv_bytes_per_token,
    prefill_flops,
    prefill_flops_per_token,
    train_flops,
    train_flops_per_token,
)
from dualflow.spec import AuxConfig, ModelConfig, ReadoutConfig, preset, standard_twin

# D 8, NH 4·4 = 16, KH 2·4 = 8, F 10, V 32, L 3: no two sizes alike, so that no mix-up can cancel.
STANDARD = ModelConfig(
    vocab_size=32,
    hidden_size=8,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=10,
)
DUAL = dataclasses.replace(STANDARD, variant="dual")
PHD2 = dataclasses.replace(STANDARD, variant="phd2")
TWO_SOFTMAX = dataclasses.replace(STANDARD, variant="two_softmax")
LAYERS, CONTEXT = 3, 6
QUERY = OUTPUT = 2 * 8 * 16
KEY_AND_VALUE = 2 * (2 * 8 * 8)
MLP = 3 * (2 * 8 * 10)
HEAD = 2 * 8 * 32
PRIMARY_LINEAR = LAYERS * (QUERY + KEY_AND_VALUE + OUTPUT + MLP)
AUX_LINEAR = LAYERS * (QUERY + OUTPUT + MLP)


def attention(keys: float) -> float:
    """Scores (2·H per key and head) and weighted values (the same), 4 heads of 4, all layers."""
    return LAYERS * (2 * 4 + 2 * 4) * 4 * keys


def with_readout(config: ModelConfig, **changes: object) -> ModelConfig:
    return dataclasses.replace(config, readout=ReadoutConfig(**changes))  # type: ignore[arg-type]


def with_aux(**changes: object) -> ModelConfig:
    return dataclasses.replace(DUAL, aux=AuxConfig(**changes))  # type: ignore[arg-type]


def test_standard_by_hand():
    assert prefill_flops_per_token(STANDARD, CONTEXT) == PRIMARY_LINEAR + attention(3) + HEAD / 6
    assert decode_flops_per_token(STANDARD, CONTEXT) == PRIMARY_LINEAR + attention(6) + HEAD
    assert train_flops_per_token(STANDARD, CONTEXT) == 3 * (PRIMARY_LINEAR + attention(3) + HEAD)


def test_dual_by_hand():
    decode = PRIMARY_LINEAR + AUX_LINEAR + 2 * attention(6) + 2 * HEAD
    assert decode_flops_per_token(DUAL, CONTEXT) == decode
    train = PRIMARY_LINEAR + AUX_LINEAR + 2 * attention(3) + 2 * HEAD
    assert train_flops_per_token(DUAL, CONTEXT) == 3 * train


def test_phd2_by_hand():
    decode = 2 * PRIMARY_LINEAR + attention(6) + attention(7) + HEAD
    assert decode_flops_per_token(PHD2, CONTEXT) == decode
    train = 2 * PRIMARY_LINEAR + attention(3) + attention(4) + HEAD
    assert train_flops_per_token(PHD2, CONTEXT) == 3 * train


def test_two_softmax_by_hand():
    second = 2 * 8 * 8 + HEAD
    decode = PRIMARY_LINEAR + attention(6) + HEAD + second
    assert decode_flops_per_token(TWO_SOFTMAX, CONTEXT) == decode
    train = PRIMARY_LINEAR + attention(3) + HEAD + second
    assert train_flops_per_token(TWO_SOFTMAX, CONTEXT) == 3 * train


def test_ungated_mlp_has_two_matrices():
    ungated = dataclasses.replace(STANDARD, mlp="gelu")
    difference = decode_flops_per_token(STANDARD, 4) - decode_flops_per_token(ungated, 4)
    assert difference == LAYERS * MLP / 3


@pytest.mark.parametrize(
    "variant",
    [
        DUAL,
        PHD2,
        TWO_SOFTMAX,
        with_aux(num_flows=3, owns=("mlp", "lm_head"), lora_rank=2),
        with_readout(DUAL, kind="aux_only"),
        with_readout(DUAL, kind="primary_only"),
    ],
)
def test_every_variant_prefills_and_caches_like_its_standard_twin(variant: ModelConfig):
    twin = standard_twin(variant)
    assert prefill_flops(variant, 17) == prefill_flops(twin, 17)
    assert kv_bytes_per_token(variant) == kv_bytes_per_token(twin)


@pytest.mark.parametrize("config", [STANDARD, DUAL, TWO_SOFTMAX])
def test_aux_off_decodes_like_the_standard_twin(config: ModelConfig):
    assert decode_flops(config, 9, aux=False) == decode_flops(STANDARD, 9)


def test_readouts_pay_only_for_the_heads_they_read():
    mixture = decode_flops_per_token(DUAL, 5)
    assert decode_flops_per_token(with_readout(DUAL, kind="aux_only"), 5) == mixture - HEAD
    primary_only = with_readout(DUAL, kind="primary_only")
    assert decode_flops(primary_only, 5) == decode_flops(STANDARD, 5)
    assert train_flops(primary_only, 5) == train_flops(STANDARD, 5)


def test_a_primary_loss_needs_the_primary_head_in_training():
    aux_only = with_readout(DUAL, kind="aux_only")
    weighted = with_readout(DUAL, kind="aux_only", primary_loss_weight=0.3)
    difference = train_flops_per_token(weighted, 5) - train_flops_per_token(aux_only, 5)
    assert difference == 3 * HEAD
    assert decode_flops(weighted, 5) == decode_flops(aux_only, 5)


def test_each_auxiliary_flow_costs_the_same():
    one, three = decode_flops(with_aux(num_flows=1), 5), decode_flops(with_aux(num_flows=3), 5)
    assert three.aux == one.aux * 3
    assert three.primary == one.primary


def test_owned_whole_matrices_cost_nothing_and_adapters_their_rank():
    whole = with_aux(owns=("q_proj", "o_proj", "mlp", "lm_head"))
    assert decode_flops(whole, 5) == decode_flops(DUAL, 5)
    adapted = with_aux(owns=("q_proj", "o_proj", "mlp", "lm_head"), lora_rank=2)
    extra = decode_flops(adapted, 5).aux + decode_flops(DUAL, 5).aux * -1
    assert extra == FlopBreakdown(
        qkv=LAYERS * 2 * 2 * (8 + 16),
        o=LAYERS * 2 * 2 * (16 + 8),
        mlp=LAYERS * 3 * 2 * 2 * (8 + 10),
        head=2 * 2 * (8 + 32),
    )


def test_only_named_matrices_are_adapted():
    adapted = with_aux(owns=("o_proj",), lora_rank=1)
    extra = decode_flops_per_token(adapted, 5) - decode_flops_per_token(DUAL, 5)
    assert extra == LAYERS * 2 * (16 + 8)


# Worked out apart from this code; D 64 with 4 layers is where the first prototype was trained.
@pytest.mark.parametrize(
    ("standard", "context", "ratio"),
    [
        (preset("nanogpt-124m"), 1024, 1.89),
        (dataclasses.replace(preset("demo"), hidden_size=64, intermediate_size=192), 256, 1.90),
        (preset("smollm2-135m"), 1024, 1.96),
    ],
)
def test_training_ratio_of_dual_to_standard(standard: ModelConfig, context: int, ratio: float):
    dual = dataclasses.replace(standard, variant="dual")
    found = train_flops_per_token(dual, context) / train_flops_per_token(standard, context)
    assert round(found, 2) == ratio


def test_linears_alone_cost_eleven_sixths():
    # Multi-head attention and F = 4·D ungated: (24 + 20)·D² over 24·D², the 1.83 of the linears.
    flops = train_flops(dataclasses.replace(preset("nanogpt-124m"), variant="dual"), 1024)

    def linears(part: FlopBreakdown) -> float:
        return part.qkv + part.o + part.mlp

    assert 1 + linears(flops.aux) / linears(flops.primary) == pytest.approx(11 / 6)


def test_beside_a_frozen_primary_by_hand():
    # The primary forward; the auxiliary forward, and gradients that pass through it.
    frozen = train_flops(DUAL, CONTEXT, "aux")
    assert frozen.primary.total == PRIMARY_LINEAR + attention(3) + HEAD
    assert frozen.aux.total == 2 * (AUX_LINEAR + attention(3) + HEAD)
    # A LoRA of rank 2 on the query, forward, for its input and for its weights.
    lora = train_flops(with_aux(owns=("q_proj",), lora_rank=2), CONTEXT, "aux")
    adapter = LAYERS * (2 * 8 * 2 + 2 * 2 * 16)
    assert lora.aux.total == frozen.aux.total + 3 * adapter
    # A query matrix of its own: the one gradient for its weight.
    owned = train_flops(with_aux(owns=("q_proj",)), CONTEXT, "aux")
    assert owned.aux.total == frozen.aux.total + LAYERS * QUERY
    # The shared embedding is frozen: what comes before the first coupling passes nothing on.
    tied = train_flops(with_aux(embedding="tied", couplings=("output",)), CONTEXT, "aux")
    first = (QUERY + OUTPUT + MLP) + attention(3) / LAYERS
    assert tied.aux.total == pytest.approx(frozen.aux.total - first)


def test_a_second_softmax_beside_a_frozen_primary_by_hand():
    frozen = train_flops(TWO_SOFTMAX, CONTEXT, "aux")
    assert frozen.primary.total == PRIMARY_LINEAR + attention(3) + HEAD
    assert frozen.aux.total == 2 * (2 * 8 * 8) + 2 * HEAD


@pytest.mark.parametrize(
    "config",
    [STANDARD, PHD2, with_readout(DUAL, kind="primary_only"),
     with_aux(embedding="tied", couplings=())],
)  # fmt: skip
def test_nothing_to_train_beside_a_frozen_primary_is_refused(config: ModelConfig):
    with pytest.raises(ValueError, match="no auxiliary tensors to train"):
        train_flops(config, CONTEXT, "aux")


def test_a_learned_readout_reads_both_heads():
    learned = with_readout(DUAL, kind="learned")
    assert train_flops(learned, CONTEXT) == train_flops(DUAL, CONTEXT)
    assert decode_flops(learned, CONTEXT) == decode_flops(DUAL, CONTEXT)


def test_sliding_layers_attend_their_window():
    # Layer 0 of three slides over 4 of the keys.
    config = dataclasses.replace(STANDARD, sliding_window=4, sliding_layers=(0,))
    per_key = attention(1) / LAYERS
    assert decode_flops(config, 10).primary.attention == per_key * (4 + 10 + 10)
    # 4 - 4²/(2·10) = 3.2 keys on average, where all would be 5.
    assert prefill_flops(config, 10).primary.attention == pytest.approx(per_key * (3.2 + 5 + 5))
    for context in (3, 4):  # the window hides nothing
        assert prefill_flops(config, context) == prefill_flops(STANDARD, context)
        assert decode_flops(config, context) == decode_flops(STANDARD, context)
    copy = dataclasses.replace(PHD2, sliding_window=4)
    assert decode_flops(copy, 10).aux.attention == per_key * 3 * (4 + 1)


def test_kv_bytes_by_hand():
    assert kv_bytes_per_token(STANDARD) == 3 * 2 * 8 * 4
    assert kv_bytes_per_token(STANDARD, bytes_per_element=2) == 3 * 2 * 8 * 2


def test_breakdown_sums_to_the_total():
    flops = train_flops(with_aux(num_flows=2, owns=("mlp",), lora_rank=3), 11)
    parts = [flops.primary, flops.aux]
    places = sum(part.qkv + part.o + part.attention + part.mlp + part.head for part in parts)
    assert places == pytest.approx(flops.total)


@pytest.mark.parametrize(
    "count", [prefill_flops_per_token, decode_flops_per_token, train_flops_per_token]
)
def test_an_empty_context_is_refused(count):
    with pytest.raises(ValueError, match="context is 0 tokens"):
        count(STANDARD, 0)


def test_fractions_of_a_byte_are_refused():
    with pytest.raises(ValueError, match="bytes_per_element is 0"):
        kv_bytes_per_token(STANDARD, 0)


@pytest.mark.parametrize("config", [PHD2, with_readout(DUAL, kind="aux_only")])
def test_aux_off_is_refused_where_the_primary_has_no_distribution(config: ModelConfig):
    with pytest.raises(ValueError, match="cannot be switched off"):
        decode_flops_per_token(config, 5, aux=False)
