"""``dualflow info`` on every kind of source."""

import json
from pathlib import Path
from typing import Any

import pytest

from dualflow.checkpoint import save_model
from dualflow.checkpoint.convert import convert, read_model
from dualflow.checkpoint.export import export_huggingface
from dualflow.cli.main import main
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.plan.costs import kv_bytes_per_token
from dualflow.plan.weights import weight_bytes
from dualflow.spec import AuxConfig, ModelConfig, parameter_counts
from dualflow.testing.steps import EVERY_KIND
from dualflow.testing.tensors import tiny_model

CONFIG = ModelConfig(
    variant="dual", vocab_size=259, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
    intermediate_size=24, max_position=64, aux=AuxConfig(owns=("o_proj", "mlp"), lora_rank=2),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_model(CONFIG).bfloat16()
    save_model(
        model, tmp_path / "dual", tokenizer_json=bytes_tokenizer().to_json(),
        metrics={"val_loss": 2.5, "val_loss_p": 2.75, "val_loss_q": None},
    )  # fmt: skip
    return tmp_path / "dual"


def record(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    assert main(["info", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_dual_model_by_owner(folder, capsys, monkeypatch):
    monkeypatch.setattr("safetensors.torch.load_file", None)  # no weights are read
    found = record(capsys, folder)
    counts = parameter_counts(CONFIG)
    expected = {"primary": counts.primary, "aux": counts.aux, "total": counts.total}
    assert found["parameters"] == expected
    assert found["bytes"] == {name: 2 * count for name, count in expected.items()}
    assert found["formats"]["aux"] == {"BF16": 2 * counts.aux}
    per_token = kv_bytes_per_token(CONFIG, 2)
    assert found["kv_cache"] == {
        "format": "bfloat16", "bytes_per_token": per_token,
        "bytes_at_context_length": 64 * per_token,
    }  # fmt: skip
    assert found["losses"] == {"r": 2.5, "p": 2.75, "q": None}
    assert (found["variant"], found["context_length"]) == ("dual", 64)
    assert (found["tokenizer"], found["chat_template"]) == (True, False)
    adds = found["auxiliary_adds"]
    assert adds["parameters_percent"] == pytest.approx(100 * counts.aux / counts.primary)
    assert adds["kv_cache_bytes"] == 0
    assert 1.5 < adds["decode_flops_ratio"] < 2.5


def test_a_quantised_model(folder, tmp_path, capsys):
    convert(folder, tmp_path / "int8", dtype="int8")
    found = record(capsys, tmp_path / "int8")
    assert found["quantised"] == "int8"
    assert found["formats"]["primary"]["I8"] > found["formats"]["primary"]["F16"]
    assert found["parameters"]["primary"] == parameter_counts(CONFIG).primary


def test_a_hugging_face_folder_names_its_family(folder, tmp_path, capsys):
    read = read_model(folder)
    export_huggingface(read.model, tmp_path / "stock", companions=read.companions)
    found = record(capsys, tmp_path / "stock")
    assert (found["kind"], found["family"]) == ("Hugging Face folder", "llama")
    assert found["auxiliary_adds"] is None
    assert found["parameters"]["aux"] == found["bytes"]["aux"] == 0
    assert found["bytes"]["primary"] == 2 * parameter_counts(CONFIG).primary
    assert found["tokenizer"]
    convert(tmp_path / "stock", tmp_path / "ours")
    assert record(capsys, tmp_path / "ours")["family"] == "llama"


def test_a_gguf_file(tmp_path, capsys):
    pytest.importorskip("gguf")
    from dualflow.testing.gguf import VOCAB_SIZE, write_tiny_gguf

    config = ModelConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
        intermediate_size=64, max_position=64, norm_eps=1e-5,
    )  # fmt: skip
    path = write_tiny_gguf(tmp_path / "a.gguf", config, tiny_model(config).float().state_dict())
    found = record(capsys, path)
    assert (found["kind"], found["family"]) == ("GGUF file", "llama")
    assert found["bytes"]["total"] == 4 * parameter_counts(config).total
    assert found["config"]["num_kv_heads"] == 2
    assert (found["tokenizer"], found["chat_template"]) == (True, True)


def test_the_table_is_for_people(folder, capsys):
    assert main(["info", str(folder)]) == 0
    shown = capsys.readouterr().out
    for part in (
        "dual (dualflow folder)",
        "2 layers, width 16, 4 heads of 4 (2 for keys and values)",
        "1 flow, embedding own",
        "LoRA of rank 2 on o_proj, mlp",
        "64 tokens, rotary base 10,000",
        "r 2.5000, p 2.7500",
        "times the FLOPs of a generated token (at 64 tokens)",
        "0 bytes to the KV cache",
    ):
        assert part in shown, part


def test_switches_of_the_families_are_named(tmp_path, capsys):
    from dualflow.testing import family_config

    for family, parts in {
        "gemma3": ("(1 + gain)", "scaled embeddings", "window of", "rotary base"),
        "gemma2": ("attention softcap", "final softcap"),
        "gpt2": ("learned positions", "biases on q, k, v", "biases in the MLP"),
        "olmo2": ("QK-norm over each row", "rmsnorm post"),
    }.items():
        save_model(tiny_model(family_config(family)), tmp_path / family)
        assert main(["info", str(tmp_path / family)]) == 0
        shown = capsys.readouterr().out
        assert all(part in shown for part in parts), shown


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_kind_of_model_has_facts(tmp_path, capsys, kind):
    config = EVERY_KIND[kind]
    save_model(tiny_model(config), tmp_path / "m")
    found = record(capsys, tmp_path / "m")
    assert found["bytes"]["total"] == weight_bytes(config, "float64").total
    assert (found["auxiliary_adds"] is None) == (config.variant == "standard")
    assert main(["info", str(tmp_path / "m")]) == 0
    assert config.variant in capsys.readouterr().out


def test_what_a_file_says_of_itself_is_no_markup(folder, tmp_path, capsys):
    save_model(tiny_model(CONFIG), tmp_path / "[red]x", primary_config={"model_type": "[bold]a"})
    assert main(["info", str(tmp_path / "[red]x")]) == 0
    shown = capsys.readouterr().out
    assert "[red]x" in shown
    assert "[bold]a" in shown


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_damaged_tokenizer_config_is_no_obstacle(folder, capsys, text):
    (folder / "tokenizer_config.json").write_text(text)
    assert main(["info", str(folder)]) == 0
    assert "no chat template" in capsys.readouterr().out


def test_errors_are_one_line_and_exit_2(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"architectures": ["FooForCausalLM"]}')
    assert main(["info", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "FooForCausalLM" in error
    assert "supported: llama" in error
    assert error.count("\n") == 1


def test_a_config_that_lies_about_its_layers_is_told_at_once(folder, capsys):
    table = json.loads((folder / "config.json").read_text())
    table["config"]["num_layers"] = 2**31
    (folder / "config.json").write_text(json.dumps(table))
    assert main(["info", str(folder)]) == 2
    assert "num_layers 2,147,483,648 and" in capsys.readouterr().err


def test_missing_weights_are_told(folder, capsys):
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert main(["info", str(folder)]) == 2
    assert "model.safetensors is missing" in capsys.readouterr().err
