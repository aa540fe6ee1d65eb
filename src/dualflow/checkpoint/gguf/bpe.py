"""Byte-level BPE in GGUF files (llama.cpp's tokenizer model "gpt2"): the pre-tokenizers that we
know, by llama.cpp's names. No torch here.

Each is what the family's own tokenizer.json does, normalisation included: a model was trained on
the ids that it gives.
"""

from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a text is cut before merges are looked for.

    regex:          what is a piece; None: GPT-2's cut.
    digits:         every digit is a piece of its own.
    nfc:            the text is first normalised to NFC.
    ignore_merges:  a piece that is a token is not taken apart.
    adds_bos:       whether a text begins with BOS where the file does not say.
    """

    regex: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_LLAMA3 = Cut(regex=_WORDS % r"\p{N}{1,3}", ignore_merges=True, adds_bos=True)

CUTS = {
    "smollm": Cut(digits=True),
    "gpt-2": Cut(),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Cut(regex=_WORDS % r"\p{N}", nfc=True),
    "dbrx": Cut(regex=_WORDS % r"\p{N}{1,3}"),
    "olmo": Cut(nfc=True),
    "tekken": Cut(regex=_CASED_WORDS, ignore_merges=True, adds_bos=True),
}
"""By ``tokenizer.ggml.pre``; where several are the same, the first is the one that is written."""


def bpe_backend(tokens: list[str], merges: list[Any], pre: str) -> tokenizers.Tokenizer:
    """The tokenizer without its added tokens.

    Raises ``ValueError``: the pre-tokenizer is not known, or a merge is none of the vocabulary's.
    """
    if pre not in CUTS:
        raise ValueError(
            f"tokenizer.ggml.pre is {pre!r}, a pre-tokenizer that is not supported; supported: "
            f"{', '.join(map(repr, CUTS))}"
        )
    cut = CUTS[pre]
    vocab = {token: number for number, token in enumerate(tokens)}
    pairs: list[tuple[str, str]] = []
    for number, merge in enumerate(merges):
        left, space, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise ValueError(
                f"tokenizer.ggml.merges[{number}] is {merge!r}; expected two tokens of the "
                "vocabulary whose union is one too"
            )
        pairs.append((left, right))
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=pairs, ignore_merges=cut.ignore_merges)
    )
    # The library's type hints leave these attributes out.
    if cut.nfc:
        backend.normalizer = normalizers.NFC()  # type: ignore[assignment]
    backend.pre_tokenizer = _pre_tokenizer(cut)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return backend


def _pre_tokenizer(cut: Cut) -> pre_tokenizers.PreTokenizer:
    parts: list[Any] = []
    if cut.digits:
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.regex is not None:
        parts.append(pre_tokenizers.Split(Regex(cut.regex), "isolated"))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.regex is None)
    return pre_tokenizers.Sequence([*parts, bytes_]) if parts else bytes_  # type: ignore[return-value]
