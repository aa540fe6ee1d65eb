"""A document: pieces of text, each with whether the loss counts it. No torch here."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a document.

    counted:  whether its tokens are targets of the loss.
    control:  ``text`` is the name of one control token; otherwise it is plain text, whatever it
              looks like.
    """

    text: str
    counted: bool = True
    control: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """One text, in pieces.

    split_key:  what decides its split: the relative path of a file; None: the content, so that
                equal rows never stand on both sides.
    """

    segments: tuple[Segment, ...]
    split_key: str | None = None

    @classmethod
    def plain(cls, text: str, split_key: str | None = None) -> "Document":
        """A document that is one text, all of it counted."""
        return cls((Segment(text),), split_key)

    @property
    def is_plain(self) -> bool:
        return len(self.segments) == 1 and self.segments[0].counted

    @property
    def num_characters(self) -> int:
        return sum(len(segment.text) for segment in self.segments if not segment.control)

    @property
    def num_bytes(self) -> int:
        return sum(
            len(segment.text.encode("utf-8")) for segment in self.segments if not segment.control
        )

    @property
    def split_hash(self) -> int:
        """64 bits that depend on nothing but ``split_key`` or the content."""
        key = "\0".join(s.text for s in self.segments) if self.split_key is None else self.split_key
        digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def chat_segments(messages: Iterable[tuple[str, str]]) -> tuple[Segment, ...]:
    """(role, content) pairs in ChatML. Counted: an assistant's content and the ``<|im_end|>`` that
    closes it.

    The assistant's header is a segment of its own, because generation starts right behind it; every
    other header is joined with its content. Content is always plain text: a control token typed by
    a user stays the characters it is.
    """
    segments: list[Segment] = []
    for role, content in messages:
        answers = role == "assistant"
        segments.append(Segment(IM_START, counted=False, control=True))
        if answers:
            segments += [Segment("assistant\n", counted=False), Segment(content)]
        else:
            segments.append(Segment(f"{role}\n{content}", counted=False))
        segments += [Segment(IM_END, counted=answers, control=True), Segment("\n", counted=False)]
    return tuple(segments)


def document_from_row(
    row: Mapping[str, Any], where: str, text_key: str, messages_key: str
) -> Document:
    """A row of a table: a chat where ``messages_key`` is filled, else plain text.

    ``where`` names the row in errors, such as ``chats.jsonl line 3``.
    """
    if row.get(messages_key) is not None:
        return Document(chat_segments(_messages(row[messages_key], where, messages_key)))
    text = row.get(text_key)
    if isinstance(text, str):
        return Document.plain(_whole(text, where))
    if text_key in row:
        raise ValueError(f"{where}: {text_key!r} is {type(text).__name__}; expected text")
    raise ValueError(
        f"{where}: found the columns {sorted(map(str, row))}, but neither {text_key!r} nor "
        f"{messages_key!r}; "
        "set text_key or messages_key"
    )


def _messages(value: Any, where: str, key: str) -> list[tuple[str, str]]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{where}: {key!r} is {type(value).__name__}; expected a list of messages")
    pairs: list[tuple[str, str]] = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise ValueError(
                f"{where}: message {number} is {type(message).__name__}; expected an object"
            )
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(
                f"{where}: message {number} has the role {role!r}; expected one of "
                f"{', '.join(ROLES)}"
            )
        if not isinstance(content, str):
            raise ValueError(
                f"{where}: message {number} has content of type {type(content).__name__}; expected "
                "text"
            )
        pairs.append((role, _whole(content, where)))
    return pairs


def _whole(text: str, where: str) -> str:
    """``text``, refused where half a character (a lone surrogate) makes it no Unicode text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: character {error.start} is a lone surrogate; expected Unicode text"
        ) from error
    return text
