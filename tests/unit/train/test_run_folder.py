import getpass
import json
import multiprocessing
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dualflow.train.config import RunConfig
from dualflow.train.run_folder import (
    RunFolder,
    claim,
    environment,
    held,
    read_metrics,
    truncate_metrics,
    write_records,
)

TinyRun = Callable[..., RunConfig]
CPU = torch.device("cpu")


@pytest.fixture
def begun(tmp_path: Path, tiny_run: TinyRun) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    write_records(folder, tiny_run(), CPU, 1, resumed=False)
    return folder


def test_a_new_run_takes_an_empty_place(tmp_path: Path) -> None:
    assert claim(RunFolder(tmp_path / "none"), resume=False, overwrite=False) is False
    (tmp_path / "empty").mkdir()
    assert claim(RunFolder(tmp_path / "empty"), resume="auto", overwrite=False) is False


def test_an_unfinished_run_is_not_overwritten_and_the_message_says_what_to_do(
    begun: RunFolder,
) -> None:
    with pytest.raises(ValueError, match="unfinished run; continue it with `dualflow train --res"):
        claim(begun, resume=False, overwrite=False)
    assert claim(begun, resume=True, overwrite=False) is True
    assert claim(begun, resume="auto", overwrite=False) is True
    assert claim(begun, resume=False, overwrite=True) is False
    assert begun.is_run()  # claim itself changes nothing


def test_a_finished_run_is_not_overwritten(begun: RunFolder) -> None:
    begun.result.write_text("{}")
    with pytest.raises(ValueError, match="finished run; give this one another name"):
        claim(begun, resume=False, overwrite=False)


def test_overwriting_clears_the_old_run_only_when_the_new_one_starts(
    begun: RunFolder, tiny_run: TinyRun
) -> None:
    begun.metrics.write_text("old")
    assert claim(begun, resume=False, overwrite=True) is False
    assert begun.metrics.exists()
    write_records(begun, tiny_run(), CPU, 1, resumed=False)
    assert not begun.metrics.exists()


def test_what_is_not_a_run_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("text")
    for resume, overwrite in ((False, True), (True, False), ("auto", False)):
        with pytest.raises(ValueError, match="is not a run"):
            claim(RunFolder(tmp_path / "thesis"), resume=resume, overwrite=overwrite)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("text")
    with pytest.raises(ValueError, match="is not a run"):
        claim(RunFolder(tmp_path / "file"), resume=False, overwrite=True)


def test_resuming_nothing_is_an_error_unless_it_may_begin(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "none")
    with pytest.raises(ValueError, match="no run in .* to resume"):
        claim(folder, resume=True, overwrite=False)
    with pytest.raises(ValueError, match="exclude each other"):
        claim(folder, resume=True, overwrite=True)


def test_metrics_after_the_step_and_a_torn_line_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "train", "step": step, "loss": 1 / step}) for step in range(1, 9)]
    path.write_text("\n".join(lines) + '\n{"kind": "tra')
    truncate_metrics(path, 5)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert path.read_text() == "\n".join(lines[:5]) + "\n"
    truncate_metrics(tmp_path / "none.jsonl", 5)


def test_the_environment_names_versions_and_no_person_host_or_path() -> None:
    found = environment(CPU, 2)
    assert found["torch"] == torch.__version__
    assert found["ranks"] == 2
    assert {"dualflow", "python", "platform", "cpu", "threads", "commit", "started"} <= set(found)
    text = json.dumps(found)
    assert str(Path.home()) not in text
    assert str(Path.cwd()) not in text
    assert socket.gethostname() not in found["platform"].split("-")
    if getpass.getuser() != "root":
        assert getpass.getuser() not in text


def test_a_resumed_run_adds_to_its_environment(begun: RunFolder, tiny_run: TinyRun) -> None:
    first = json.loads(begun.environment.read_text())
    write_records(begun, tiny_run(), CPU, 1, resumed=True)
    write_records(begun, tiny_run(), CPU, 1, resumed=True)
    found = json.loads(begun.environment.read_text())
    assert found["started"] == first["started"]
    assert len(found["resumed"]) == 2


def _hold(path: str, connection) -> None:
    try:
        with held(RunFolder(path)):
            connection.send("held")
    except ValueError as error:
        connection.send(str(error))


def test_two_processes_cannot_train_the_same_run(tmp_path: Path) -> None:
    def other() -> str:
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        process = context.Process(target=_hold, args=(str(tmp_path / "run"), there))
        process.start()
        answer = here.recv()
        process.join()
        return answer

    with held(RunFolder(tmp_path / "run")):
        assert "being trained by another process" in other()
    assert other() == "held"
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_record_of_metrics_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = '{"kind": "train", "step": 1}\n'
    path.write_bytes(good.encode() + b'5\n{}\n{"step": "x"}\n\xff\xfe\n\n' + good.encode())
    truncate_metrics(path, 5)
    assert path.read_text() == good + good


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"steps": "many"}', "\x00"])
def test_a_damaged_result_is_named(tmp_path: Path, text: str) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_result() is None
    folder.result.write_text(text)
    with pytest.raises(ValueError, match=r"result\.json"):
        folder.read_result()


@pytest.mark.parametrize("text", ["{", "[]", '{"resumed": 3}'])
def test_a_damaged_environment_is_named(begun: RunFolder, tiny_run: TinyRun, text: str) -> None:
    begun.environment.write_text(text)
    with pytest.raises(ValueError, match=r"environment\.json"):
        write_records(begun, tiny_run(), CPU, 1, resumed=True)


def test_a_file_in_place_of_the_folder_of_runs_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with (
        pytest.raises(ValueError, match="runs is a file; expected the folder that runs go into"),
        held(RunFolder(tmp_path / "runs/a")),
    ):
        pass
