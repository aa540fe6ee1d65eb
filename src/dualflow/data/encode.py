"""Documents to token ids, many at a time. No torch here."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dualflow.data.documents import Document
from dualflow.data.split import Split
from dualflow.data.tokenizers import Tokenizer

_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class EncodedDocument:
    """Ids, the end-of-text token last; ``counted`` None: every token is a target of the loss."""

    ids: NDArray[np.uint32]
    counted: NDArray[np.uint8] | None
    text_bytes: int
    characters: int


def encode_documents(
    tokenizer: Tokenizer, documents: Iterator[tuple[Document, Split]]
) -> Iterator[tuple[Split, EncodedDocument]]:
    """Encode in batches of about a million characters; the order stays.

    Raises ``ValueError`` where a chat needs control tokens that the tokenizer does not have.
    """
    batch: list[tuple[Document, Split]] = []
    characters = 0
    for document, split in documents:
        batch.append((document, split))
        characters += document.num_characters
        if characters >= _BATCH_CHARACTERS:
            yield from _encode_batch(tokenizer, batch)
            batch, characters = [], 0
    yield from _encode_batch(tokenizer, batch)


def _encode_batch(
    tokenizer: Tokenizer, batch: list[tuple[Document, Split]]
) -> Iterator[tuple[Split, EncodedDocument]]:
    texts = [s.text for document, _ in batch for s in document.segments if not s.control]
    encoded = iter(tokenizer.encode_arrays(texts))
    for document, split in batch:
        ids = [
            np.array([_control_id(tokenizer, s.text)], np.uint32) if s.control else next(encoded)
            for s in document.segments
        ]
        yield split, _join(document, ids, tokenizer)


def _join(
    document: Document, ids: list[NDArray[np.uint32]], tokenizer: Tokenizer
) -> EncodedDocument:
    # A chat says itself what it begins with.
    is_chat = any(segment.control for segment in document.segments)
    before = np.array([] if is_chat else tokenizer.before_ids, np.uint32)
    # A text ends where its end-of-text token says; a chat's turns end with a control token of their
    # own, and what comes after the last turn is no answer, so it does not count.
    counted = [segment.counted for segment in document.segments]
    sizes = [len(before), *map(len, ids), 1]
    flags = np.repeat([True, *counted, False], sizes).astype(np.uint8)
    return EncodedDocument(
        ids=np.concatenate([before, *ids, np.array([tokenizer.eos_id], np.uint32)]),
        counted=None if all(counted) else flags,
        text_bytes=document.num_bytes,
        characters=document.num_characters,
    )


def _control_id(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.id_of(name)
    if found is None:
        raise ValueError(
            f"the data holds chats, but the tokenizer has no token {name}; use one that has, or "
            "bytes or bpe:N"
        )
    return found
