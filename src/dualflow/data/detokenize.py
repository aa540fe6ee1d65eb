"""From token ids to text as they arrive: whole characters only, and never a piece of a stop string.

Whatever the split into tokens, the concatenated pieces equal the decoding of all ids at once.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

from dualflow.data.tokenizers import Tokenizer

_CONTEXT = 16
"""Ids decoded again before the new ones: rules for a text's first word must not hit each piece."""


class TokenTexts:
    """What streaming needs to know of a tokenizer: made once, shared by all requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        table = json.loads(tokenizer.to_json())
        self.byte_level = (table.get("decoder") or {}).get("type") == "ByteLevel"
        self.tokens = _tokens(table)

    @cached_property
    def token_bytes(self) -> dict[int, bytes]:
        """The bytes every id of a byte-level tokenizer stands for."""
        return {number: _token_bytes(token) for number, token in self.tokens.items()}


def _tokens(table: dict[str, Any]) -> dict[int, str]:
    vocab = table["model"][
        "vocab"
    ]  # a list of [token, score] in a Unigram model, a table in all others
    pairs = (
        vocab.items()
        if isinstance(vocab, dict)
        else ((entry[0], i) for i, entry in enumerate(vocab))
    )
    added = ((token["content"], token["id"]) for token in table.get("added_tokens", ()))
    return {number: token for token, number in (*pairs, *added)}


class StreamDetokenizer:
    """Turns one request's ids into text pieces, and ends at the first stop string.

    The text ends where a stop string is first complete; where several end at the same character,
    the longest counts. Text that may yet become a stop string is held back until that is decided.
    Special tokens (end of text and the like) and ids the tokenizer does not know give no text.

    texts:    the tokenizer's.
    stop:     stop strings; none is the default.
    context:  ids that precede the text and are not part of it, so that a tokenizer that treats the
              first word apart (SentencePiece drops its leading space) sees that the text continues
              a prompt. Byte-level tokenizers do not need it.

    Raises ``ValueError`` for an empty stop string.
    """

    def __init__(
        self, texts: TokenTexts, stop: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        self._stops = StopStrings(stop)
        self._special = texts.tokenizer.special_ids
        before = [token_id for token_id in context if token_id not in self._special]
        self._decoder: _Decoder = (
            _ByteLevelDecoder(texts) if texts.byte_level else _WindowDecoder(texts, before)
        )
        self._finished = False

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; None as long as there is none."""
        return self._stops.found

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` makes certain; often "". After a stop string always ""."""
        if self._finished:
            raise ValueError(
                "push after finish: this text has ended; a new text needs a new StreamDetokenizer"
            )
        if token_id in self._special:
            return ""
        return self._stops.push(self._decoder.push(token_id))

    def finish(self) -> str:
        """What was held back, once: half a character (as U+FFFD), the start of a stop string."""
        if self._finished:
            return ""
        self._finished = True
        return self._stops.push(self._decoder.finish()) + self._stops.finish()


class _Decoder(Protocol):
    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class _ByteLevelDecoder:
    """Tokens are strings of bytes; bytes that begin a character wait for the rest of it."""

    def __init__(self, texts: TokenTexts) -> None:
        self._bytes = texts.token_bytes
        self._pending = b""

    def push(self, token_id: int) -> str:
        data = self._pending + self._bytes.get(token_id, b"")
        whole = len(data) - _unfinished(data)
        self._pending = data[whole:]
        return data[:whole].decode("utf-8", "replace")

    def finish(self) -> str:
        rest, self._pending = self._pending, b""
        return rest.decode("utf-8", "replace")


def _unfinished(data: bytes) -> int:
    """How many bytes at the end of ``data`` begin a UTF-8 character without ending it (0 to 3)."""
    for count in range(1, min(3, len(data)) + 1):
        try:
            data[len(data) - count :].decode("utf-8")
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return count
    return 0


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins: printable Latin-1 characters are themselves, others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTES = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """A token with a character outside the alphabet was added as text, and stands for itself."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


class _WindowDecoder:
    """Any other tokenizer: decode a window of ids, and emit what the next id can no longer change.

    A character in progress shows as U+FFFD at the end of the window, or as byte tokens such as
    ``<0xE6>``, whose decoding depends on the whole run of them; both are held until something else
    follows.
    """

    def __init__(self, texts: TokenTexts, context: Sequence[int]) -> None:
        self._texts = texts
        self._done = list(context)[-_CONTEXT:]
        self._new: list[int] = []

    def push(self, token_id: int) -> str:
        token = self._texts.tokens.get(token_id)
        if token is None:
            return ""
        self._new.append(token_id)
        is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        text = "" if is_byte else self._text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        return self._commit(text)

    def finish(self) -> str:
        return self._commit(self._text())

    def _commit(self, text: str) -> str:
        self._done = (self._done + self._new)[-max(_CONTEXT, len(self._new)) :]
        self._new = []
        return text

    def _text(self) -> str:
        decode = self._texts.tokenizer.decode
        before = decode(self._done) if self._done else ""
        return decode(self._done + self._new)[len(before) :]


class StopStrings:
    """Finds the first completed stop string, character by character (Knuth, Morris, Pratt).

    ``push`` returns the text that can no longer become part of one; ``found`` is the one that ended
    the text. Raises ``ValueError`` for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise ValueError(f"stop is the text {stops!r}; expected a list of texts")
        for index, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise ValueError(
                    f"stop[{index}] is {stop!r}; expected a text of at least one character"
                )
        self.found: str | None = None
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> str:
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        for index in range(len(self._held) - len(text), len(self._held)):
            complete = self._advance(self._held[index])
            if complete:
                self.found = max(complete, key=len)
                safe, self._held = self._held[: index + 1 - len(self.found)], ""
                return safe
        keep = max(self._matched)
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def finish(self) -> str:
        rest, self._held = self._held, ""
        return rest

    def _advance(self, character: str) -> list[str]:
        complete: list[str] = []
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = borders[matched]
            matched += stop[matched] == character
            if matched == len(stop):
                complete.append(stop)
            self._matched[i] = matched
        return complete


def _borders(text: str) -> list[int]:
    """For each n the longest proper prefix of ``text[:n]`` that is also its suffix, as a length."""
    borders = [0, 0]
    for index in range(1, len(text)):
        length = borders[index]
        while length and text[length] != text[index]:
            length = borders[length]
        borders.append(length + (text[length] == text[index]))
    return borders
