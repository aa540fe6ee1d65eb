"""What is refused of a request before any model is looked at."""

from typing import Any

import pytest

from dualflow.engine import RequestError, RequestParams, StructuredOutput


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": "abc"},
        {"stop": None},
        {"stop": b"abc"},
        {"stop": 5},
        {"stop_ids": None},
        {"stop_ids": 5},
        {"allowed_ids": "ab"},
        {"allowed_ids": 5},
        {"logit_bias": None},
        {"logit_bias": [(1, 2.0)]},
        {"aux": "exact"},
        {"aux": None},
        {"structured": "json"},
        {"structured": {"type": "object"}},
        {"ignore_eos": "no"},
        {"ignore_eos": None},
    ],
    ids=str,
)
def test_a_value_of_another_type_is_named_with_what_is_expected(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(RequestError, match=f"^{name} is .*; expected "):
        RequestParams(**fields)


@pytest.mark.parametrize("value", [None, {"type": "object"}, b"{}"])
def test_the_source_of_a_shape_is_a_text(value: Any) -> None:
    with pytest.raises(RequestError, match="expected a text"):
        StructuredOutput("json_schema", value)
