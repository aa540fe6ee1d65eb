"""The results file: whole lines, each once, of what is asked for now."""

import json
from pathlib import Path
from typing import Any

import pytest

from dualflow.cli.batch_input import BatchRequest
from dualflow.cli.batch_output import ResultsFile, check_output
from dualflow.engine.request import RequestParams


def request(line: int, name: str | None = None, input_hash: str = "h") -> BatchRequest:
    return BatchRequest(
        line=line, id=name, kind="prompt", prompt="x", params=RequestParams(),
        input_hash=input_hash,
    )  # fmt: skip


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with results of lines 1 (good) and 2 (failed)."""
    path = tmp_path / "folder" / "out.jsonl"
    with ResultsFile(path, [request(1), request(2)]) as results:
        assert results.held.lines == frozenset()
        results.write(request(1), {"outputs": [{"text": "é"}]})
        results.write(request(2), {"error": "no luck"})
    return path


def test_a_line_for_every_result(path: Path):
    assert records(path) == [
        {"id": None, "line": 1, "input_hash": "h", "outputs": [{"text": "é"}]},
        {"id": None, "line": 2, "input_hash": "h", "error": "no luck"},
    ]


def test_what_is_there_stands_and_more_is_added(path: Path):
    before = path.read_bytes()
    with ResultsFile(path, [request(1), request(2), request(3)]) as results:
        assert (results.held.lines, results.held.failed) == (frozenset({1, 2}), 1)
        assert path.read_bytes() == before
        results.write(request(3), {"outputs": []})
    assert [record["line"] for record in records(path)] == [1, 2, 3]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_half_written_last_line_is_dropped(path: Path, cut: int):
    path.write_bytes(path.read_bytes()[:-cut])
    with ResultsFile(path, [request(1), request(2)]) as results:
        assert results.held.lines == {1}
        assert [record["line"] for record in records(path)] == [1]
        results.write(request(2), {"outputs": []})
    assert [record["line"] for record in records(path)] == [1, 2]


def test_results_of_changed_lines_are_removed_with_their_number_told(path: Path):
    with ResultsFile(path, [request(1), request(2, input_hash="other")]) as results:
        assert (results.held.lines, results.held.dropped) == (frozenset({1}), 1)
        results.write(request(2), {"outputs": []})
    assert [("error" in record) for record in records(path)] == [False, False]


def test_an_id_finds_its_line_wherever_it_stands(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    with ResultsFile(path, [request(1, "a")]) as results:
        results.write(request(1, "a"), {"outputs": []})
    with ResultsFile(path, [request(1, "b"), request(7, "a")]) as results:
        assert results.held.lines == {7}


def test_a_result_that_is_there_twice_counts_once(path: Path):
    path.write_bytes(path.read_bytes() + path.read_bytes())
    with ResultsFile(path, [request(1), request(2)]) as results:
        assert results.held.dropped == 2
    assert [record["line"] for record in records(path)] == [1, 2]


def test_errors_are_tried_again_where_asked_for(path: Path):
    with ResultsFile(path, [request(1), request(2)], retry_failed=True) as results:
        assert results.held.lines == {1}
        assert (results.held.retried, results.held.dropped) == (1, 0)
        results.write(request(2), {"outputs": []})
    assert ["outputs" in record for record in records(path)] == [True, True]


def test_results_of_other_requests_alone_are_never_replaced(path: Path):
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"holds 2 results, none of them of these prompts"):
        ResultsFile(path, [request(1, input_hash="other")])
    assert path.read_bytes() == before
    with ResultsFile(path, [request(1, input_hash="other")], overwrite=True) as results:
        assert results.held.lines == frozenset()
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "text", ["notes\n", "notes", '{"text": 1}', "[]\n", '{"line": 1}\n', '{"id": [], "line": 1}\n']
)
def test_another_file_is_never_written_to(tmp_path: Path, text: str):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match="its line 1 is no result of a batch"):
        ResultsFile(path, [request(1)])
    assert path.read_text() == text


def test_two_processes_do_not_write_at_once(path: Path):
    pytest.importorskip("fcntl")
    with (
        ResultsFile(path, [request(1), request(2)]),
        pytest.raises(ValueError, match="is being written by another process"),
    ):
        ResultsFile(path, [request(1), request(2)])
    ResultsFile(path, [request(1), request(2)]).__exit__(None, None, None)


def test_where_results_cannot_go_is_said_before(tmp_path: Path):
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    with pytest.raises(ValueError, match="the input itself"):
        check_output(tmp_path / "." / "in.jsonl", source)
    with pytest.raises(ValueError, match="a folder; expected a file"):
        check_output(tmp_path, source)
    check_output(tmp_path / "out.jsonl", source)
