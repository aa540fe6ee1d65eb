"""The tokenizer and the chat template of a GGUF file."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dualflow.data.tokenizers import load_tokenizer
from dualflow.spec import ModelConfig

pytest.importorskip("gguf")

from dualflow.checkpoint.companions import write_companions
from dualflow.checkpoint.gguf.tokenizer import import_tokenizer
from dualflow.testing.gguf import (
    CONTROL,
    MERGES,
    TEMPLATE,
    USER_DEFINED,
    VOCAB_SIZE,
    gguf_metadata,
    tiny_vocabulary,
)

METADATA = gguf_metadata(
    ModelConfig(
        vocab_size=VOCAB_SIZE, hidden_size=8, num_layers=1, num_heads=1, intermediate_size=8
    )
)

TEXTS = [
    "hello world", "  hello   world\t\n\n", "12345 6½ Ⅷ १२", "it's I'll DON'T", "\r\na\r\n",
    "日本語 text",
    "🌶👩‍🚀é", "<think>hello</think>", "a<think> b", "<|im_end|> <|im_", "\u00a0\u3000x\u200b", "",
]  # fmt: skip


def reference() -> Backend:
    """The same tokenizer built by hand, as Hugging Face's file of the family describes it."""
    vocab = {token: number for number, token in enumerate(tiny_vocabulary())}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    backend: Any = Backend(models.BPE(vocab=vocab, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in CONTROL])
    backend.add_tokens([AddedToken(name, normalized=False) for name in USER_DEFINED])
    return backend


def imported(tmp_path, **changes):
    files, _ = import_tokenizer({**METADATA, **{f"tokenizer.{k}": v for k, v in changes.items()}})
    write_companions(tmp_path, files)
    return load_tokenizer(tmp_path)


def test_every_text_has_the_reference_ids_and_comes_back(tmp_path):
    ours, theirs = imported(tmp_path), reference()
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, special=True) == ids, text
        assert ours.decode(ours.encode(text)) == text


def test_added_tokens_stay_one_id_and_specials_special(tmp_path):
    ours = imported(tmp_path)
    assert ours.special_ids == {0, 1, 2}
    assert ours.encode("<think>") == [3]
    assert ours.encode("<|im_end|>", special=True) == [2]
    assert 2 not in ours.encode("<|im_end|>")


def test_the_end_of_text_is_the_files_and_every_end_stops(tmp_path):
    ours = imported(tmp_path)
    assert ours.eos_token == "<|im_end|>"
    assert ours.eos_id == 2
    assert ours.stop_ids == {0, 2}  # <|endoftext|> ends a text wherever it occurs


def test_an_end_of_turn_id_of_the_file_stops_too(tmp_path):
    assert imported(tmp_path, **{"ggml.eot_token_id": 1}).stop_ids == {0, 1, 2}


def test_names_of_special_tokens_and_the_template_are_kept():
    files, real = import_tokenizer(METADATA)
    assert json.loads(files["tokenizer_config.json"]) == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }
    assert files["chat_template.jinja"] == TEMPLATE
    assert real == VOCAB_SIZE


def test_a_file_without_a_template_gives_none():
    without = {key: value for key, value in METADATA.items() if "template" not in key}
    assert "chat_template.jinja" not in import_tokenizer(without)[0]


def test_bos_and_eos_that_a_file_asks_for_are_added_by_the_post_processor():
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    files, _ = import_tokenizer({**METADATA, **flags})
    backend = Backend.from_str(files["tokenizer.json"])
    bare = backend.encode("hello", add_special_tokens=False).ids
    assert backend.encode("hello").ids == [1, *bare, 2]
    assert json.loads(files["tokenizer_config.json"])["add_bos_token"] is True
    with pytest.raises(ValueError, match="add_bos_token is set, but no bos_token_id"):
        import_tokenizer(
            {k: v for k, v in {**METADATA, **flags}.items() if k != "tokenizer.ggml.bos_token_id"}
        )


def test_templates_for_special_uses_are_left_behind():
    more = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "x"}
    assert import_tokenizer({**METADATA, **more}) == import_tokenizer(METADATA)


TOKENS = METADATA["tokenizer.ggml.tokens"]
KINDS = METADATA["tokenizer.ggml.token_type"]


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("model", "t5", "tokenizer.ggml.model is 't5'"),
        ("model", "llama", "tokenizer.ggml.pre is 'smollm'; expected 'default'"),
        ("pre", "default", "tokenizer.ggml.pre is 'default'"),
        ("pre", None, "tokenizer.ggml.pre is missing"),
        ("tokens", 3, "tokenizer.ggml.tokens is a int"),
        ("tokens", TOKENS[:-1], "has 266 entries, token_type 267"),
        ("tokens", [*TOKENS[:-1], "h"], "holds 'h' twice"),
        ("token_type", [*KINDS[:-1], 6], "token 266 ('ĊĊ') is of type 'byte'"),
        ("merges", ["h e", "nope"], "merges[1] is 'nope'"),
        ("merges", ["h z"], "merges[0] is 'h z'"),
        ("merges", [1], "merges[0] is 1"),
        ("eos_token_id", None, "eos_token_id is missing"),
        ("eos_token_id", 267, "eos_token_id is 267; expected an id from 0 to 266"),
        ("bos_token_id", -1, "bos_token_id is -1"),
        ("add_bos_token", 1, "add_bos_token is 1; expected true or false"),
        ("add_space_prefix", True, "add_space_prefix is set"),
    ],
)
def test_what_is_not_supported_or_inconsistent_is_refused_by_name(key, value, found):
    changed = {**METADATA, f"tokenizer.ggml.{key}": value}
    with pytest.raises(ValueError) as caught:
        import_tokenizer({k: v for k, v in changed.items() if v is not None})
    assert found in str(caught.value), str(caught.value)
