"""Rules of the house that linters do not check: safe loading, short files, no drawers for oddments.

Who may import whom is checked by import-linter (`make check`).
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
NATIVE = sorted(
    path
    for folder in ("src/dualflow/ops/native/csrc", "tests/native")
    for path in (ROOT / folder).iterdir()
    if path.suffix in (".h", ".cpp")
)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
}
DRAWERS = {"utils", "util", "common", "helpers", "misc"}
# What the name of the module does not say: the package that torch.utils.tensorboard imports.
BROUGHT_BY = {"torch.utils.tensorboard": "tensorboard"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def calls_in(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """Every call with the dotted name of what is called, such as ``torch.load``."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def keyword(call: ast.Call, name: str) -> Any:
    """The constant value of a keyword argument; None where it is absent or computed."""
    for argument in call.keywords:
        if argument.arg == name and isinstance(argument.value, ast.Constant):
            return argument.value.value
    return None


def imports_in(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_loads_data_that_could_run_code(path: Path) -> None:
    assert not UNSAFE_MODULES & {module.partition(".")[0] for module in imports_in(path)}
    for call, name in calls_in(path):
        where = f"{name_of(path)}:{call.lineno}"
        if name == "torch.load":
            assert keyword(call, "weights_only") is True, f"{where}: say weights_only=True"
        if name.endswith("yaml.load"):
            raise AssertionError(f"{where}: use yaml.safe_load")
        assert keyword(call, "allow_pickle") is not True, f"{where}: allow_pickle=True"
        assert keyword(call, "trust_remote_code") is not True, f"{where}: trust_remote_code=True"
        assert name not in {"eval", "exec", "os.system"}, f"{where}: {name}"
        assert keyword(call, "shell") is not True, f"{where}: shell=True"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_in_the_package_opens_a_connection(path: Path) -> None:
    network = {"urllib.request", "http.client", "requests", "httpx", "socket", "huggingface_hub"}
    assert not network & set(imports_in(path))


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=name_of)
def test_files_and_functions_stay_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{lines} lines: split it along its ideas"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", NATIVE, ids=name_of)
def test_files_in_cpp_stay_short_and_say_what_they_are_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("// ")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert not re.search(r'#include\s+"[^"]*/', text), "kernels include each other alone"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_modules_are_named_after_what_they_do(path: Path) -> None:
    assert not DRAWERS & {path.stem, path.parent.name}
    docstring = ast.get_docstring(tree_of(path))
    assert docstring, f"{name_of(path)}: say in a docstring what the module is for"


def test_a_command_line_module_imports_the_standard_library_alone_at_its_top() -> None:
    for path in sorted((ROOT / "src/dualflow/cli").glob("*.py")):
        for node in tree_of(path).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for module in imports_in_statement(node):
                    known = module.partition(".")[0] in {*sys.stdlib_module_names, "dualflow"}
                    assert known, f"{name_of(path)}:{node.lineno}: import {module} inside run()"


def imports_in_statement(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""]


def test_every_extra_that_an_error_names_exists_and_brings_the_package() -> None:
    extras: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
    found = 0
    for path in SOURCES:
        for call, name in calls_in(path):
            if name.rpartition(".")[2] != "require_extra":
                continue
            module, extra = (argument.value for argument in call.args[:2])  # type: ignore[attr-defined]
            package = BROUGHT_BY.get(module, module.partition(".")[0])
            brings = {re.split(r"[<>=\[ ]", item)[0] for item in extras.get(extra, [])}
            assert package in brings, f"{name_of(path)}:{call.lineno}: {extra!r} brings {brings}"
            found += 1
    assert found


def test_the_doctor_knows_the_extras_and_the_oldest_versions() -> None:
    from dualflow.cli.doctor import CORE, OPTIONAL

    core = dict(item.split(">=") for item in PYPROJECT["project"]["dependencies"])
    assert core == CORE
    for module, (extra, _) in OPTIONAL.items():
        items = PYPROJECT["project"]["optional-dependencies"][extra]
        assert any(item.startswith(module) for item in items), module


def test_the_pins_satisfy_the_ranges() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    text = (ROOT / "requirements/pinned.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = [*PYPROJECT["project"]["dependencies"]]
    for extra in ("train", "data", "plot", "transformers", "dev"):
        wanted += extras[extra]
    for requirement in map(Requirement, wanted):
        if requirement.name != "dualflow":
            assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


@pytest.mark.parametrize(
    "path", ["pyproject.toml", "Makefile", "requirements/pinned.txt", "scripts/setup.sh", ".ci/run"]
)
def test_no_package_index_is_named(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert not re.search(r"https?://|index-url|find-links", text)
