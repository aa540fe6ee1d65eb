"""Quantised models on disk: bit for bit there and back, and checked as strictly as floats."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from dualflow.checkpoint import load_model, read_quantised, save_model
from dualflow.model import CausalLM, quantise_model
from dualflow.model.quantise import quantised_matrices
from dualflow.spec import ModelConfig, QuantisedFormat
from dualflow.testing import tiny_config
from dualflow.testing.steps import WITHOUT_EXPERTS
from dualflow.testing.tensors import same, tiny_model

KINDS: tuple[QuantisedFormat, ...] = ("int8", "int4")
kinds = pytest.mark.parametrize("kind", KINDS)
UP = "model.layers.0.mlp.up_proj"


def quantised(
    config: ModelConfig, kind: QuantisedFormat, dtype: torch.dtype = torch.float32
) -> CausalLM:
    return quantise_model(tiny_model(config, dtype=dtype), kind)


def assert_same(one: CausalLM, other: CausalLM) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in ours.items() if not same(tensor, theirs[name])] == []
    assert (one.quantised, one.dtype, one.config) == (other.quantised, other.dtype, other.config)


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A saved dual model."""
    save_model(quantised(tiny_config("dual"), request.param), tmp_path / request.param)
    return tmp_path / request.param


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)


def edit_weights(folder: Path, value: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weights": value}))


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", WITHOUT_EXPERTS.values(), ids=WITHOUT_EXPERTS)
def test_every_kind_comes_back_bit_for_bit(
    tmp_path: Path, config: ModelConfig, dtype: torch.dtype, kind: QuantisedFormat
):
    model = quantised(config, kind, dtype)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert_same(model, loaded)
    assert not loaded.training
    tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert tied == config.tie_embeddings
    save_model(loaded, tmp_path / "again")
    for path in (tmp_path / "model").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_config_json_says_how_the_matrices_are_held(folder):
    table = json.loads((folder / "config.json").read_text())
    assert table["weights"] == {"format": folder.name, "group": 32}
    assert table["format_version"] == 1
    assert read_quantised(folder) == folder.name


def test_a_float_model_says_nothing_of_it(tmp_path):
    save_model(tiny_model(tiny_config()), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()).keys() == {
        "model_type",
        "format_version",
        "config",
    }
    assert read_quantised(tmp_path) is None


def test_names_and_formats_on_disk(folder):
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    assert stored[f"{UP}.weight"].dtype == {"int8": torch.int8, "int4": torch.uint8}[folder.name]
    assert stored[f"{UP}.weight_scale"].dtype == torch.float16
    assert (f"{UP}.weight_min" in stored) == (folder.name == "int4")
    assert stored["model.norm.weight"].dtype == torch.float32
    assert "model.aux.0.embed_tokens.weight_scale" in safetensors.torch.load_file(
        folder / "aux.safetensors"
    )


@kinds
@pytest.mark.parametrize("config", WITHOUT_EXPERTS.values(), ids=WITHOUT_EXPERTS)
def test_quantising_while_reading_equals_quantising_afterwards(
    tmp_path: Path, config: ModelConfig, kind: QuantisedFormat
):
    save_model(tiny_model(config, dtype=torch.float32), tmp_path)
    assert_same(load_model(tmp_path, weights=kind), quantise_model(load_model(tmp_path), kind))


@kinds
def test_a_format_asked_for_is_that_of_everything_but_codes_and_scales(
    tmp_path: Path, kind: QuantisedFormat
):
    save_model(tiny_model(tiny_config("dual"), dtype=torch.float32), tmp_path / "floats")
    expected = load_model(tmp_path / "floats", weights=kind)
    save_model(expected, tmp_path / "quantised")
    asked: list[tuple[str, QuantisedFormat | None]] = [
        ("floats", kind),
        ("quantised", None),
        ("quantised", kind),
    ]
    for name, weights in asked:
        model = load_model(tmp_path / name, dtype=torch.bfloat16, weights=weights)
        assert model.dtype == torch.bfloat16
        assert_same(model, load_model(tmp_path / "quantised").to(torch.bfloat16))
        assert model.quantised == kind


def test_what_is_quantised_is_not_made_something_else(folder):
    other: QuantisedFormat = "int4" if folder.name == "int8" else "int8"
    with pytest.raises(
        ValueError, match=f"holds {folder.name} weights, which cannot be made {other}; load the"
    ):
        load_model(folder, weights=other)


def test_weights_that_cannot_be_quantised_are_named_with_their_file(tmp_path):
    model = tiny_model(tiny_config("dual"), dtype=torch.float32)
    with torch.no_grad():
        model.get_parameter(f"{UP}.weight")[1, 2] = math.inf
    save_model(model, tmp_path)
    load_model(tmp_path)
    with pytest.raises(
        ValueError, match=rf"model\.safetensors: {UP}\.weight: 1 weights are not finite"
    ):
        load_model(tmp_path, weights="int8")
    with pytest.raises(ValueError, match="cannot be quantised to 'int2'; expected int8 or int4"):
        load_model(tmp_path, weights="int2")  # type: ignore[arg-type]


# Strictness: every code and scale is accounted for.


def scales_of(folder: Path) -> list[str]:
    return ["weight_scale"] + (["weight_min"] if folder.name == "int4" else [])


def test_a_missing_scale_is_named(folder):
    for scale in scales_of(folder):
        name = f"{UP}.{scale}"
        kept = safetensors.torch.load_file(folder / "model.safetensors")[name]
        rewrite(folder / "model.safetensors", lambda t, name=name: t.pop(name))
        with pytest.raises(ValueError, match=rf"model\.safetensors: missing {UP}\.{scale}$"):
            load_model(folder)
        rewrite(folder / "model.safetensors", lambda t, n=name, k=kept: t.update({n: k}))
    load_model(folder)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_no_number_is_refused(folder, wrong):
    for scale in scales_of(folder):

        def change(tensors: dict[str, Tensor], name: str = f"model.aux.0.embed_tokens.{scale}"):
            tensors[name][3, 0] = wrong

        rewrite(folder / "aux.safetensors", change)
        with pytest.raises(
            ValueError,
            match=rf"aux\.safetensors: model\.aux\.0\.embed_tokens\.{scale}: 1 of 53 values are "
            "not finite",
        ):
            load_model(folder)
        with pytest.raises(ValueError, match="not finite"):
            load_model(folder, dtype=torch.bfloat16)
        rewrite(
            folder / "aux.safetensors",
            lambda t, n=f"model.aux.0.embed_tokens.{scale}": t[n].zero_(),
        )
    load_model(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_scales_of_another_format_are_named(folder, dtype):
    for scale in scales_of(folder):
        name = f"{UP}.{scale}"
        rewrite(folder / "model.safetensors", lambda t, n=name: t.update({n: t[n].abs().to(dtype)}))
    with pytest.raises(ValueError, match=rf"model\.safetensors: not F16: .*{UP}\.weight_scale \("):
        load_model(folder)


def test_codes_of_another_format_are_named(folder):
    wanted = {"int8": "I8", "int4": "U8"}[folder.name]
    for dtype in (torch.float32, torch.int16, torch.uint8 if wanted == "I8" else torch.int8):
        rewrite(
            folder / "model.safetensors",
            lambda t, dtype=dtype: t.update({f"{UP}.weight": t[f"{UP}.weight"].to(dtype)}),
        )
        with pytest.raises(ValueError, match=rf"not {wanted}: {UP}\.weight \("):
            load_model(folder)


def test_codes_and_scales_of_another_shape_are_named(folder):
    def change(tensors: dict[str, Tensor]) -> None:
        for leaf in ("weight", "weight_scale"):
            tensors[f"{UP}.{leaf}"] = tensors[f"{UP}.{leaf}"][:, :0].contiguous()

    rewrite(folder / "model.safetensors", change)
    with pytest.raises(ValueError, match=rf"other shape: {UP}\.weight \[44, 0\].*_scale \[44, 0\]"):
        load_model(folder)


def test_quantised_tensors_without_a_word_in_the_config_are_refused(folder):
    table = json.loads((folder / "config.json").read_text())
    del table["weights"]
    (folder / "config.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match=r"unexpected .*weight_scale.*not one of F16, BF16"):
        load_model(folder)


def test_float_tensors_under_a_quantised_config_are_refused(tmp_path):
    save_model(tiny_model(tiny_config(), dtype=torch.float32), tmp_path)
    edit_weights(tmp_path, {"format": "int8", "group": 32})
    with pytest.raises(ValueError, match=r"missing .*weight_scale.*not I8: .*\(F32\)"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"format": "int5", "group": 32}, r"weights\.format.*'int5'"),
        ({"format": "int8", "group": 64}, r"weights: group is 64; expected 32"),
        ({"format": "int8", "group": 32, "rows": 2}, r"weights\.rows: unknown key"),
        ({"group": 32}, r"weights\.format: missing"),
        ("int8", r"weights: expected a table"),
        (None, r"weights: expected a table"),
    ],
)
def test_an_unknown_word_on_the_weights_is_refused(folder, value, found):
    edit_weights(folder, value)
    with pytest.raises(ValueError, match=rf"config\.json: {found}"):
        load_model(folder)


def test_a_config_that_lies_about_sizes_costs_nothing(folder):
    path = folder / "config.json"
    table = json.loads(path.read_text())
    table["config"]["hidden_size"] = 10**9
    path.write_text(json.dumps(table))
    with pytest.raises(ValueError, match="model"):
        load_model(folder)


def test_the_float_model_is_never_needed_in_memory(folder, monkeypatch):
    """Nothing is built in floats but on the meta device."""
    from dualflow.checkpoint import store

    def build(config: ModelConfig, seed: int | None, device: str, dtype: torch.dtype) -> CausalLM:
        assert device == "meta"
        return original(config, seed, device, dtype)

    original = store.build_model
    monkeypatch.setattr(store, "build_model", build)
    assert len(quantised_matrices(load_model(folder))) == 17
