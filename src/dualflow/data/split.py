"""Which documents are held out: decided by hashes, so the same everywhere. No torch here."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dualflow.data.documents import Document
from dualflow.data.sources import Source

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class Survey:
    """A hash and a length in characters for each document of a source that is not empty."""

    hashes: NDArray[np.uint64]
    sizes: NDArray[np.int64]
    all_plain: bool

    @property
    def characters(self) -> int:
        return int(self.sizes.sum())


@dataclass(frozen=True)
class SplitRule:
    """What is held out.

    last_hash:  documents with a hash of at most this.
    cut:        of the only document, what stands behind about this character.
    """

    last_hash: int = -1
    cut: int | None = None

    def apply(self, documents: Iterator[Document]) -> Iterator[tuple[Document, Split]]:
        """Each document with its split; the order stays."""
        for document in documents:
            if self.cut is not None:
                text = document.segments[0].text
                at = _line_start(text, self.cut)
                yield Document.plain(text[:at]), "train"
                yield Document.plain(text[at:]), "validation"
            else:
                yield document, "validation" if document.split_hash <= self.last_hash else "train"


def filled_documents(source: Source) -> Iterator[Document]:
    """The source's documents without the empty ones."""
    return (document for document in source.documents() if document.num_characters)


def survey(source: Source) -> Survey:
    """Read the source once. Raises what the source raises."""
    hashes: list[int] = []
    sizes: list[int] = []
    all_plain = True
    for document in filled_documents(source):
        hashes.append(document.split_hash)
        sizes.append(document.num_characters)
        all_plain = all_plain and document.is_plain
    return Survey(np.array(hashes, np.uint64), np.array(sizes, np.int64), all_plain)


def choose_split(seen: Survey, fraction: float) -> SplitRule:
    """Hold out the documents of lowest hash that come nearest to ``fraction`` of all characters.

    At least one is held out, and not all. A single text is cut instead, at a line near its last
    ``fraction``; a single chat is not held out.
    """
    if fraction == 0 or not len(seen.hashes):
        return SplitRule()
    if len(seen.hashes) == 1:
        cut = round(seen.characters * (1 - fraction))
        return SplitRule(cut=cut) if seen.all_plain and 0 < cut < seen.characters else SplitRule()
    hashes, first = np.unique(
        seen.hashes[(order := np.argsort(seen.hashes, kind="stable"))], return_index=True
    )
    if len(hashes) == 1:
        return SplitRule()
    # Characters of the documents up to each hash; the last is left to training.
    held_out = np.add.reduceat(seen.sizes[order], first).cumsum()[:-1]
    nearest = int(np.abs(held_out - fraction * seen.characters).argmin())
    return SplitRule(last_hash=int(hashes[nearest]))


def sample_limit(seen: Survey, rule: SplitRule, characters: int) -> int:
    """The highest hash of the training documents that come first, up to ``characters``."""
    order = np.argsort(seen.hashes, kind="stable")
    hashes, sizes = seen.hashes[order], seen.sizes[order]
    start = (
        int(np.searchsorted(hashes, np.uint64(rule.last_hash), side="right"))
        if rule.last_hash >= 0
        else 0
    )
    stop = start + int(np.searchsorted(sizes[start:].cumsum(), characters, side="left"))
    return int(hashes[min(stop, len(hashes) - 1)])


def _line_start(text: str, cut: int) -> int:
    """The start of a line soon behind ``cut``; ``cut`` where none starts in the half behind it."""
    found = text.find("\n", cut, cut + (len(text) - cut) // 2)
    return cut if found < 0 else found + 1
