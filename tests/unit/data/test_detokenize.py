"""Streaming text: whole characters, no stop text, the same text as decoding at once."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from dualflow.data.detokenize import StreamDetokenizer, TokenTexts
from dualflow.data.tokenizers import Tokenizer, bytes_tokenizer, train_bpe

TEXT = " Café 🌶日本語"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return bytes_tokenizer()


@pytest.fixture(scope="module")
def texts(tokenizer: Tokenizer) -> TokenTexts:
    return TokenTexts(tokenizer)


def pieces(stream: StreamDetokenizer, ids: list[int]) -> list[str]:
    return [*(stream.push(i) for i in ids), stream.finish()]


def test_every_piece_is_whole_characters_and_the_leading_space_is_kept(tokenizer, texts):
    got = pieces(StreamDetokenizer(texts), tokenizer.encode(TEXT))
    assert "".join(got) == TEXT
    assert not any("\ufffd" in piece for piece in got)
    assert got[0] == " "


@pytest.mark.parametrize("cut", range(1, len(TEXT.encode())))
def test_an_unfinished_character_is_flushed_once_at_the_end(tokenizer, texts, cut):
    ids = tokenizer.encode(TEXT)[:cut]
    stream = StreamDetokenizer(texts)
    assert "".join(pieces(stream, ids)) == tokenizer.decode(ids)
    assert stream.finish() == ""


def test_a_character_completed_later_never_shows_as_a_replacement_sign(tokenizer, texts):
    stream = StreamDetokenizer(texts)
    assert [stream.push(i) for i in tokenizer.encode("日!")] == ["", "", "日", "!"]


def test_invalid_bytes_show_as_decoding_at_once_shows_them(tokenizer, texts):
    for data in (
        b"\xff",
        b"a\x80b",
        b"\xe6\x97A",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xf0\x9f\x8c",
    ):
        ids = list(data)  # of the byte tokenizer, id = byte
        assert "".join(pieces(StreamDetokenizer(texts), ids)) == tokenizer.decode(ids)


def test_special_tokens_and_padding_ids_give_no_text(tokenizer, texts):
    first, last = tokenizer.encode("日")[:1], tokenizer.encode("日")[1:]
    ids = [*first, tokenizer.eos_id, 100_000, *last]
    assert "".join(pieces(StreamDetokenizer(texts), ids)) == "日"


def test_plain_tokens_added_to_a_byte_level_vocabulary_stand_for_themselves():
    backend = Backend.from_str(bytes_tokenizer().to_json())
    backend.add_tokens(["日本", "<|x y|>"])
    tokenizer = Tokenizer(backend)
    ids = [i for name in ("日本", "<|x y|>") if (i := tokenizer.id_of(name)) is not None]
    assert pieces(StreamDetokenizer(TokenTexts(tokenizer)), [0xE6, *ids])[1:] == [
        "\ufffd日本",
        "<|x y|>",
        "",
    ]


def test_a_stop_string_over_several_tokens_is_never_emitted(tokenizer, texts):
    stream = StreamDetokenizer(texts, ["lo wor"])
    got = pieces(stream, tokenizer.encode("hello world"))
    assert "".join(got) == "hel"
    assert stream.stopped == "lo wor"


def test_a_stop_string_that_begins_and_ends_inside_tokens(tokenizer):
    bpe = train_bpe(["hello world and more " * 50], 270)
    ids = bpe.encode("hello world and more")
    assert len(ids) < len("hello world and more")
    stream = StreamDetokenizer(TokenTexts(bpe), ["llo wo"])
    assert "".join(pieces(stream, ids)) == "he"
    assert stream.stopped == "llo wo"


def test_a_near_miss_is_released(tokenizer, texts):
    stream = StreamDetokenizer(texts, ["aab"])
    assert pieces(stream, tokenizer.encode("xaaac")) == ["x", "", "", "a", "aac", ""]
    assert stream.stopped is None


def test_a_near_miss_that_is_the_start_of_a_match_is_not_released(tokenizer, texts):
    stream = StreamDetokenizer(texts, ["aab"])
    assert "".join(pieces(stream, tokenizer.encode("aaaab"))) == "aa"


def test_of_two_stop_strings_the_first_to_be_complete_ends_the_text(tokenizer, texts):
    for stops in (["END", "END OF"], ["END OF", "END"]):
        stream = StreamDetokenizer(texts, stops)
        assert "".join(pieces(stream, tokenizer.encode("the END OF it"))) == "the "
        assert stream.stopped == "END"


def test_of_stop_strings_that_end_together_the_longest_counts(tokenizer, texts):
    stream = StreamDetokenizer(texts, ["\n", "}\n"])
    assert "".join(pieces(stream, tokenizer.encode("x}\ny"))) == "x"
    assert stream.stopped == "}\n"


def test_a_stop_string_complete_at_the_very_last_token(tokenizer, texts):
    stream = StreamDetokenizer(texts, ["!"])
    assert pieces(stream, tokenizer.encode("hi!")) == ["h", "i", "", ""]
    assert stream.stopped == "!"


def test_what_a_stop_string_held_back_is_given_out_at_the_end(tokenizer, texts):
    stream = StreamDetokenizer(texts, ["END OF FILE"])
    assert pieces(stream, tokenizer.encode("the END"))[-1] == "END"
    assert stream.stopped is None


def test_nothing_follows_a_stop_string(tokenizer, texts):
    stream = StreamDetokenizer(texts, ["."])
    assert "".join(pieces(stream, tokenizer.encode("one. two."))) == "one"


def test_no_stop_strings_hold_nothing_back(tokenizer, texts):
    assert pieces(StreamDetokenizer(texts, []), tokenizer.encode("abc")) == ["a", "b", "c", ""]


@pytest.mark.parametrize("stop", [[""], ["a", ""], "abc", [None]])
def test_an_empty_stop_string_or_one_text_for_a_list_is_refused(texts, stop):
    with pytest.raises(ValueError, match="stop"):
        StreamDetokenizer(texts, stop)


def test_a_finished_stream_takes_no_more_ids(texts):
    stream = StreamDetokenizer(texts)
    stream.finish()
    with pytest.raises(ValueError, match="after finish"):
        stream.push(65)


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """As Llama 2 has it: words begin with a mark, unknown characters are byte tokens, the first
    space is dropped.
    """
    names = [
        "</s>",
        "▁",
        "▁hello",
        "▁world",
        "ly",
        "!",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    vocab = {name: i for i, name in enumerate(names)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="</s>"))
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


def ids_of(tokenizer: Tokenizer, *names: str) -> list[int]:
    found = [tokenizer.id_of(name) for name in names]
    return [i for i in found if i is not None]


def test_sentencepiece_keeps_the_space_between_prompt_and_text(sentencepiece):
    prompt, new = ids_of(sentencepiece, "▁hello"), ids_of(sentencepiece, "▁world", "ly", "!")
    stream = StreamDetokenizer(TokenTexts(sentencepiece), context=prompt)
    assert pieces(stream, new) == [" world", "ly", "!", ""]


def test_sentencepiece_without_a_prompt_drops_the_first_space_as_decoding_at_once_does(
    sentencepiece,
):
    ids = ids_of(sentencepiece, "▁hello", "▁world", "▁hello") * 20
    got = "".join(pieces(StreamDetokenizer(TokenTexts(sentencepiece)), ids))
    assert got == sentencepiece.decode(ids)


def test_byte_tokens_are_held_until_their_run_ends(sentencepiece):
    run = ids_of(sentencepiece, "<0xE6>", "<0x97>", "<0xA5>")
    ids = [*ids_of(sentencepiece, "▁hello"), *run, *ids_of(sentencepiece, "!"), *run, *run[:1]]
    got = pieces(StreamDetokenizer(TokenTexts(sentencepiece)), ids)
    assert got[:5] == ["hello", "", "", "", "日!"]
    assert "".join(got) == sentencepiece.decode(ids)
