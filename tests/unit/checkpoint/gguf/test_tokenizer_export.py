"""Tokenizers as GGUF metadata: every kind comes back, and what would not is refused."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

pytest.importorskip("gguf")

from dualflow.checkpoint.gguf.tokenizer import import_tokenizer
from dualflow.checkpoint.gguf.tokenizer_export import export_tokenizer
from dualflow.data.tokenizers import bytes_tokenizer, train_bpe
from dualflow.testing.gguf import tokenizer_metadata
from dualflow.testing.gguf_tokenizers import (
    END,
    companions_of,
    sentencepiece_metadata,
    train_byte_level,
)

ROWS = 1000


def refused(companions: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        export_tokenizer(companions, ROWS)
    assert message in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "dbrx", "olmo", "tekken"])
def test_the_cut_is_recognised(pre: str):
    keys = export_tokenizer(companions_of(train_byte_level(pre)), ROWS)
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", pre)
    assert len(keys["tokenizer.ggml.tokens"]) == ROWS
    assert keys["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize("space_prefix", [True, False])
def test_sentencepiece_comes_back_with_bos_and_space(space_prefix: bool):
    first, _ = import_tokenizer(sentencepiece_metadata(space_prefix))
    keys = export_tokenizer(first, ROWS)
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.add_space_prefix"] is space_prefix
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert import_tokenizer(keys)[0] == first


def test_what_was_trained_here_can_be_exported():
    text = "hello world, hello there " * 20
    keys = export_tokenizer({"tokenizer.json": train_bpe([text], 270).to_json()}, ROWS)
    assert keys["tokenizer.ggml.pre"] == "gpt-2"


def test_runs_of_spaces_are_looked_for_in_the_text_as_it_stands():
    metadata = sentencepiece_metadata(False)
    table = json.loads(import_tokenizer(metadata)[0]["tokenizer.json"])
    backend = Backend.from_str(json.dumps(table))
    backend.add_tokens([AddedToken("▁▁▁▁▁▁▁▁▁", normalized=False)])
    keys = export_tokenizer(companions_of(backend), ROWS)
    assert " " * 9 in keys["tokenizer.ggml.tokens"]


def test_ends_of_a_text_are_named_where_their_names_do_not_say_so():
    companions = import_tokenizer(tokenizer_metadata())[0]
    companions["generation_config.json"] = json.dumps({"eos_token_id": [2, 0, 3]})
    keys = export_tokenizer(companions, ROWS)
    assert keys["tokenizer.ggml.eot_token_id"] == 3
    assert "tokenizer.ggml.eom_token_id" not in keys
    companions["generation_config.json"] = json.dumps({"eos_token_id": [2, 3, 4, 5]})
    refused(companions, "names 3 ends of a text beside EOS")


def test_a_chat_template_of_the_tokenizer_config_goes_along():
    companions = companions_of(train_byte_level("gpt-2"))
    config = {"eos_token": {"content": END}, "chat_template": "{{ x }}"}
    companions["tokenizer_config.json"] = json.dumps(config)
    assert export_tokenizer(companions, ROWS)["tokenizer.chat_template"] == "{{ x }}"


def other(**changes: Any) -> dict[str, str]:
    backend: Any = train_byte_level("gpt-2")
    for name, value in changes.items():
        setattr(backend, name, value)
    return companions_of(backend)


def test_what_llama_cpp_cannot_do_is_named():
    refused({}, "no tokenizer.json")
    refused({"tokenizer.json": "{}"}, "tokenizer.json cannot be used")
    refused({"tokenizer.json": bytes_tokenizer().to_json()}, "has no merges")
    refused(other(pre_tokenizer=pre_tokenizers.Whitespace()), "no llama.cpp pre-tokenizer for")
    refused(other(normalizer=normalizers.Lowercase()), "no llama.cpp pre-tokenizer for")
    words: Any = Backend(models.WordLevel({END: 0}, unk_token=END))
    refused(companions_of(words), "a model of type 'WordLevel'")
    stripping = train_byte_level("gpt-2")
    stripping.add_tokens([AddedToken("<mask>", lstrip=True)])
    refused(companions_of(stripping), "'<mask>' has lstrip set")
    normalised: Any = Backend.from_str(
        import_tokenizer(sentencepiece_metadata(True))[0]["tokenizer.json"]
    )
    normalised.add_tokens([AddedToken("<x>", normalized=True)])
    refused(companions_of(normalised), "'<x>' has normalized set")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_damaged_companion_is_named(name: str, text: str):
    refused({**other(), name: text}, f"{name} is not usable JSON")


def test_a_sentencepiece_tokenizer_that_spaces_otherwise_is_refused():
    backend: Any = Backend.from_str(
        import_tokenizer(sentencepiece_metadata(False))[0]["tokenizer.json"]
    )
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    refused(companions_of(backend), "cannot express the normalizer of tokenizer.json")


def test_something_else_around_every_text_is_refused():
    from tokenizers import processors

    backend: Any = train_byte_level("gpt-2")
    number = backend.token_to_id(END)
    backend.post_processor = processors.TemplateProcessing(
        single=["$A", END, END], special_tokens=[(END, number)]
    )
    refused(companions_of(backend), "a GGUF file can express BOS")


def test_a_token_before_every_text_is_bos_where_nothing_names_it():
    companions, _ = import_tokenizer(sentencepiece_metadata(False))
    companions["tokenizer_config.json"] = json.dumps({"eos_token": END})
    keys = export_tokenizer(companions, ROWS)
    assert keys["tokenizer.ggml.bos_token_id"] == 1
    assert keys["tokenizer.ggml.add_bos_token"] is True
