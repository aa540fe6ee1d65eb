"""From one model on disk to another."""

import json
from pathlib import Path

import pytest
import torch

from dualflow.checkpoint import load_model, load_tokenizer_of, read_metrics, save_model
from dualflow.checkpoint.convert import convert, read_model, retrofit
from dualflow.checkpoint.export import export_huggingface
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.spec import AuxConfig, ModelConfig, ReadoutConfig
from dualflow.testing import tiny_config
from dualflow.testing.steps import whole_sequence
from dualflow.testing.tensors import random_tokens, same, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A standard model with everything a folder may hold."""
    save_model(
        tiny_model(tiny_config(), dtype=torch.float32),
        tmp_path / "model",
        tokenizer_json=bytes_tokenizer().to_json(),
        metrics={"val_loss": 1.5},
    )
    (tmp_path / "model/chat_template.jinja").write_bytes("{{ 'é' }}\r\n".encode())
    (tmp_path / "model/generation_config.json").write_text('{"eos_token_id": [256, 258]}')
    return tmp_path / "model"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_auto_copies_every_file_and_tensor(folder, tmp_path):
    convert(folder, tmp_path / "copy")
    assert names(tmp_path / "copy") == names(folder)
    for name in names(folder):
        assert (tmp_path / "copy" / name).read_bytes() == (folder / name).read_bytes(), name


def test_bfloat16_is_the_source_rounded(folder, tmp_path):
    convert(folder, tmp_path / "bf16", dtype="bfloat16")
    source, model = load_model(folder), load_model(tmp_path / "bf16")
    for name, tensor in source.state_dict().items():
        assert same(model.state_dict()[name], tensor.bfloat16()), name


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_is_what_loading_with_those_weights_gives(folder, tmp_path, dtype):
    convert(folder, tmp_path / dtype, dtype=dtype)
    wanted, model = load_model(folder, weights=dtype), load_model(tmp_path / dtype)
    assert model.quantised == dtype
    for name, tensor in wanted.state_dict().items():
        assert same(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "int8"])
def test_a_retrofit_in_any_format_takes_everything_along(folder, tmp_path, dtype):
    retrofit(folder, tmp_path / "dual", dtype=dtype)
    model = load_model(tmp_path / "dual")
    assert (model.config.variant, model.config.num_flows) == ("dual", 1)
    assert model.quantised == (dtype if dtype == "int8" else None)
    state = model.state_dict()
    ours, theirs = "model.aux.0.embed_tokens.weight", "model.embed_tokens.weight"
    assert same(state[ours], state[theirs])
    losses = {"val_loss": 1.5, "val_loss_p": 1.5, "val_loss_q": 1.5}
    assert read_metrics(tmp_path / "dual") == losses
    assert load_tokenizer_of(tmp_path / "dual").stop_ids == {256, 258}


def test_the_primary_of_a_retrofit_is_the_source_bit_for_bit(folder, tmp_path):
    retrofit(folder, tmp_path / "dual")
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "dual" / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.mark.parametrize("kind", ["mixture", "aux_only", "learned"])
def test_a_retrofit_predicts_what_its_source_does(folder, tmp_path, kind):
    aux = AuxConfig(num_flows=2, owns=("q_proj", "lm_head"), lora_rank=3, flow_norms="separate")
    retrofit(folder, tmp_path / "dual", aux=aux, readout=ReadoutConfig(kind=kind))
    model, source = (load_model(place).double() for place in (tmp_path / "dual", folder))
    assert model.config.aux == aux
    tokens = random_tokens(source.config, 20)
    with torch.no_grad():
        outputs = [whole_sequence(one, tokens) for one in (source, model)]
        alone = source.log_probs(outputs[0].primary_TD, None)
        both = model.log_probs(outputs[1].primary_TD, outputs[1].aux_FAD)
    assert torch.allclose(both.r.exp(), alone.r.exp(), rtol=0, atol=1e-12)


def test_a_retrofit_of_a_retrofit_is_refused_with_advice(folder, tmp_path, monkeypatch):
    retrofit(folder, tmp_path / "dual")
    monkeypatch.setattr("dualflow.checkpoint.convert.load_model", None)  # before weights are read
    with pytest.raises(ValueError, match=r"is a dual model already; train it.*dualflow export"):
        retrofit(tmp_path / "dual", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_retrofit_of_quantised_weights_is_refused(folder, tmp_path):
    convert(folder, tmp_path / "int8", dtype="int8")
    with pytest.raises(ValueError, match="int8; add an auxiliary flow to the float model"):
        retrofit(tmp_path / "int8", tmp_path / "dual")


def test_a_retrofit_of_another_variant_is_refused(tmp_path):
    save_model(tiny_model(tiny_config("phd2")), tmp_path / "phd2")
    with pytest.raises(ValueError, match="is a phd2 model; .* to a standard one"):
        retrofit(tmp_path / "phd2", tmp_path / "dual")


def test_the_familys_own_config_goes_through_every_step(folder, tmp_path):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "note": "é"}
    save_model(load_model(folder), tmp_path / "imported", primary_config=config)
    convert(tmp_path / "imported", tmp_path / "copy")
    retrofit(tmp_path / "copy", tmp_path / "dual")
    assert read_model(tmp_path / "dual").primary_config == config


def test_a_hugging_face_folder_becomes_a_whole_folder(folder, tmp_path):
    primary = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    source = read_model(folder)
    export_huggingface(source.model, tmp_path / "stock", companions=source.companions)
    stages: list[str] = []
    convert(
        tmp_path / "stock", tmp_path / "new",
        progress=lambda stage, done, total: stages.append(stage),
    )  # fmt: skip
    assert list(dict.fromkeys(stages)) == ["reading tensors", "writing"]
    read = read_model(tmp_path / "new")
    assert read.primary_config is not None
    assert read.primary_config.items() >= primary.items()
    for name, tensor in read.model.state_dict().items():
        assert same(tensor, source.model.state_dict()[name]), name
    retrofit(tmp_path / "stock", tmp_path / "dual")
    assert load_model(tmp_path / "dual").config.variant == "dual"


def test_an_existing_target_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"there exists already; name a new folder"):
        convert(tmp_path / "no such source", tmp_path / "there")
    assert names(tmp_path / "there") == ["notes.txt"]


def test_a_model_is_not_converted_into_itself(folder):
    with pytest.raises(ValueError, match="exists already"):
        convert(folder, folder, dtype="bfloat16")


def test_a_failure_leaves_nothing(folder, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("dualflow.checkpoint.convert.write_companions", fail)
    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "copy")
    assert names(tmp_path) == ["model"]


def test_quantised_models_are_not_turned_back(folder, tmp_path):
    convert(folder, tmp_path / "int8", dtype="int8")
    for dtype in ("float32", "int4"):
        with pytest.raises(ValueError, match=f"int8 weights, which cannot be made {dtype}"):
            convert(tmp_path / "int8", tmp_path / "other", dtype=dtype)
    convert(tmp_path / "int8", tmp_path / "copy")
    assert load_model(tmp_path / "copy").quantised == "int8"


@pytest.mark.parametrize(
    ("source", "found"),
    [("none", "there is no folder"), ("a.bin", "pickled"), ("a.gguf", "begins with b'zip!'")],
)
def test_what_is_no_model_is_named(tmp_path, source, found):
    if "." in source:
        (tmp_path / source).write_bytes(b"zip!" * 99)
    if source == "a.gguf":
        pytest.importorskip("gguf")
    with pytest.raises(ValueError, match=found) as caught:
        convert(tmp_path / source, tmp_path / "new")
    assert source in str(caught.value)


def test_an_unknown_format_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="dtype is 'int3'; expected one of auto"):
        convert(folder, tmp_path / "new", dtype="int3")  # type: ignore[arg-type]


def test_a_gguf_file_becomes_a_whole_folder(tmp_path):
    pytest.importorskip("gguf")
    from dualflow.testing.gguf import VOCAB_SIZE, write_tiny_gguf

    config = ModelConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
        intermediate_size=64, max_position=64, norm_eps=1e-5,
    )  # fmt: skip
    model = tiny_model(config, dtype=torch.float32)
    source = write_tiny_gguf(tmp_path / "no_ending", config, model.state_dict())
    stages: list[str] = []
    convert(source, tmp_path / "new", progress=lambda stage, done, total: stages.append(stage))
    assert list(dict.fromkeys(stages)) == ["reading tensors", "writing"]
    assert names(tmp_path / "new") == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert load_tokenizer_of(tmp_path / "new").stop_ids == {0, 2}
    assert json.loads((tmp_path / "new/config.json").read_text())["config"]["rope_theta"] == 1e4
    for name, tensor in load_model(tmp_path / "new").state_dict().items():
        assert same(tensor, model.state_dict()[name]), name
