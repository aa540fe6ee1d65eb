"""Lines of a batch: what they mean, and what is told of those that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest

from dualflow.cli.batch_input import BadLinesError, BatchRequest, read_requests
from dualflow.engine.request import RequestParams

DEFAULTS = {"temperature": 0.8, "max_tokens": 9}


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "in.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def read(folder: Path, *lines: Any, salt: str = "", **defaults: Any) -> list[BatchRequest]:
    return read_requests(write(folder, *lines), {**DEFAULTS, **defaults}, salt)


def problems(folder: Path, *lines: Any) -> list[tuple[int, str]]:
    with pytest.raises(BadLinesError) as found:
        read(folder, *lines)
    return found.value.problems


def test_prompts_of_three_kinds_and_numbers_of_lines(tmp_path: Path):
    messages = [{"role": "user", "content": "c"}]
    requests = read(
        tmp_path, {"prompt": "a", "id": "x"}, "", {"prompt_ids": [1, 2]}, {"messages": messages}
    )
    assert [(r.line, r.id, r.kind, r.prompt) for r in requests] == [
        (1, "x", "prompt", "a"), (3, None, "prompt_ids", [1, 2]), (4, None, "messages", messages),
    ]  # fmt: skip
    assert [request.key for request in requests] == [("id", "x"), ("line", 3), ("line", 4)]


def test_options_are_defaults_that_a_line_may_change(tmp_path: Path):
    first, second = read(tmp_path, {"prompt": "a"}, {"prompt": "a", "temperature": 0, "n": 2})
    assert first.params == RequestParams(temperature=0.8, max_tokens=9)
    assert second.params == RequestParams(temperature=0, max_tokens=9, n=2)


def test_every_line_has_a_seed_of_its_own_made_of_the_options_seed(tmp_path: Path):
    lines = [{"prompt": "a"}, {"prompt": "a"}, {"prompt": "a", "seed": 5}]
    seeds = [request.params.seed for request in read(tmp_path, *lines, seed=1)]
    assert seeds[2] == 5
    assert len({*seeds}) == 3
    assert seeds == [request.params.seed for request in read(tmp_path, *lines, seed=1)]
    assert seeds[0] != read(tmp_path, *lines, seed=2)[0].params.seed
    assert read(tmp_path, *lines)[0].params.seed is None


def test_the_hash_is_of_all_that_decides_the_result(tmp_path: Path):
    def hash_of(line: dict[str, Any], **settings: Any) -> str:
        return read(tmp_path, line, **settings)[0].input_hash

    base = hash_of({"prompt": "a"})
    assert base == hash_of({"prompt": "a", "temperature": 0.8, "id": "x", "top_k": None})
    changed = {
        hash_of({"prompt": "b"}), hash_of({"prompt_ids": [97]}), hash_of({"prompt": "a", "n": 2}),
        hash_of({"prompt": "a"}, seed=1), hash_of({"prompt": "a"}, max_tokens=8),
        hash_of({"prompt": "a"}, salt="another model"),
    }  # fmt: skip
    assert len(changed) == 6 and base not in changed


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON (Expecting property name enclosed in double quotes at column 2)"),
        ("[1]", "expected a JSON object, found list"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' is there twice"),
        ({}, "found none; expected one of prompt, prompt_ids, messages"),
        ({"prompt": "a", "prompt_ids": [1]}, "found prompt and prompt_ids; expected one of"),
        ({"prompt": 3}, "prompt is 3; expected a text"),
        ({"prompt_ids": []}, "prompt_ids: expected a list of token ids, not empty"),
        ({"prompt_ids": [1.5]}, "prompt_ids: expected a list of token ids"),
        ({"prompt_ids": [True]}, "prompt_ids: expected a list of token ids"),
        ({"messages": []}, "messages: expected a list, not empty"),
        ({"messages": ["hi"]}, "messages: expected a list, not empty, of objects"),
        ({"prompt": "a", "id": [1]}, "id is [1]; expected a text or a whole number"),
        ({"prompt": "a", "id": True}, "id is True; expected a text or a whole number"),
        ({"promt": "a"}, "there is no field 'promt'; did you mean 'prompt'?"),
        ({"prompt": "a", "top_p": 2}, "top_p is 2; expected a number above 0"),
        ('{"prompt": "a", "temperature": NaN}', "temperature is nan; expected"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_with_its_number(
    line: Any, message: str, tmp_path: Path
):
    ((number, problem),) = problems(tmp_path, {"prompt": "good"}, "", line)
    assert number == 3
    assert message in problem


def test_all_bad_lines_are_told_at_once(tmp_path: Path):
    found = problems(tmp_path, {"prompt": 1}, {"prompt": "good"}, {"prompt": 2})
    assert [number for number, _ in found] == [1, 3]


def test_an_id_belongs_to_one_line(tmp_path: Path):
    ((number, problem),) = problems(
        tmp_path, {"prompt": "a", "id": 1}, {"prompt": "b", "id": "1"}, {"prompt": "c", "id": 1}
    )
    assert (number, problem) == (3, "the id 1 is that of line 1 already")


def test_bytes_that_are_no_text_are_named(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(BadLinesError) as found:
        read_requests(path, {})
    assert found.value.problems == [(2, "not UTF-8: byte 12 is 0xff")]


def test_a_file_without_prompts_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="holds no prompts"):
        read(tmp_path, "", " ")
