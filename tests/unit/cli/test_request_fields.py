"""Plain values become parameters, or a message that names what is wrong."""

import json
from typing import Any

import pytest

from dualflow.cli.request_fields import build_params, field_names, merged
from dualflow.engine.request import AuxPolicy, RequestParams, StructuredOutput


def test_nothing_said_is_the_default():
    assert build_params({}) == RequestParams()
    assert build_params({"seed": None, "stop": None, "json": False}) == RequestParams()


def test_values_of_json_become_those_of_parameters():
    fields = json.loads(
        '{"stop": "x", "stop_ids": [3], "allowed_ids": [1, 2], "logit_bias": {"5": -1.5},'
        ' "aux": "threshold=0.9", "json": true, "temperature": 0, "n": 2, "logprobs": 3}'
    )
    assert build_params(fields) == RequestParams(
        stop=("x",), stop_ids=frozenset({3}), allowed_ids=frozenset({1, 2}), logit_bias={5: -1.5},
        aux=AuxPolicy("threshold", 0.9), structured=StructuredOutput("json"), temperature=0, n=2,
        logprobs=3,
    )  # fmt: skip


@pytest.mark.parametrize("schema", [{"type": "object"}, '{"type": "object"}'])
def test_a_schema_is_an_object_or_its_text(schema: Any):
    structured = build_params({"json_schema": schema}).structured
    assert structured is not None
    assert (structured.kind, json.loads(structured.value)) == ("json_schema", {"type": "object"})


@pytest.mark.parametrize(("name", "value"), [("regex", "a+"), ("grammar", 'root ::= "a"')])
def test_other_shapes_are_texts(name: Any, value: str):
    assert build_params({name: value}).structured == StructuredOutput(name, value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temprature": 1}, "no field 'temprature'; did you mean 'temperature'?"),
        ({"structured": {}}, "no field 'structured'"),
        ({"temperature": "hot"}, "temperature is 'hot'; expected a number"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; expected a whole number"),
        ({"aux": True}, "aux is True; expected a text"),
        ({"aux": "maybe"}, "aux is 'maybe'; expected on, off, exact"),
        ({"stop": 3}, "stop is 3; expected a list"),
        ({"stop": [""]}, "stop is"),
        ({"stop_ids": 3}, "stop_ids is 3; expected a list"),
        ({"stop_ids": [[1]]}, "stop_ids is [[1]]; expected a list of token ids"),
        ({"allowed_ids": ["a"]}, "allowed_ids names the token id 'a'"),
        ({"logit_bias": [1]}, "logit_bias is [1]; expected biases by token id"),
        ({"logit_bias": {"a": 1}}, "logit_bias names the token id 'a'"),
        ({"logit_bias": {"1": "x"}}, "logit_bias of token 1 is 'x'"),
        ({"ignore_eos": "yes"}, "ignore_eos is 'yes'; expected true or false"),
        ({"json": "yes"}, "json is 'yes'; expected true or false"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": 3}, "json_schema is 3; expected a JSON object"),
        ({"regex": 3}, "regex is 3; expected a text"),
        ({"regex": "a", "grammar": "b"}, "regex and grammar exclude each other"),
        ({"drafts": "many"}, "drafts is 'many'"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError) as found:
        build_params(fields)
    assert message in str(found.value)


def test_own_fields_are_laid_over_the_defaults():
    defaults = {"temperature": 0.8, "regex": "a", "seed": 1, "top_k": None}
    assert merged(defaults, {"temperature": 0, "seed": None}) == {
        "temperature": 0, "regex": "a", "seed": 1,
    }  # fmt: skip
    assert merged(defaults, {"json": True}) == {"temperature": 0.8, "seed": 1, "json": True}


def test_every_parameter_has_a_field_and_every_field_an_option():
    import argparse

    from dualflow.cli.request_options import add_request_options, request_fields

    parser = argparse.ArgumentParser()
    add_request_options(parser)
    words = "--stop a --stop-id 1 --allow-id 2 --logit-bias 1=2 --seed 1 --logprobs 1"
    args = parser.parse_args([*words.split(), "--prompt-logprobs", "1", "--regex", "a"])
    offered = request_fields(args).keys() | {"json", "json_schema", "grammar"}
    assert set(field_names()) - offered == {"priority"}  # which a single user has no use for
