"""SentencePiece BPE from scores."""

import json

import pytest

from dualflow.checkpoint.gguf.spm import merges_of, scores_of, spm_backend
from dualflow.checkpoint.gguf.tokenizer import import_tokenizer
from dualflow.testing.gguf_tokenizers import END, sentencepiece_metadata

TOKENS = ["<s>", "s", ">", "s>", "a", "as", "<", "ass"]
SCORES = [0.0, 0.0, 0.0, -3.0, 0.0, -1.0, 0.0, -2.0]
ORDINARY = [False] + [True] * 7


def test_the_best_union_is_the_first_merge_and_control_tokens_are_never_made():
    assert merges_of(TOKENS, SCORES, ORDINARY) == [("a", "s"), ("as", "s"), ("s", ">")]


def test_scores_are_found_for_merges():
    merges = merges_of(TOKENS, SCORES, ORDINARY)
    assert merges_of(TOKENS, scores_of(TOKENS, merges), ORDINARY) == merges


def test_bytes_have_tokens_all_or_none():
    with pytest.raises(ValueError, match="no <0x00>"):
        spm_backend([*TOKENS, "<0x41>"], [*SCORES, 0.0], [*ORDINARY, False], None, False)


def test_without_byte_tokens_what_is_unknown_is_one_token():
    files, _ = import_tokenizer(sentencepiece_metadata(False, byte_tokens=False))
    table = json.loads(files["tokenizer.json"])
    assert table["model"]["byte_fallback"] is False
    assert table["model"]["unk_token"] == "<unk>"


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("scores", None, "tokenizer.ggml.scores is missing"),
        ("scores", [0.0], "has 1 entries for"),
        ("scores", [float("nan")] * 900, "expected a number for each"),
        ("pre", "llama-bpe", "tokenizer.ggml.pre is 'llama-bpe'; expected 'default'"),
        ("add_space_prefix", 1, "add_space_prefix is 1; expected true or false"),
    ],
)
def test_what_is_missing_or_inconsistent_is_named(key: str, value: object, found: str):
    changed = {**sentencepiece_metadata(True), f"tokenizer.ggml.{key}": value}
    with pytest.raises(ValueError) as caught:
        import_tokenizer({k: v for k, v in changed.items() if v is not None})
    assert found in str(caught.value), str(caught.value)


def test_llama_cpps_defaults_hold_where_a_file_is_silent():
    metadata = sentencepiece_metadata(True)
    del metadata["tokenizer.ggml.add_space_prefix"], metadata["tokenizer.ggml.pre"]
    files, _ = import_tokenizer(metadata)
    assert files == import_tokenizer(sentencepiece_metadata(True))[0]
    config = json.loads(files["tokenizer_config.json"])
    assert config["add_bos_token"] is True and config["eos_token"] == END


def test_a_token_of_absurd_length_is_refused():
    with pytest.raises(ValueError, match="token 0 has 100,000 characters; expected at most 1,024"):
        merges_of(["a" * 100_000], [0.0], [True])
