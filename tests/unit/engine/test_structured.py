"""Structured output: what is sampled has its shape, and what cannot be used is refused."""

import json
import re
import sys
from typing import Any

import pytest
import torch

from dualflow.data.tokenizers import Tokenizer, bytes_tokenizer, train_bpe
from dualflow.engine.request import RequestError, RequestParams, StructuredOutput
from dualflow.engine.sampler import RequestSampler
from dualflow.engine.structured import ShapedText, StructuredOutputs
from dualflow.extras import MissingExtraError

pytest.importorskip("llguidance")

BYTES = bytes_tokenizer()
BPE = train_bpe(['{"name": "café", "age": 12, "tags": [true, null]} (日本)\n' * 30], 285)
V = 320  # more than either tokenizer has
SHAPES = {tokenizer: StructuredOutputs(tokenizer, V) for tokenizer in (BYTES, BPE)}

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dög"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def shape_of(kind: Any, value: Any = "") -> StructuredOutput:
    return StructuredOutput(kind, value if isinstance(value, str) else json.dumps(value))


def sample(tokenizer: Tokenizer, shape: StructuredOutput, seed: int) -> list[int]:
    """A text from random distributions at temperature 5, with its end."""
    sampler = RequestSampler(
        RequestParams(temperature=5.0, structured=shape), vocab_size=V,
        num_real_tokens=tokenizer.vocab_size, prompt_ids=[0], seed=seed,
        stop_ids=frozenset({tokenizer.eos_id}), grammar=SHAPES[tokenizer].start(shape),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    output: list[int] = []
    while tokenizer.eos_id not in output:
        assert len(output) < 3000
        token = sampler.choose(torch.randn(V, generator=generator).log_softmax(-1), output)
        sampler.accepted(token)
        output.append(token)
    return output


def texts(tokenizer: Tokenizer, shape: StructuredOutput, count: int = 12) -> list[str]:
    return [tokenizer.decode(sample(tokenizer, shape, seed)[:-1]) for seed in range(count)]


def ids_allowed(state: ShapedText, output: list[int]) -> list[int]:
    return state.allowed(output).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
class TestSampledText:
    def test_any_json_parses(self, tokenizer):
        for text in texts(tokenizer, shape_of("json")):
            json.loads(text)

    def test_a_schema_is_fulfilled(self, tokenizer):
        for text in texts(tokenizer, shape_of("json_schema", SCHEMA)):
            value = json.loads(text)
            assert set(value) <= set(SCHEMA["properties"])
            assert isinstance(value["name"], str)
            assert len(value["name"]) <= 8
            assert type(value["age"]) is int
            assert 0 <= value["age"] <= 120
            assert value["kind"] in ("cat", "dög")
            assert len(value.get("tags", [])) <= 3
            assert all(type(tag) is bool for tag in value.get("tags", []))

    def test_a_regular_expression_matches_as_a_whole(self, tokenizer):
        pattern = r"(ab|é[0-9]{2})+x?"
        for text in texts(tokenizer, shape_of("regex", pattern)):
            assert re.fullmatch(pattern, text)

    @pytest.mark.parametrize(
        "grammar",
        ['start: "(" start ")" | NAME\nNAME: /[a-zé]{1,3}/',
         'root ::= "(" root ")" | name\nname ::= [a-zé]{1,3}'],
        ids=["lark", "gbnf"],
    )  # fmt: skip
    def test_a_grammar_is_followed(self, tokenizer, grammar):
        for text in texts(tokenizer, shape_of("grammar", grammar)):
            depth = text.count("(")
            assert re.fullmatch("[a-zé]{1,3}", text[depth : len(text) - depth])
            assert text == "(" * depth + text.strip("()") + ")" * depth


def test_the_end_is_allowed_exactly_where_the_text_may_end():
    state = SHAPES[BYTES].start(shape_of("regex", "a|ab(c|)"))
    for text, complete in (("", False), ("a", True), ("ab", True), ("abc", True)):
        assert (BYTES.eos_id in ids_allowed(state, BYTES.encode(text))) == complete
        assert state.complete == complete
    assert ids_allowed(state, BYTES.encode("abc")) == [BYTES.eos_id]
    assert ids_allowed(state, [*BYTES.encode("a"), BYTES.eos_id]) == [BYTES.eos_id]


def test_other_control_tokens_end_the_text_where_they_stop_it():
    other = next(iter(BYTES.special_ids - {BYTES.eos_id}))
    state = SHAPES[BYTES].start(shape_of("regex", "a"), frozenset({other, ord("b")}))
    assert ids_allowed(state, []) == [ord("a")]
    assert ids_allowed(state, [ord("a")]) == sorted([BYTES.eos_id, other])
    assert ids_allowed(state, [ord("a"), other]) == sorted([BYTES.eos_id, other])


def test_a_text_that_is_taken_back_is_followed():
    shape = shape_of("json_schema", SCHEMA)
    output = sample(BYTES, shape, 3)
    state = SHAPES[BYTES].start(shape)
    for length in (5, len(output), 2, 0, len(output) - 1, 3):
        fresh = SHAPES[BYTES].start(shape)
        assert ids_allowed(state, output[:length]) == ids_allowed(fresh, output[:length])


def test_sequences_of_one_shape_do_not_disturb_each_other():
    shape = shape_of("regex", "[ab]c")
    one, two = SHAPES[BYTES].start(shape), SHAPES[BYTES].start(shape)
    assert ids_allowed(one, [ord("a")]) == [ord("c")]
    assert ids_allowed(two, []) == [ord("a"), ord("b")]


def test_tokens_that_do_not_follow_are_refused():
    state = SHAPES[BYTES].start(shape_of("regex", "ab"))
    with pytest.raises(RequestError, match="cannot go on with token 99"):
        state.accept(ord("c"))
    with pytest.raises(RequestError, match=f"cannot go on with token {BYTES.eos_id}: it is not"):
        SHAPES[BYTES].start(shape_of("regex", "ab")).accept(BYTES.eos_id)


def test_white_space_in_json_comes_to_an_end():
    state = SHAPES[BYTES].start(shape_of("json"))
    output = [ord("{")]
    while ord("\n") in ids_allowed(state, output):
        output.append(ord("\n"))
        assert len(output) < 50


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (shape_of("regex", "(a"), "regular expression cannot be used: .*unclosed group"),
        (shape_of("regex", r"[^\s\S]"), "no text has this shape"),
        (shape_of("regex", "a" * 300_000), "has 300,000 characters; expected at most 262,144"),
        (shape_of("json_schema", "{"), "JSON schema cannot be used: it is not JSON"),
        (shape_of("json_schema", [1]), "it is list, expected an object"),
        (shape_of("json_schema", "[" * 10_000), "it is not JSON"),
        (shape_of("json_schema", '{"multipleOf": Infinity}'), "JSON schema cannot be used"),
        (shape_of("json_schema", {"type": "strin"}), "Invalid type: strin"),
        (shape_of("json_schema", {"not": {}}), "Unimplemented keys"),
        (shape_of("json_schema", {"$ref": "#"}), "no text has this shape"),
        (shape_of("json_schema", {"$ref": "http://example.org"}), "JSON schema cannot be used"),
        (shape_of("json_schema", {"multipleOf": 1234567}), "multipleOf have the common multiple"),
        (
            shape_of("json_schema", {"allOf": [{"multipleOf": 9999}, {"multipleOf": 99.98}]}),
            "multipleOf have the common multiple",
        ),
        (shape_of("json_schema", {"a": [{"multipleOf": 1e-300}, {"multipleOf": 1}]}), "multipleOf"),
        (shape_of("grammar", "start: x"), "grammar cannot be used: .*unknown name"),
        (shape_of("grammar", "nonsense"), "grammar cannot be used"),
        (shape_of("grammar", ""), "grammar cannot be used"),
        (shape_of("grammar", 'start: %json {"multipleOf": 3}'), "multipleOf is not supported"),
        (shape_of("yaml", ""), "of kind 'yaml'; expected one of json_schema, json, regex, gramm"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_used_is_refused_in_one_line(shape, message):
    with pytest.raises(RequestError, match=message) as caught:
        SHAPES[BYTES].start(shape)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_multiples_of_small_numbers_can_be_used():
    state = SHAPES[BYTES].start(shape_of("json_schema", {"type": "number", "multipleOf": 0.25}))
    assert [ord(d) in ids_allowed(state, BYTES.encode("1.2")) for d in "0456"] == [
        False, False, True, False,
    ]  # fmt: skip


def test_a_tokenizer_without_bytes_is_refused():
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    shapes = StructuredOutputs(Tokenizer(words, "</s>"), 2)
    with pytest.raises(ValueError, match="structured output cannot use this tokenizer"):
        shapes.start(shape_of("json"))


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dualflow\[structured\]'"):
        StructuredOutputs(BYTES, V)
