"""Hugging Face folders in: every tensor used once, formats kept, heads tied, older layouts read."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from dualflow.checkpoint import load_model, save_model
from dualflow.checkpoint.export import export_huggingface
from dualflow.checkpoint.huggingface import import_huggingface, is_huggingface
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.model import CausalLM
from dualflow.testing import tiny_config
from dualflow.testing.tensors import random_tokens, same, tiny_model
from tests.unit.checkpoint.huggingface_folders import (
    Tensors,
    change_config,
    change_tensors,
    read_tensors,
    write_folder,
)

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def equal(one: CausalLM, other: CausalLM) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gemma3", "olmo2", "mistral"])
def test_what_was_exported_comes_back(tmp_path: Path, family: str) -> None:
    changes = {"attention_scale": 36**-0.5} if family in ("gemma2", "gemma3") else {}
    model = write_folder(tmp_path / "hf", family, **changes)
    seen: list[tuple[int, int]] = []
    imported = import_huggingface(tmp_path / "hf", progress=lambda *at: seen.append(at))
    assert equal(imported.model, model)
    assert not imported.model.training
    assert imported.primary_config == json.loads((tmp_path / "hf" / "config.json").read_text())
    count = len(read_tensors(tmp_path / "hf"))
    assert seen == [(done, count) for done in range(count + 1)]


def test_our_folders_are_no_hugging_face_folders(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf")
    save_model(tiny_model(tiny_config()), tmp_path / "ours")
    assert is_huggingface(tmp_path / "hf")
    assert not is_huggingface(tmp_path / "ours")
    assert not is_huggingface(tmp_path)
    assert not is_huggingface(tmp_path / "absent")


def test_only_the_head_of_a_tied_pair_is_stored(tmp_path: Path) -> None:
    model = write_folder(tmp_path, tie_embeddings=True)
    change_tensors(tmp_path, lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))
    assert equal(import_huggingface(tmp_path).model, model)


def test_both_of_a_tied_pair_are_stored_and_equal(tmp_path: Path) -> None:
    model = write_folder(tmp_path, tie_embeddings=True)
    change_tensors(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    assert equal(import_huggingface(tmp_path).model, model)


def test_a_tied_head_stays_one_tensor_through_everything(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", tie_embeddings=True)
    model = import_huggingface(tmp_path / "hf").model
    save_model(model, tmp_path / "ours")
    model = load_model(tmp_path / "ours").to(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = random_tokens(model.config, 1, 9)
    model.loss(tokens, tokens).total.backward()
    optimizer.step()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    export_huggingface(model, tmp_path / "again", dtype="float32")
    assert HEAD not in read_tensors(tmp_path / "again")


def test_both_of_a_tied_pair_differ(tmp_path: Path) -> None:
    write_folder(tmp_path, tie_embeddings=True)
    change_tensors(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1}))
    with pytest.raises(ValueError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ"):
        import_huggingface(tmp_path)


def test_an_untied_head_is_missing(tmp_path: Path) -> None:
    write_folder(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(ValueError, match=r"missing lm_head\.weight \(config.json does not tie it"):
        import_huggingface(tmp_path)


def without_prefix(tensors: Tensors, prefix: str) -> None:
    for name in list(tensors):
        tensors[name.removeprefix(prefix)] = tensors.pop(name)


@pytest.mark.parametrize(("family", "prefix"), [("gpt2", "transformer."), ("llama", "model.")])
def test_a_model_saved_without_its_prefix(tmp_path: Path, family: str, prefix: str) -> None:
    model = write_folder(tmp_path, family, tie_embeddings=True)
    change_tensors(tmp_path, lambda tensors: without_prefix(tensors, prefix))
    assert equal(import_huggingface(tmp_path).model, model)


def test_names_with_and_without_prefix_in_one_folder(tmp_path: Path) -> None:
    write_folder(tmp_path)
    change_tensors(tmp_path, lambda t: t.update({"norm.weight": t.pop("model.norm.weight")}))
    with pytest.raises(ValueError, match=r"missing model\.norm\.weight; unexpected norm\.weight"):
        import_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("gpt2", ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"]),
        ("llama", ["model.layers.1.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]),
    ],
)
def test_what_old_folders_store_beside_parameters_is_left_out(
    tmp_path: Path, family: str, names: list[str]
) -> None:
    model = write_folder(tmp_path, family)
    ones = {name: torch.ones(2, dtype=torch.uint8) for name in names}
    change_tensors(tmp_path, lambda tensors: tensors.update(ones))
    assert equal(import_huggingface(tmp_path).model, model)


def test_formats_are_kept_tensor_by_tensor(tmp_path: Path) -> None:
    write_folder(tmp_path)

    def halve(tensors: Tensors) -> None:
        for name in tensors:
            if "norm" not in name:
                tensors[name] = tensors[name].bfloat16()

    change_tensors(tmp_path, halve)
    stored = read_tensors(tmp_path)
    state = import_huggingface(tmp_path).model.state_dict()
    assert all(same(state[name], stored[name]) for name in stored)
    wide = import_huggingface(tmp_path, torch.float32).model.state_dict()
    assert all(same(wide[name], stored[name].float()) for name in stored)


def test_values_too_large_for_the_format_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors["model.norm.weight"].fill_(1e5))
    with pytest.raises(ValueError, match=r"model\.norm\.weight: 32 of 32 values are too large"):
        import_huggingface(tmp_path, torch.float16)
    assert import_huggingface(tmp_path, torch.bfloat16).model.dtype == torch.bfloat16


def test_several_files_and_their_index(tmp_path: Path) -> None:
    model = tiny_model(tiny_config(), dtype=torch.float32)
    seen: list[tuple[int, int]] = []
    export_huggingface(
        model, tmp_path / "hf", file_bytes=20_000, progress=lambda *at: seen.append(at)
    )
    files = sorted((tmp_path / "hf").glob("model-*.safetensors"))
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(files) > 1
    assert seen[-1] == (len(files), len(files))
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    assert equal(import_huggingface(tmp_path / "hf").model, model)
    files[0].unlink()
    with pytest.raises(ValueError, match=f"{files[0].name} is missing, and model.safetensors.inde"):
        import_huggingface(tmp_path / "hf")


def test_an_index_that_does_not_fit_or_leads_away(tmp_path: Path) -> None:
    export_huggingface(tiny_model(tiny_config()), tmp_path / "hf", file_bytes=50_000)
    path = tmp_path / "hf" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = index["weight_map"]
    elsewhere = next(file for file in names.values() if file != names[HEAD])
    for changed, found in [
        ({**names, HEAD: elsewhere}, "does not fit"),
        ({**names, HEAD: "../other.safetensors"}, "names '../other.safetensors'"),
        ({**names, HEAD: "weights.bin"}, "names 'weights.bin'"),
        ({}, "has no weight_map"),
    ]:
        path.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(ValueError, match=found):
            import_huggingface(tmp_path / "hf")


def test_the_tokenizer_goes_along_and_tells_which_rows_are_padding(tmp_path: Path) -> None:
    model = tiny_model(tiny_config(vocab_size=300), dtype=torch.float32)
    texts = {"tokenizer.json": bytes_tokenizer().to_json(), "chat_template.jinja": "{{ 1 }}\r\n"}
    export_huggingface(model, tmp_path, companions=texts)
    imported = import_huggingface(tmp_path)
    assert imported.model.config.real_vocab_size == bytes_tokenizer().vocab_size
    assert imported.companions.items() >= texts.items()
    assert json.loads(imported.companions["generation_config.json"]) == {
        "eos_token_id": bytes_tokenizer().eos_id
    }


def test_special_ids_of_an_old_folder_become_a_generation_config(tmp_path: Path) -> None:
    write_folder(tmp_path)
    change_config(tmp_path, eos_token_id=[3, 4], bos_token_id=1, pad_token_id=99)
    companions = import_huggingface(tmp_path).companions
    ids = json.loads(companions["generation_config.json"])
    assert ids == {"bos_token_id": 1, "eos_token_id": [3, 4]}  # 99 has no row


def test_an_old_vocabulary_becomes_a_tokenizer_json(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    write_folder(tmp_path, "gpt2", vocab_size=60)
    words = ["a", "b", "c", "ab", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    imported = import_huggingface(tmp_path)
    assert "tokenizer.json" in imported.companions
    assert imported.model.config.real_vocab_size == 5


def test_an_old_vocabulary_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"no such thing")
    with pytest.warns(UserWarning, match=r"tokenizer\.model, but no tokenizer\.json"):
        imported = import_huggingface(tmp_path)
    assert "tokenizer.json" not in imported.companions


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        import_huggingface(tmp_path)


def test_what_was_loaded_does_not_change_with_the_file(tmp_path: Path) -> None:
    model = write_folder(tmp_path)
    loaded = import_huggingface(tmp_path).model
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-4096, 2)
        file.write(bytes(4096))
    assert equal(loaded, model)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert not all(torch.equal(stored[name], model.state_dict()[name]) for name in stored)
