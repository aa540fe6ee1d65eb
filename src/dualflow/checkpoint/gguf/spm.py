"""SentencePiece BPE in GGUF files (llama.cpp's tokenizer model "llama"): Llama 2, Mistral, Gemma.
No torch here.

A file has a score for every token and no merges; two neighbours whose union has the best score are
joined first. The same order is written as merges, as Hugging Face's converter does.
"""

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers

_SPACE = "▁"
_LONGEST = 1024
"""Characters of an ordinary token; looking for its merges takes the square of that."""


def spm_backend(
    tokens: list[str],
    scores: Sequence[float],
    mergeable: Sequence[bool],
    unknown: str | None,
    space_prefix: bool,
) -> tokenizers.Tokenizer:
    """The tokenizer without its added tokens.

    mergeable:     which tokens are ordinary ones: only these are joined and made by joining.
    unknown:       the token for what has no other; characters go to bytes first, where there are
                   tokens for them.
    space_prefix:  a text begins with a space that is not in it.

    Raises ``ValueError`` where some bytes have tokens and others have none.
    """
    vocab = {token: number for number, token in enumerate(tokens)}
    byte_tokens = [f"<0x{byte:02X}>" in vocab for byte in range(256)]
    if any(byte_tokens) and not all(byte_tokens):
        missing = byte_tokens.index(False)
        raise ValueError(f"the vocabulary has tokens for some bytes, but no <0x{missing:02X}>")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_of(tokens, scores, mergeable),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=all(byte_tokens),
        )
    )
    replace = normalizers.Replace(" ", _SPACE)
    prefixed = [normalizers.Prepend(_SPACE), replace]
    normalizer = normalizers.Sequence(prefixed) if space_prefix else replace  # type: ignore[arg-type]
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    # The library's type hints leave these attributes out.
    backend.normalizer = normalizer  # type: ignore[assignment]
    backend.decoder = decoders.Sequence(parts)  # type: ignore[assignment,arg-type]
    return backend


def merges_of(
    tokens: Sequence[str], scores: Sequence[float], mergeable: Sequence[bool]
) -> list[tuple[str, str]]:
    """Every pair of ordinary tokens whose union is one, the best union first. Raises ``ValueError``
    where a token is longer than any that is trained.
    """
    ordinary = {token: number for number, token in enumerate(tokens) if mergeable[number]}
    found: list[tuple[float, int, int, int]] = []
    for piece, number in ordinary.items():
        if len(piece) > _LONGEST:
            raise ValueError(
                f"token {number} has {len(piece):,} characters; expected at most {_LONGEST:,}"
            )
        for cut in range(1, len(piece)):
            left, right = ordinary.get(piece[:cut]), ordinary.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[number], number, left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in found]


def scores_of(tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> list[float]:
    """Scores under which ``merges_of`` gives these merges, where there are any: of each token minus
    the place of the first merge that makes it; of others, which are not made, below all these.
    """
    places: dict[str, int] = {}
    for left, right in merges:
        places.setdefault(left + right, len(places))
    return [-float(places.get(token, len(places))) for token in tokens]
