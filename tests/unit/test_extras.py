"""Optional packages: what is said where one is missing, broken, or lacks something of its own."""

from pathlib import Path

import pytest

from dualflow.extras import MissingExtraError, find_extra, require_extra


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raising.py").write_text("raise OSError('libcuda.so.1:\\n cannot open')")
    (tmp_path / "leaving.py").write_text("import sys; sys.exit('no licence')")
    (tmp_path / "lacking.py").write_text("import package_it_needs")
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_present_module_is_returned() -> None:
    assert require_extra("os.path", "plot", "drawing").join("a", "b")
    assert find_extra("json") is not None


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("absent_package", "absent_package is needed for drawing: pip install 'dualflow[plot]'"),
        ("absent_package.inner", "absent_package is needed for drawing: pip install"),
        ("lacking", "package_it_needs is needed for drawing: pip install 'dualflow[plot]'"),
        ("raising", r"raising is needed for drawing; it is installed but cannot be imported (OSE"),
        ("leaving", r"leaving is needed for drawing; it is installed but cannot be imported (Sys"),
    ],
)
@pytest.mark.usefixtures("packages")
def test_what_cannot_be_imported_is_named_in_one_line_with_its_extra(
    module: str, message: str
) -> None:
    with pytest.raises(MissingExtraError) as caught:
        require_extra(module, "plot", "drawing")
    text = str(caught.value)
    assert text.startswith(message)
    assert "pip install 'dualflow[plot]'" in text
    assert "\n" not in text
    assert find_extra(module) is None


def test_a_missing_extra_is_an_import_error() -> None:
    assert issubclass(MissingExtraError, ImportError)
