"""Folders that are whole or not there."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dualflow.checkpoint.atomic import atomic_folder, previous, write_atomic
from dualflow.checkpoint.locate import find_model_folder

ANY = {"replaceable": lambda folder: (folder / "config.json").exists()}


def fill(folder: Path, text: str) -> None:
    with atomic_folder(folder, **ANY) as temporary:
        (temporary / "config.json").write_text(text)
        (temporary / "data").mkdir()
        (temporary / "data" / "a").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_written_with_its_parents_and_replaced_whole(tmp_path):
    target = tmp_path / "a" / "b"
    fill(target, "one")
    (target / "left over").write_text("x")
    fill(target, "two")
    assert names(target) == ["config.json", "data"]
    assert (target / "data" / "a").read_text() == "two"
    assert names(target.parent) == ["b"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_folder_and_no_rubbish(tmp_path, error):
    fill(tmp_path / "model", "old")
    with pytest.raises(error), atomic_folder(tmp_path / "model", **ANY) as temporary:
        (temporary / "config.json").write_text("new")
        raise error
    assert (tmp_path / "model" / "config.json").read_text() == "old"
    assert names(tmp_path) == ["model"]


def test_other_peoples_folders_and_files_are_not_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(ValueError, match="holds something else"):
        fill(tmp_path / "thesis", "new")
    with pytest.raises(ValueError, match="is a file"):
        fill(tmp_path / "thesis" / "chapter.txt", "new")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "model").mkdir()
    fill(tmp_path / "model", "new")
    assert (tmp_path / "model" / "config.json").read_text() == "new"


def test_a_link_to_a_folder_is_written_through(tmp_path):
    fill(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    fill(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "config.json").read_text() == "new"


def test_a_death_between_the_two_renames_loses_nothing(tmp_path):
    target = tmp_path / "model"
    fill(target, "old")
    target.rename(previous(target))
    assert (find_model_folder(target) / "config.json").read_text() == "old"
    with pytest.raises(RuntimeError), atomic_folder(target, **ANY):
        raise RuntimeError
    assert (target / "config.json").read_text() == "old"
    fill(target, "new")
    previous(target).mkdir()  # a death after the second rename: the old folder is still there
    fill(target, "newer")
    assert (target / "config.json").read_text() == "newer"
    assert names(tmp_path) == ["model"]


def test_only_old_left_overs_are_swept(tmp_path):
    old, young = tmp_path / ".model.tmp-0000", tmp_path / ".model.tmp-1111"
    old.mkdir()
    young.mkdir()
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    fill(tmp_path / "model", "x")
    assert names(tmp_path) == [".model.tmp-1111", "model"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "latest"
    write_atomic(path, lambda temporary: temporary.write_text("one"))

    def fail(temporary: Path) -> None:
        temporary.write_text("tw")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomic(path, fail)
    assert path.read_text() == "one"
    assert names(tmp_path) == ["latest"]


KILLED = """
import sys
from pathlib import Path
from dualflow.checkpoint.atomic import atomic_folder
number = 0
while True:
    with atomic_folder(sys.argv[1], replaceable=lambda folder: True) as temporary:
        for name in ("config.json", "b", "c"):
            (temporary / name).write_text(str(number))
    number += 1
    print(number, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_writer_leaves_a_whole_folder(tmp_path):
    target = tmp_path / "model"
    for delay in (0.002, 0.011):
        writer = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(target)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        found = find_model_folder(target)
        contents = {(found / name).read_text() for name in ("config.json", "b", "c")}
        assert len(contents) == 1


def test_a_failed_write_names_the_file_that_people_know(tmp_path):
    def fail(temporary: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space") as caught:
        write_atomic(tmp_path / "latest", fail)
    assert caught.value.filename == str(tmp_path / "latest")
