"""Token ids on disk, in flat files that are mapped into memory. No torch here, and no pickle.

A split is ``NAME.tokens.bin`` (little-endian uint16 or uint32), ``NAME.documents.bin`` (int64,
where each document ends) and, where not every token counts, ``NAME.counted.bin`` (uint8). Numbers
about them stand in the folder's header.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

_DOCUMENT_DTYPE = np.dtype("<i8")


@dataclass(frozen=True)
class SplitHeader:
    """What a header says of a split: counts, the bytes of a token, a digest of the content."""

    tokens: int
    documents: int
    counted: int
    text_bytes: int
    largest_id: int
    token_bytes: int
    has_mask: bool
    fingerprint: str


@dataclass(frozen=True)
class ShardSet:
    """The tokens of one split: documents joined, each with the end-of-text token behind it.

    name:           for messages, such as ``training split of notes.txt``.
    tokens:         [tokens] uint16 or uint32, memory-mapped.
    document_ends:  [documents] int64; document i is tokens[document_ends[i − 1] :
                    document_ends[i]].
    counted:        [tokens] uint8, whether a token is a target of the loss; None: all are.
    document_mask:  whether loaders give document ids unless told otherwise.
    fingerprint:    a digest of tokens, ends and mask: equal content, equal fingerprint, wherever it
                    lies.
    """

    name: str
    tokens: NDArray[np.unsignedinteger[Any]]
    document_ends: NDArray[np.int64]
    counted: NDArray[np.uint8] | None
    eos_id: int
    vocab_size: int
    document_mask: bool
    header: SplitHeader

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_text_tokens(self) -> int:
        """Tokens without the end-of-text token of each document."""
        return self.num_tokens - self.num_documents

    @property
    def num_documents(self) -> int:
        return len(self.document_ends)

    @property
    def fingerprint(self) -> str:
        return self.header.fingerprint

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token, for bits per byte; 0 where the text is not known."""
        return self.header.text_bytes / max(1, self.header.tokens)

    def num_windows(self, sequence_length: int) -> int:
        """Windows that take every token but the first as a target once; the last is filled up."""
        return max(0, -(-(self.num_tokens - 1) // sequence_length))

    def document(self, index: int) -> NDArray[np.unsignedinteger[Any]]:
        """The ids of one document, its end-of-text token included."""
        start = int(self.document_ends[index - 1]) if index else 0
        return self.tokens[start : int(self.document_ends[index])]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ``ValueError`` where the largest id is beyond a model of ``vocab_size`` rows."""
        if self.header.largest_id >= vocab_size:
            where = int(np.argmax(self.tokens == self.header.largest_id))
            raise ValueError(
                f"{self.name}: token id {self.header.largest_id} (at position {where}) is outside "
                "the model's vocabulary of "
                f"{vocab_size} ids; expected vocab_size of at least {self.vocab_size}, the "
                "tokenizer's"
            )

    @classmethod
    def from_documents(
        cls,
        documents: Iterable[Sequence[int]],
        *,
        vocab_size: int,
        eos_id: int,
        counted: Iterable[Sequence[bool]] | None = None,
        document_mask: bool = False,
        name: str = "tokens in memory",
    ) -> "ShardSet":
        """A split in memory; ``documents`` bring their own end-of-text tokens."""
        pieces = [np.asarray(document, dtype="<u4") for document in documents]
        tokens = np.concatenate([np.empty(0, "<u4"), *pieces])
        ends = np.cumsum([len(piece) for piece in pieces], dtype=_DOCUMENT_DTYPE)
        mask = (
            None
            if counted is None
            else np.asarray([c for flags in counted for c in flags], dtype=np.uint8)
        )
        if mask is not None and len(mask) != len(tokens):
            raise ValueError(
                f"counted has {len(mask)} flags for {len(tokens)} tokens; expected one for each"
            )
        digest = hashlib.blake2b(tokens.tobytes(), digest_size=16)
        digest.update(ends.tobytes() + (b"" if mask is None else mask.tobytes()))
        header = SplitHeader(
            tokens=len(tokens),
            documents=len(pieces),
            counted=len(tokens) if mask is None else int(mask.sum()),
            text_bytes=0,
            largest_id=int(tokens.max(initial=0)),
            token_bytes=4,
            has_mask=mask is not None,
            fingerprint=digest.hexdigest(),
        )
        return cls(name, tokens, ends, mask, eos_id, vocab_size, document_mask, header)


class SplitWriter:
    """Writes one split document by document; a context that flushes to the disk at its end."""

    def __init__(self, folder: Path, split: str, vocab_size: int, has_mask: bool) -> None:
        self._paths = _paths(folder, split)
        self._dtype = token_dtype(2 if vocab_size <= 1 << 16 else 4)
        self._has_mask = has_mask
        self._digests = [hashlib.blake2b(digest_size=16) for _ in self._paths]
        self._files: list[BinaryIO] = []
        self.tokens = self.documents = self.counted = self.text_bytes = 0
        self._largest_id = 0

    def __enter__(self) -> "SplitWriter":
        self._files = [
            path.open("wb") for path in (self._paths if self._has_mask else self._paths[:2])
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files:
            file.flush()
            file.close()

    def add(
        self, ids: NDArray[np.uint32], counted: NDArray[np.uint8] | None, text_bytes: int
    ) -> None:
        """Append a document, its end-of-text token included; ``counted`` None: all counts."""
        self.tokens += len(ids)
        self.documents += 1
        self.counted += len(ids) if counted is None else int(counted.sum())
        self.text_bytes += text_bytes
        self._largest_id = max(self._largest_id, int(ids.max(initial=0)))
        self._write(0, ids.astype(self._dtype).tobytes())
        self._write(1, np.asarray([self.tokens], _DOCUMENT_DTYPE).tobytes())
        if self._has_mask:
            self._write(2, (np.ones(len(ids), np.uint8) if counted is None else counted).tobytes())

    def header(self) -> SplitHeader:
        digest = hashlib.blake2b(b"".join(d.digest() for d in self._digests), digest_size=16)
        return SplitHeader(
            tokens=self.tokens,
            documents=self.documents,
            counted=self.counted,
            text_bytes=self.text_bytes,
            largest_id=self._largest_id,
            token_bytes=self._dtype.itemsize,
            has_mask=self._has_mask,
            fingerprint=digest.hexdigest(),
        )

    def _write(self, index: int, data: bytes) -> None:
        self._files[index].write(data)
        self._digests[index].update(data)


def token_dtype(token_bytes: int) -> np.dtype[Any]:
    """The type of a token of 2 or 4 bytes on disk."""
    return np.dtype({2: "<u2", 4: "<u4"}[token_bytes])


def open_split(
    folder: Path,
    split: str,
    header: SplitHeader,
    *,
    name: str,
    eos_id: int,
    vocab_size: int,
    document_mask: bool,
) -> ShardSet:
    """Map what ``SplitWriter`` wrote; ``ValueError`` where a file is not of the header's size."""
    tokens, documents, counted = _paths(folder, split)
    return ShardSet(
        name=name,
        tokens=_map(tokens, token_dtype(header.token_bytes), header.tokens),
        document_ends=_map(documents, _DOCUMENT_DTYPE, header.documents),
        counted=_map(counted, np.dtype(np.uint8), header.tokens) if header.has_mask else None,
        eos_id=eos_id,
        vocab_size=vocab_size,
        document_mask=document_mask,
        header=header,
    )


def header_to_dict(header: SplitHeader) -> dict[str, Any]:
    return asdict(header)


def _paths(folder: Path, split: str) -> tuple[Path, Path, Path]:
    return (
        folder / f"{split}.tokens.bin",
        folder / f"{split}.documents.bin",
        folder / f"{split}.counted.bin",
    )


def _map(path: Path, dtype: np.dtype[Any], length: int) -> NDArray[Any]:
    expected = length * dtype.itemsize
    found = path.stat().st_size if path.is_file() else -1
    if found != expected:
        state = "is missing" if found < 0 else f"has {found} bytes"
        raise ValueError(
            f"{path} {state}; expected {expected} bytes; delete the folder {path.parent} and "
            "prepare again"
        )
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r", shape=(length,)) if length else np.empty(0, dtype)
