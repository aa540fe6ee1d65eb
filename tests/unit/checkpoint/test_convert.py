"""From one model on disk to another."""

import json
from pathlib import Path

import pytest
import torch

from dualflow.checkpoint import load_model, load_tokenizer_of, read_metrics, save_model
from dualflow.checkpoint.convert import convert
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.spec import ModelConfig
from dualflow.testing import tiny_config
from dualflow.testing.tensors import same, tiny_model


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
def test_an_auxiliary_flow_can_be_added_in_any_format(folder, tmp_path, dtype):
    convert(folder, tmp_path / "dual", dtype=dtype, add_aux=True)
    model = load_model(tmp_path / "dual")
    assert (model.config.variant, model.config.num_flows) == ("dual", 1)
    state = model.state_dict()
    ours, theirs = "model.aux.0.embed_tokens.weight", "model.embed_tokens.weight"
    assert same(state[ours], state[theirs])
    losses = {"val_loss": 1.5, "val_loss_p": 1.5, "val_loss_q": 1.5}
    assert read_metrics(tmp_path / "dual") == losses
    assert load_tokenizer_of(tmp_path / "dual").stop_ids == {256, 258}


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
