"""``dualflow doctor``: tells what is amiss, and is well where nothing needed is broken."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dualflow.cli import doctor
from dualflow.cli.main import main
from dualflow.ops.native import build, library


@pytest.fixture
def broken_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an installed package that raises when it is imported."""
    name = "package_that_raises"
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('built for another\\nCUDA')")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_json_reports_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in report["checks"]}
    assert report["ok"] is True
    assert {"python", "threads", "devices", "kernels", "torch.compile", "disk", "network"} <= set(
        checks
    )
    assert {"transformers", "gguf", "llguidance"} <= set(doctor.OPTIONAL)
    assert set(doctor.CORE) | set(doctor.OPTIONAL) <= set(checks)
    assert checks["torch"]["status"] == "ok"


def test_text_names_the_extra_of_an_absent_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL", {"package_not_there": ("plot", "drawing")})
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "for drawing" in text
    assert "pip install 'dualflow[plot]'" in text


def test_a_raising_optional_package_counts_as_absent_with_a_note(broken_package: str) -> None:
    check = doctor.check_optional(broken_package, "plot", "drawing")
    assert check.status == "warning"
    assert "treated as absent (RuntimeError: built for another CUDA)" in check.detail
    assert "dualflow[plot]" in check.mend


def test_a_broken_core_package_exits_1(
    broken_package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CORE", {broken_package: "1.0"})
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "BROKEN" in text
    assert f"pip install --upgrade '{broken_package}>=1.0'" in text


def test_an_absent_core_package_is_reported_without_a_traceback() -> None:
    """Where even torch is gone, the doctor must still be able to say so."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['rich'] = None;"
        "from dualflow.cli.main import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stdout.count("BROKEN") == 2


@pytest.mark.parametrize(
    ("oldest", "status"), [("9.0", "ok"), ("9.2", "ok"), ("9.10", "broken"), ("10", "broken")]
)
def test_versions_are_compared_as_numbers(
    monkeypatch: pytest.MonkeyPatch, oldest: str, status: str
) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda module: "9.2.1+cpu")
    assert doctor.check_core("json", oldest).status == status


def test_a_cache_folder_that_cannot_be_made_is_broken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = doctor.check_writable("cache folder", tmp_path / "file" / "cache")
    assert check.status == "broken"
    assert "DUALFLOW_CACHE" in check.mend


def test_little_disk_space_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = tmp_path / "not" / "there"
    assert doctor.check_disk(absent).status == "ok"
    monkeypatch.setattr(doctor, "FREE_GIB_WANTED", 1e9)
    assert doctor.check_disk(absent).status == "warning"


def test_no_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    check = doctor.check_compiler()
    assert check.status == "warning"
    assert "g++" in check.mend


@pytest.fixture
def kernel_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in place of the one with the compiled kernels."""
    load = library.load
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    load.cache_clear()
    yield tmp_path
    load.cache_clear()


def test_absent_kernels_are_a_warning_that_says_how_to_compile_them(kernel_folder: Path) -> None:
    (check,) = doctor.check_kernels()
    assert (check.name, check.status) == ("kernels", "warning")
    assert "not compiled" in check.detail
    assert "python -m dualflow.ops.native.build" in check.mend


@pytest.mark.parametrize(("age", "status"), [(0, "ok"), (3600, "warning")])
def test_kernels_name_their_instruction_set_and_are_as_new_as_their_source(
    kernel_folder: Path, monkeypatch: pytest.MonkeyPatch, age: int, status: str
) -> None:
    newest = max(path.stat().st_mtime for path in build.SOURCES.iterdir())
    for isa in build.instruction_sets():
        (kernel_folder / f"_kernels_{isa}.so").touch()
        os.utime(kernel_folder / f"_kernels_{isa}.so", (newest - age, newest - age))
    monkeypatch.setattr(library, "why_missing", lambda: None)
    monkeypatch.setattr(library, "load", lambda: SimpleNamespace(df_isa=lambda: b"baseline"))
    (check,) = doctor.check_kernels()
    assert check.status == status
    assert check.detail.startswith("baseline")
