"""Run folders are read strictly: every fault is one line that names the file."""

import json
from pathlib import Path

import pytest

from dualflow.evaluate.runs import RunError, read_run, read_runs
from tests.unit.evaluate.run_folders import change_json, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "dual-seed3", variant="dual", seed=3, loss_p=2.5, loss_q=2.25)


def refused(folder: Path) -> str:
    with pytest.raises(RunError) as caught:
        read_run(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_whole_run(folder: Path):
    run = read_run(folder)
    result = run.result
    assert (result.name, result.variant, result.seed) == ("dual-seed3", "dual", 3)
    assert (result.val_loss, result.val_loss_p, result.val_loss_q) == (2.0, 2.5, 2.25)
    assert [(point.tokens, point.loss) for point in run.curve] == [(100, 3.0), (200, 2.0)]
    assert run.config["train"]["steps"] == 10


def test_the_result_ends_the_curve(folder: Path):
    change_json(folder / "result.json", val_loss=1.75)
    assert [(point.tokens, point.loss) for point in read_run(folder).curve] == [
        (100, 3.0),
        (200, 1.75),
    ]
    change_json(folder / "result.json", tokens=250)
    assert [point.tokens for point in read_run(folder).curve] == [100, 200, 250]


def test_a_run_without_validations_has_its_end(folder: Path):
    (folder / "metrics.jsonl").write_text("\n")
    assert [point.tokens for point in read_run(folder).curve] == [200]


def test_a_missing_folder(tmp_path: Path):
    assert "no such run folder" in refused(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_a_missing_file(folder: Path, name: str):
    (folder / name).unlink()
    assert str(folder / name) in refused(folder)


def test_an_unfinished_run(folder: Path):
    (folder / "result.json").unlink()
    message = refused(folder)
    assert "result.json is missing" in message
    assert "has not ended" in message


@pytest.mark.parametrize("name", ["config.json", "result.json"])
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a JSON list"),
        ("[" * 100_000, "not valid JSON"),
        ("\ufffe", "not valid JSON"),
    ],
)
def test_malformed_json(folder: Path, name: str, text: str, fault: str):
    (folder / name).write_text(text, encoding="utf-8")
    message = refused(folder)
    assert str(folder / name) in message
    assert fault in message


def test_bytes_that_are_no_text(folder: Path):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8" in refused(folder)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("name", 7, "name is 7; expected text"),
        ("name", "a\x1b[2Jb", "expected printable text on one line"),
        ("seed", "0", "seed is '0'; expected a whole number"),
        ("tokens", 1.5, "tokens is 1.5; expected a whole number"),
        ("tokens", True, "tokens is True; expected a whole number"),
        ("tokens", 0, "tokens is 0; expected more than 0"),
        ("tokens", 2**63, "expected a whole number of at most 64 bits"),
        ("val_loss", None, "val_loss is None; expected a number"),
        ("val_loss", float("nan"), "expected a finite number"),
        ("val_loss_p", "2", "val_loss_p is '2'; expected a number or null"),
        ("train_flops_per_token", 0, "expected more than 0"),
    ],
)
def test_wrong_values_in_the_result(folder: Path, key: str, value: object, expected: str):
    change_json(folder / "result.json", **{key: value})
    message = refused(folder)
    assert str(folder / "result.json") in message
    assert expected in message


def test_a_missing_key(folder: Path):
    result = json.loads((folder / "result.json").read_text())
    del result["kv_bytes_per_token"]
    (folder / "result.json").write_text(json.dumps(result))
    assert "kv_bytes_per_token is missing" in refused(folder)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"kind": "valid', "not valid JSON"),
        ('{"kind": "validation", "tokens": 150}', "loss is missing"),
        (
            '{"kind": "validation", "tokens": 150, "loss": null, "loss_p": null, "loss_q": null}',
            "loss is None",
        ),
        (
            '{"kind": "validation", "tokens": 200, "loss": 1, "loss_p": null, "loss_q": null}',
            "a validation at 200 tokens follows one at 200",
        ),
        (
            '{"kind": "validation", "tokens": 999, "loss": 1, "loss_p": null, "loss_q": null}',
            "the run ended at 200",
        ),
    ],
)
def test_a_faulty_line_of_metrics(folder: Path, line: str, fault: str):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    message = refused(folder)
    assert "metrics.jsonl, line 4" in message
    assert fault in message


def test_folders_of_runs_are_opened_and_repeats_read_once(tmp_path: Path):
    first = write_run(tmp_path / "demo" / "a-seed0")
    write_run(tmp_path / "demo" / "a-seed1", seed=1)
    (tmp_path / "demo" / "plots").mkdir()
    runs = read_runs([tmp_path / "demo", first, first / ".." / "a-seed0"])
    assert [run.result.name for run in runs] == ["a-seed0", "a-seed1"]


def test_the_folder_of_an_earlier_comparison_is_passed_over(tmp_path: Path):
    run = write_run(tmp_path / "a")
    (tmp_path / "compare").mkdir()
    (tmp_path / "compare" / "compare.json").write_text("[]")
    assert len(read_runs([run, tmp_path / "compare"])) == 1
    with pytest.raises(RunError, match="no run to read"):
        read_runs([tmp_path / "compare"])


def test_a_folder_that_is_neither(tmp_path: Path):
    with pytest.raises(RunError, match="neither a run folder"):
        read_runs([tmp_path])
