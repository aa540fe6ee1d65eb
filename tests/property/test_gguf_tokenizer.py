"""Whatever the text, a tokenizer gives the same ids after it went through a GGUF file, tokens that
were added stay whole, and the text comes back byte for byte.
"""

import re
import unicodedata
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualflow.data.tokenizers import Tokenizer

pytest.importorskip("gguf")

from dualflow.checkpoint.gguf.bpe import CUTS
from dualflow.checkpoint.gguf.tokenizer import TokenKind, import_tokenizer
from dualflow.checkpoint.gguf.tokenizer_export import export_tokenizer
from dualflow.testing.gguf_tokenizers import (
    END,
    THINK,
    companions_of,
    sentencepiece_metadata,
    train_byte_level,
)

PIECES = st.sampled_from([
    " ", "  ", "    ", "\t", "\n", "\r\n", "\n\n", "1", "12", "345", "é", "e\u0301", "日本", "🌶",
    "👩‍🚀", "don't", "I'LL", "'S", "'ſ", "_", "--", "!?", "\u00a0", "\u3000", "\u200b", THINK, END,
    "<|im_", "hello", " world", "½", "Ⅷ", "१", "x/y", "(", "[", "K", "ß", "\0",
])  # fmt: skip
TEXTS = st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=20).map("".join))


@cache
def byte_level(pre: str) -> tuple[Tokenizer, Tokenizer]:
    """One trained with Hugging Face's library, and what a file made of it."""
    companions = companions_of(train_byte_level(pre))
    rows = Tokenizer.from_json(companions["tokenizer.json"], END).vocab_size + 3
    read, _ = import_tokenizer(export_tokenizer(companions, rows))
    made = (Tokenizer.from_json(files["tokenizer.json"], END) for files in (companions, read))
    return next(made), next(made)


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "dbrx", "olmo", "tekken"])
@given(text=TEXTS)
def test_byte_level_ids_and_texts_survive(pre: str, text: str):
    before, after = byte_level(pre)
    ids = before.encode(text, special=True)
    assert after.encode(text, special=True) == ids
    assert after.encode(text) == before.encode(text)
    # Families that normalise give normalised text back, as with Hugging Face's library; tokens that
    # were added are found before.
    parts = re.split(f"({re.escape(END)}|{re.escape(THINK)})", text)
    normalised = "".join(unicodedata.normalize("NFC", part) for part in parts)
    assert after.decode(ids) == (normalised if CUTS[pre].nfc else text)
    assert ids.count(after.encode(THINK)[0]) == text.count(THINK)


@cache
def sentencepiece(space_prefix: bool) -> Tokenizer:
    files, _ = import_tokenizer(sentencepiece_metadata(space_prefix))
    return Tokenizer.from_json(files["tokenizer.json"], END)


def plain_sentencepiece(text: str, space_prefix: bool) -> list[int]:
    """SentencePiece's own way, step by step: the neighbours whose union has the best score are
    joined, the leftmost first.
    """
    metadata = sentencepiece_metadata(space_prefix)
    ids = {token: number for number, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    kinds, scores = metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.scores"]
    ordinary = {text for text, number in ids.items() if kinds[number] == TokenKind.NORMAL}
    pieces = list((" " + text if space_prefix and text else text).replace(" ", "▁"))
    while True:
        unions = [a + b for a, b in pairwise(pieces)]
        known = [(-scores[ids[u]], at) for at, u in enumerate(unions) if u in ordinary]
        if not known:
            break
        at = min(known)[1]
        pieces[at : at + 2] = [unions[at]]
    found: list[int] = []
    for piece in pieces:
        if piece in ordinary:
            found.append(ids[piece])
        else:
            found += [ids[f"<0x{byte:02X}>"] for byte in piece.encode("utf-8")]
    return found


@pytest.mark.parametrize("space_prefix", [True, False], ids=["llama", "gemma"])
@given(text=TEXTS)
def test_sentencepiece_ids_are_those_of_its_own_algorithm(space_prefix: bool, text: str):
    text = text.replace(THINK, "").replace(END, "").replace("▁", "")
    tokenizer = sentencepiece(space_prefix)
    ids = tokenizer.encode(text)
    assert ids == plain_sentencepiece(text, space_prefix)
    assert tokenizer.decode(ids) == text


@given(text=TEXTS)
def test_sentencepiece_without_a_space_before_gives_every_text_back(text: str):
    text = text.replace("▁", "")  # which SentencePiece writes for a space
    tokenizer = sentencepiece(False)
    ids = tokenizer.encode(text, special=True)
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.encode(THINK)[0]) == text.count(THINK)
    assert tokenizer.id_of(END) not in tokenizer.encode(text)
