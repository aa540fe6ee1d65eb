"""Any ids, any stop strings: the stream is the whole decoding, cut at the first completed stop
string.
"""

from hypothesis import example, given
from hypothesis import strategies as st

from dualflow.data.detokenize import StreamDetokenizer, TokenTexts
from dualflow.data.tokenizers import train_bpe

TOKENIZER = train_bpe(["def naïve(日本): return '🌶️ café' # the end, the END\n" * 30], 300)
TEXTS = TokenTexts(TOKENIZER)

token_ids = st.integers(0, TOKENIZER.vocab_size + 5)
# Bytes of and around multi-byte characters, so that broken and completed characters are both
# common.
edges = [
    TOKENIZER.id_of(name)
    for name in ("æ", "Ĺ", "¥", "ð", "Ł", "Į", "¶", "Ã", "©", "ÿ", "ï", "¿", "½")
]
id_lists = st.lists(token_ids | st.sampled_from([i for i in edges if i is not None]), max_size=40)


def decode_at_once(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special=True)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By brute force: the shortest prefix that ends with a stop string, without the longest that it
    ends with.
    """
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def stream(ids: list[int], stops: list[str]) -> tuple[list[str], str | None]:
    detokenizer = StreamDetokenizer(TEXTS, stops)
    pieces = [detokenizer.push(i) for i in ids]
    pieces.append(detokenizer.finish())
    return pieces, detokenizer.stopped


@given(id_lists)
def test_pieces_join_to_the_whole_decoding(ids):
    pieces, _ = stream(ids, [])
    assert "".join(pieces) == decode_at_once(ids)


@given(st.text(max_size=20))
def test_no_piece_of_valid_text_holds_part_of_a_character(text):
    pieces, _ = stream(TOKENIZER.encode(text), [])
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.data())
def test_stop_strings_cut_the_whole_decoding(data):
    ids = data.draw(id_lists)
    text = decode_at_once(ids)
    piece = st.builds(
        lambda i, n: text[i : i + n], st.integers(0, max(len(text) - 1, 0)), st.integers(1, 6)
    )
    stops = data.draw(st.lists((piece | st.text(min_size=1, max_size=4)).filter(bool), max_size=4))
    pieces, found = stream(ids, stops)
    assert ("".join(pieces), found) == cut(text, stops)


@given(
    st.lists(st.sampled_from("ab"), max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
)
@example(list("aaab"), ["aab"])
@example(list("ababac"), ["abac", "ba"])
def test_stop_strings_that_overlap_themselves_and_each_other(characters, stops):
    ids = TOKENIZER.encode("".join(characters))
    pieces, found = stream(ids, stops)
    assert ("".join(pieces), found) == cut("".join(characters), stops)


@given(st.data())
def test_nothing_is_held_longer_than_it_could_become_a_stop_string(data):
    text = data.draw(st.text("ab", max_size=30))
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
    detokenizer = StreamDetokenizer(TEXTS, stops)
    fed = emitted = ""
    for character in text:
        emitted += detokenizer.push(TOKENIZER.encode(character)[0])
        fed += character
        if detokenizer.stopped is not None:
            break
        held = fed[len(emitted) :]
        assert not held or any(stop.startswith(held) for stop in stops)
