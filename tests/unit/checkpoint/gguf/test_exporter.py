"""The primary of a model as a GGUF file: what comes back, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualflow.model import BatchKV, CausalLM, quantise_model
from dualflow.spec import AuxConfig, ModelConfig, ReadoutConfig, RopeScaling
from dualflow.testing.tensors import random_tokens, tiny_model

gguf: Any = pytest.importorskip("gguf")

from dualflow.checkpoint.gguf.exporter import GGUFKind, export_gguf  # noqa: E402
from dualflow.checkpoint.gguf.file import read_gguf  # noqa: E402
from dualflow.checkpoint.gguf.importer import import_gguf  # noqa: E402
from dualflow.checkpoint.gguf.tokenizer import import_tokenizer  # noqa: E402
from dualflow.testing.gguf import (  # noqa: E402
    FAMILY_SWITCHES,
    VOCAB_SIZE,
    family_config,
    tokenizer_metadata,
)

COMPANIONS, _ = import_tokenizer(tokenizer_metadata())
PLAIN = ModelConfig(
    vocab_size=VOCAB_SIZE, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
    intermediate_size=64, max_position=64, tie_embeddings=True, norm_eps=1e-5,
)  # fmt: skip


def random_model(config: ModelConfig) -> CausalLM:
    """float32, rounded to bfloat16 as published weights are."""
    model = tiny_model(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


@torch.no_grad()
def logits(model: CausalLM, tokens_T: torch.Tensor) -> torch.Tensor:
    kv = [BatchKV(1, len(tokens_T))] * model.config.num_layers
    return model.logits(model.step(tokens_T, torch.arange(len(tokens_T)), kv).primary_TD)


@pytest.mark.parametrize(
    "heads", [(8, 2), (6, 1), (4, 4)], ids=lambda heads: f"{heads[0]}/{heads[1]}"
)
@pytest.mark.parametrize("architecture", FAMILY_SWITCHES)
def test_every_family_comes_back_bit_for_bit(
    tmp_path: Path, architecture: str, heads: tuple[int, int]
):
    model = random_model(family_config(architecture, *heads))
    path = tmp_path / "a.gguf"
    export_gguf(model, path, companions=COMPANIONS)
    assert read_gguf(path).metadata["general.architecture"] == architecture
    read = import_gguf(path)
    assert read.model.config == model.config
    assert read.companions == COMPANIONS
    assert read.model.state_dict().keys() == model.state_dict().keys()
    for name, tensor in read.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    places = [0, 1, 50]
    tokens = random_tokens(model.config, 51)
    torch.testing.assert_close(
        logits(read.model, tokens)[places], logits(model, tokens)[places], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3", "gpt2", "olmo2"])
def test_only_llama_has_its_query_rows_interleaved(tmp_path: Path, architecture: str):
    model = random_model(family_config(architecture))
    export_gguf(model, tmp_path / "a.gguf", companions=COMPANIONS)
    name = "attn_qkv" if architecture == "gpt2" else "attn_q"
    stored = read_gguf(tmp_path / "a.gguf").read(f"blk.0.{name}.weight")
    rows = model.state_dict()["model.layers.0.self_attn.q_proj.weight"].numpy()
    assert np.array_equal(stored[: len(rows)], rows)


@pytest.mark.parametrize("kind", ["F32", "BF16", "F16", "Q8_0"])
def test_matrices_are_stored_as_asked_and_vectors_as_float32(tmp_path: Path, kind: GGUFKind):
    model = tiny_model(PLAIN, dtype=torch.float32)
    export_gguf(model, tmp_path / "a.gguf", companions=COMPANIONS, kind=kind)
    file = read_gguf(tmp_path / "a.gguf")
    for name, tensor in file.tensors.items():
        assert tensor.format == (kind if len(tensor.shape) > 1 else "F32"), name
    weight = model.state_dict()["model.layers.1.mlp.up_proj.weight"].numpy()
    stored_as = gguf.GGMLQuantizationType[kind]
    expected = gguf.dequantize(gguf.quantize(weight, stored_as), stored_as)
    assert np.array_equal(file.read("blk.1.ffn_up.weight"), expected)
    assert (
        file.metadata["general.file_type"]
        == gguf.LlamaFileType[f"ALL_{kind}" if kind == "F32" else f"MOSTLY_{kind}"]
    )


def test_a_bfloat16_model_is_exported_without_loss_and_read_back_as_one(tmp_path: Path):
    model = random_model(PLAIN).to(torch.bfloat16)
    export_gguf(model, tmp_path / "a.gguf", companions=COMPANIONS, kind="BF16")
    for name, tensor in import_gguf(tmp_path / "a.gguf").model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("F16", 1e5, "blk.1.ffn_up.weight holds 1e+05, which is too large for F16"),
        ("Q8_0", 1e7, "blk.1.ffn_up.weight holds 1e+07, which is too large for Q8_0"),
        ("F32", float("nan"), "blk.1.ffn_up.weight holds values that are not finite"),
    ],
)
def test_values_that_would_overflow_are_refused_and_nothing_is_written(
    tmp_path: Path, kind: GGUFKind, value: float, message: str
):
    model = random_model(PLAIN)
    model.state_dict()["model.layers.1.mlp.up_proj.weight"][3, 3] = value
    path = tmp_path / "a.gguf"
    path.write_text("before")
    with pytest.raises(ValueError) as caught:
        export_gguf(model, path, companions=COMPANIONS, kind=kind)
    assert message in str(caught.value)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_wide_and_tiny_values_survive_where_the_format_holds_them(tmp_path: Path):
    model = random_model(PLAIN)
    weight = model.state_dict()["model.layers.1.mlp.up_proj.weight"]
    weight[0, :2] = torch.tensor([1e5, 1e-8])
    for kind in ("F32", "BF16", "Q8_0"):
        export_gguf(model, tmp_path / f"{kind}.gguf", companions=COMPANIONS, kind=kind)
    read = read_gguf(tmp_path / "F32.gguf").read("blk.1.ffn_up.weight")
    assert read[0, :2].tolist() == weight[0, :2].tolist()
    bfloat16 = read_gguf(tmp_path / "BF16.gguf").read("blk.1.ffn_up.weight")
    assert bfloat16[0, :2].tolist() == weight[0, :2].bfloat16().float().tolist()


def test_of_a_dual_model_the_primary_alone_is_written(tmp_path: Path):
    aux = AuxConfig(owns=("q_proj",), lora_rank=2)
    model = random_model(dataclasses.replace(PLAIN, variant="dual", aux=aux))
    export_gguf(model, tmp_path / "a.gguf", companions=COMPANIONS)
    read = import_gguf(tmp_path / "a.gguf").model
    assert read.config == PLAIN
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_gains_are_written_whole_whatever_the_family_stores(tmp_path: Path):
    config = dataclasses.replace(PLAIN, norm_offset=True)
    model = random_model(config)
    export_gguf(model, tmp_path / "a.gguf", companions=COMPANIONS)
    read = import_gguf(tmp_path / "a.gguf").model
    assert read.config == PLAIN
    tokens = random_tokens(config, 20)
    torch.testing.assert_close(logits(read, tokens), logits(model, tokens), rtol=1e-6, atol=1e-6)


def test_gains_that_would_lose_bits_stay_as_the_file_has_them(tmp_path: Path):
    model = random_model(family_config("gemma"))
    gain = model.state_dict()["model.norm.weight"]
    gain[0] = 1e-3 - 1  # 1 + gain is 0.001, of which 0.001 - 1 keeps few digits
    export_gguf(model, tmp_path / "a.gguf", companions=COMPANIONS)
    file = read_gguf(tmp_path / "a.gguf")
    stored = file.read("output_norm.weight")
    stored[0] = np.float32(1e-3)
    data = bytearray((tmp_path / "a.gguf").read_bytes())
    begin = file.tensors["output_norm.weight"].begin
    data[begin : begin + stored.nbytes] = stored.tobytes()
    (tmp_path / "a.gguf").write_bytes(data)
    read = import_gguf(tmp_path / "a.gguf").model
    assert not read.config.norm_offset
    assert np.array_equal(read.state_dict()["model.norm.weight"].numpy(), stored)


YARN = RopeScaling(kind="yarn", factor=4.0, original_max_position=32)
GEMMA2 = family_config("gemma2")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dataclasses.replace(PLAIN, mlp="relu2"), "mlp is 'relu2', which a GGUF file of the"),
        (dataclasses.replace(PLAIN, sliding_window=8), "sliding_window is 8"),
        (dataclasses.replace(PLAIN, attention_scale=0.5), "attention_scale is 0.5"),
        (dataclasses.replace(PLAIN, final_softcap=30.0), "final_softcap is 30.0"),
        (dataclasses.replace(PLAIN, qk_norm=True, mlp_bias=True), "mlp_bias is True"),
        (dataclasses.replace(PLAIN, position="learned"), "norm is 'rmsnorm'"),
        (dataclasses.replace(PLAIN, rope_scaling=dataclasses.replace(YARN, truncate=False)),
         "rope_scaling.truncate is False"),
        (dataclasses.replace(GEMMA2, attention_softcap=None), "attention_softcap is None"),
        (dataclasses.replace(GEMMA2, tie_embeddings=False), "tie_embeddings is False"),
        (dataclasses.replace(GEMMA2, sliding_window=None, sliding_layers=None),
         "sliding_window is None"),
        (dataclasses.replace(GEMMA2, local_rope_theta=1e6), "local_rope_theta is 1000000.0"),
        (dataclasses.replace(family_config("gpt2"), mlp_bias=False), "mlp_bias is False"),
        (dataclasses.replace(family_config("olmo2"), head_dim=4), "head_dim is 4"),
    ],
)  # fmt: skip
def test_a_switch_that_no_architecture_has_is_named(
    tmp_path: Path, config: ModelConfig, message: str
):
    with pytest.raises(ValueError) as caught:
        export_gguf(tiny_model(config), tmp_path / "a.gguf", companions=COMPANIONS)
    assert message in str(caught.value), str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_window_that_holds_every_position_is_no_window(tmp_path: Path):
    config = dataclasses.replace(PLAIN, sliding_window=PLAIN.max_position)
    export_gguf(random_model(config), tmp_path / "a.gguf", companions=COMPANIONS)
    assert import_gguf(tmp_path / "a.gguf").model.config == PLAIN


def test_what_has_no_float_primary_is_refused(tmp_path: Path):
    quantised = quantise_model(tiny_model(PLAIN, dtype=torch.float32), "int8")
    with pytest.raises(ValueError, match="int8 matrices; export the model they were made from"):
        export_gguf(quantised, tmp_path / "a.gguf", companions=COMPANIONS)
    aux_only = dataclasses.replace(PLAIN, variant="dual", readout=ReadoutConfig(kind="aux_only"))
    with pytest.raises(ValueError, match="no trained p"):
        export_gguf(tiny_model(aux_only), tmp_path / "a.gguf", companions=COMPANIONS)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path):
    config = dataclasses.replace(PLAIN, intermediate_size=72)
    with pytest.raises(ValueError, match=r"ffn_down.weight has rows of 72 values; Q8_0"):
        export_gguf(random_model(config), tmp_path / "a.gguf", companions=COMPANIONS, kind="Q8_0")


def test_padding_rows_stay_padding(tmp_path: Path):
    config = dataclasses.replace(PLAIN, vocab_size=VOCAB_SIZE + 5, real_vocab_size=VOCAB_SIZE)
    export_gguf(random_model(config), tmp_path / "a.gguf", companions=COMPANIONS)
    assert import_gguf(tmp_path / "a.gguf").model.config == config


def test_progress_ends_at_the_total(tmp_path: Path):
    seen: list[tuple[int, int]] = []
    export_gguf(
        random_model(PLAIN), tmp_path / "a.gguf", companions=COMPANIONS,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(done, 20) for done in range(21)]


def test_folders_above_the_file_are_made(tmp_path: Path):
    export_gguf(random_model(PLAIN), tmp_path / "new" / "deep" / "a.gguf", companions=COMPANIONS)
    assert [path.name for path in (tmp_path / "new" / "deep").iterdir()] == ["a.gguf"]


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path: Path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError("12288 requested and 1952 written")  # as numpy says it

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(OSError, match=r"a\.gguf cannot be written: .*the disk may be full"):
        export_gguf(random_model(PLAIN), tmp_path / "a.gguf", companions=COMPANIONS)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no tokenizer.json"):
        export_gguf(random_model(PLAIN), tmp_path / "a.gguf", companions={})


def test_a_tokenizer_with_more_ids_than_rows_is_refused(tmp_path: Path):
    config = dataclasses.replace(PLAIN, vocab_size=VOCAB_SIZE - 1)
    with pytest.raises(ValueError, match=r"has the id 266; the model has 266 rows"):
        export_gguf(random_model(config), tmp_path / "a.gguf", companions=COMPANIONS)


def test_metadata_is_what_llama_cpp_reads(tmp_path: Path):
    export_gguf(random_model(family_config("gemma3")), tmp_path / "a.gguf", companions=COMPANIONS)
    metadata = read_gguf(tmp_path / "a.gguf").metadata
    assert {key: metadata[f"gemma3.{key}"] for key in (
        "attention.sliding_window", "rope.freq_base_swa", "rope.scaling.type",
        "rope.scaling.factor", "attention.key_length", "attention.layer_norm_rms_epsilon",
    )} == {
        "attention.sliding_window": 20, "rope.freq_base_swa": 10000.0,
        "rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    assert "gemma3.attention.sliding_window_pattern" not in metadata  # the usual one
    assert json.loads(COMPANIONS["generation_config.json"])["eos_token_id"] == [2, 0]
