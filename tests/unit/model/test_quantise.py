"""Which matrices are quantised, and that a quantised model behaves as a model."""

import copy
import math

import pytest
import torch
from torch import nn

from dualflow.model import QuantisedEmbedding, QuantisedLinear, build_model, quantise_model
from dualflow.model.quantise import quantised_matrices, with_quantised_modules
from dualflow.spec import AuxConfig, QuantisedFormat
from dualflow.testing import tiny_config
from dualflow.testing.configs import family_config, flow_config, mixture_config
from dualflow.testing.steps import whole_sequence
from dualflow.testing.tensors import random_tokens, tiny_model

KINDS: tuple[QuantisedFormat, ...] = ("int8", "int4")
kinds = pytest.mark.parametrize("kind", KINDS)

LAYER = {
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
}


@kinds
def test_every_matrix_is_quantised_and_every_vector_stays(kind: QuantisedFormat):
    floats = tiny_model(tiny_config("dual", attention_bias=True))
    model = quantise_model(copy.deepcopy(floats), kind)
    expected = {f"model.layers.{layer}.{name}" for layer in range(2) for name in LAYER}
    expected |= {"model.embed_tokens", "model.aux.0.embed_tokens", "lm_head"}
    assert quantised_matrices(model).keys() == expected
    before = dict(floats.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.ndim == 1, name
        assert torch.equal(parameter, before[name])
    assert model.quantised == kind
    assert not model.training


def test_lora_stays_in_floats_and_owned_matrices_do_not():
    lora = quantise_model(tiny_model(flow_config("lora")), "int8")
    adapters = [name for name, p in lora.named_parameters() if p.ndim == 2]
    assert adapters and all(".lora_" in name for name in adapters)
    own = quantise_model(tiny_model(flow_config("owns_everything")), "int8")
    assert not [name for name, p in own.named_parameters() if p.ndim == 2]


def test_learned_positions_and_the_second_state_are_matrices_too():
    gpt2 = quantise_model(tiny_model(family_config("gpt2")), "int4")
    assert isinstance(gpt2.model.embed_positions, QuantisedEmbedding)
    control = quantise_model(tiny_model(tiny_config("two_softmax")), "int4")
    assert isinstance(control.model.aux[0].second_state, QuantisedLinear)


@kinds
def test_buffers_lie_as_other_code_reads_them(kind: QuantisedFormat):
    model = quantise_model(tiny_model(tiny_config("dual", hidden_size=40, head_dim=4)), kind)
    up = model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(up, QuantisedLinear)
    assert (up.in_features, up.out_features) == (40, 44)
    assert up.weight.shape == ((44, 40) if kind == "int8" else (44, 20))
    assert up.weight.dtype == (torch.int8 if kind == "int8" else torch.uint8)
    assert up.weight_scale.shape == (44, 2) and up.weight_scale.dtype == torch.float16
    if kind == "int8":
        assert up.weight_min is None
        assert "model.layers.0.mlp.up_proj.weight_min" not in model.state_dict()
    else:
        assert up.weight_min is not None
        assert up.weight_min.shape == (44, 2) and up.weight_min.dtype == torch.float16
    assert all(b.is_contiguous() for b in up.buffers())


@kinds
def test_a_tied_head_is_the_embedding_whatever_is_done_to_the_model(kind: QuantisedFormat):
    config = tiny_config("dual", tie_embeddings=True)
    model = quantise_model(tiny_model(config), kind)
    empty = with_quantised_modules(build_model(config, device="meta"), kind)
    forms = {
        "plain": model,
        "copied": copy.deepcopy(model),
        "converted": copy.deepcopy(model).to(torch.bfloat16),
        "filled": empty.to_empty(device="cpu"),
        "loaded": empty,
    }
    forms["loaded"].load_state_dict(model.state_dict())
    for name, form in forms.items():
        head, table = form.lm_head, form.model.embed_tokens
        assert isinstance(head, QuantisedLinear) and isinstance(table, QuantisedEmbedding)
        for one, other in zip(head.matrix, table.matrix, strict=True):
            assert one is other, name
        assert "lm_head" not in quantised_matrices(form)
    tokens = random_tokens(config, 3)
    assert torch.equal(empty.double().model.embed_tokens(tokens), model.model.embed_tokens(tokens))


@pytest.mark.parametrize("tied", [True, False])
def test_a_float_head_is_tied_after_leaving_the_meta_device(tied: bool):
    model = build_model(tiny_config(tie_embeddings=tied), device="meta").to_empty(device="cpu")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_another_number_format_changes_activations_and_no_scale(
    kind: QuantisedFormat, dtype: torch.dtype
):
    config = tiny_config("dual")
    model = quantise_model(tiny_model(config), kind)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert model.dtype == torch.float64
    model.to(dtype)
    assert model.dtype == dtype and model.device == torch.device("cpu")
    for name, buffer in model.named_buffers():
        assert buffer.dtype == before[name].dtype and torch.equal(buffer, before[name]), name
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    with torch.inference_mode():
        out = whole_sequence(model, random_tokens(config, 4))
    assert out.primary_TD.dtype == dtype
    assert model.new_cache(3).tensors()[0][0].dtype == dtype


def test_float_models_say_where_they_lie_and_in_what_format():
    model = tiny_model(tiny_config(), dtype=torch.bfloat16)
    model.model.norm.float()
    assert (model.device, model.dtype, model.quantised) == (
        torch.device("cpu"),
        torch.bfloat16,
        None,
    )


@kinds
def test_quantising_twice_is_refused(kind: QuantisedFormat):
    model = quantise_model(tiny_model(tiny_config()), "int8")
    for again in (quantise_model, with_quantised_modules):
        with pytest.raises(ValueError, match="are int8 already; quantise the float model instead"):
            again(model, kind)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="cannot be quantised to 'int5'; expected int8 or int4"):
        quantise_model(tiny_model(tiny_config()), "int5")  # type: ignore[arg-type]


@kinds
def test_a_matrix_that_cannot_be_is_named_and_nothing_is_changed(kind: QuantisedFormat):
    model = tiny_model(tiny_config("dual", aux=AuxConfig(owns=("mlp",))))
    with torch.no_grad():
        model.model.layers[1].aux[0].down_proj.weight[3, 2] = math.nan  # type: ignore[union-attr]
    with pytest.raises(
        ValueError, match=r"^model\.layers\.1\.aux\.0\.down_proj\.weight: 1 weights are not finite"
    ):
        quantise_model(model, kind)
    assert model.quantised is None and not quantised_matrices(model)
    assert isinstance(model.lm_head, nn.Linear)


def test_another_shape_is_refused():
    linear = QuantisedLinear(40, 3, "int8")
    with pytest.raises(ValueError, match=r"shape \[3, 39\]; expected \[3, 40\]"):
        linear.assign(torch.zeros(3, 39))


def test_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="a model with experts cannot be made int8 yet"):
        quantise_model(tiny_model(mixture_config("mixtral"), dtype=torch.float32), "int8")
