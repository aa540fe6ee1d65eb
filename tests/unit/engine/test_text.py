"""One output's text: stop strings that count only after so many tokens, and what is held back."""

import pytest

from dualflow.data.detokenize import TokenTexts
from dualflow.data.tokenizers import bytes_tokenizer
from dualflow.engine.text import TextStream

TEXTS = TokenTexts(bytes_tokenizer())


def write(text: str, *stop: str, min_tokens: int = 0) -> tuple[str, str | None]:
    """The text that is made from the bytes of ``text``, and the stop string that ended it."""
    stream = TextStream(TEXTS, stop, (), min_tokens)
    made = ""
    for token in text.encode():
        made += stream.push(token)
        if stream.stopped is not None:
            break
    return made + stream.finish(), stream.stopped


@pytest.mark.parametrize(
    ("stop", "min_tokens", "made", "found"),
    [
        ("bc", 0, "a", "bc"),
        ("bc", 2, "abcdabcd"[:5], "bc"),
        ("bc", 3, "abcda", "bc"),
        ("da", 4, "abcdabcd", None),
        ("cd", 6, "abcdab", "cd"),
        ("d", 8, "abcdabcd", None),
    ],
)
def test_stop_strings_begin_behind_min_tokens(
    stop: str, min_tokens: int, made: str, found: str | None
) -> None:
    assert write("abcdabcd", stop, min_tokens=min_tokens) == (made, found)


def test_nothing_is_held_back_before_stop_strings_count() -> None:
    stream = TextStream(TEXTS, ("aaaa",), (), 3)
    assert [stream.push(97) for _ in range(5)] == ["a", "a", "a", "", ""]
    assert stream.finish() == "aa"


def test_characters_are_whole() -> None:
    stream = TextStream(TEXTS, (), (), 1)
    assert [stream.push(byte) for byte in "€".encode()] == ["", "", "€"]
    assert stream.push(0xE2) + stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None)
    assert stream.push(97) + stream.finish() == ""
    assert stream.stopped is None
