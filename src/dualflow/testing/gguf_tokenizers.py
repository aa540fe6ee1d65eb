"""Small tokenizers of each kind that GGUF files have, trained here, as companion files."""

import json
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers

from dualflow.checkpoint.gguf.bpe import CUTS, bpe_backend
from dualflow.checkpoint.gguf.tokenizer import TokenKind
from dualflow.data.tokenizers import bytes_tokenizer

END = "<|im_end|>"
THINK = "<think>"

_TEXT = (
    "The quick brown fox, 1234 times: don't I'LL we've!\r\n\t  def f(x):\n\n    return x + 1\n"
    "Ünïcödé 日本語 текст ½ Ⅷ १२ 🌶👩‍🚀 e\u0301 hello world hello there <think> a  b   c    d\n"
)


def train_byte_level(pre: str) -> tokenizers.Tokenizer:
    """A byte-level BPE that cuts texts as llama.cpp's ``pre`` does, with a special token and one
    that is not.
    """
    cut = bpe_backend(["<e>"], [], pre)
    backend: Any = tokenizers.Tokenizer(models.BPE(ignore_merges=CUTS[pre].ignore_merges))
    backend.pre_tokenizer, backend.decoder = cut.pre_tokenizer, cut.decoder
    if cut.normalizer is not None:
        backend.normalizer = cut.normalizer
    letters = list(json.loads(bytes_tokenizer().to_json())["model"]["vocab"])[:256]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=letters, show_progress=False, min_frequency=1
    )
    backend.train_from_iterator([_TEXT], trainer)
    backend.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    backend.add_tokens([AddedToken(THINK, normalized=False)])
    return backend


def sentencepiece_metadata(space_prefix: bool, byte_tokens: bool = True) -> dict[str, Any]:
    """Keys of a SentencePiece BPE with a score for each token, the best first."""
    backend: Any = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.train_from_iterator(
        [_TEXT], trainers.BpeTrainer(vocab_size=260, show_progress=False, min_frequency=1)
    )
    model = json.loads(backend.to_str())["model"]
    made = list(dict.fromkeys("".join(merge) for merge in model["merges"]))
    letters = [text for text in model["vocab"] if len(text) == 1]
    kinds = {"<unk>": TokenKind.UNKNOWN, "<s>": TokenKind.CONTROL, END: TokenKind.CONTROL}
    if byte_tokens:
        kinds |= {f"<0x{byte:02X}>": TokenKind.BYTE for byte in range(256)}
    first = len(kinds)
    kinds |= dict.fromkeys((*made, *letters), TokenKind.NORMAL)
    kinds[THINK] = TokenKind.USER_DEFINED
    scores = [0.0] * first + [-float(place) for place in range(len(made) + len(letters))] + [0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": list(kinds),
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds.values()],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


def companions_of(backend: tokenizers.Tokenizer, eos_token: str = END) -> dict[str, str]:
    """The companion files of a tokenizer made here."""
    return {
        "tokenizer.json": backend.to_str(),
        "tokenizer_config.json": json.dumps({"eos_token": eos_token}),
    }
