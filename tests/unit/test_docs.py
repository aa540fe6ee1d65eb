"""What the documents say exists: paths, names, links, commands, options, defaults, TOML."""

import argparse
import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dualflow.cli.main import VERBS, Parser, _options, load_verb
from dualflow.config import override, to_dict
from dualflow.data.config import DataConfig
from dualflow.recipes import RECIPES, demo
from dualflow.spec import PRESETS
from dualflow.train.config import OptimizerConfig, ScheduleConfig, TrainConfig, read_run_config

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/dualflow"
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
TABLES = {"data": DataConfig, "optimizer": OptimizerConfig, "schedule": ScheduleConfig}
TABLES["train"] = TrainConfig
# What a command makes, and what stands for any file.
MADE = re.compile(r"^(runs|comparison)/|NAME|RUN|^\.venv|^compare\.md$")
FORBIDDEN = {"utils.py"}
HOSTS = {"keepachangelog.com", "semver.org", "arxiv.org"}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def fences(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def spans(page: Path) -> list[str]:
    """What stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def indented(page: Path) -> Iterator[str]:
    """Lines of indented blocks and of fenced ones without a language."""
    yield from re.findall(r"^ {4,}(\S.*)$", prose(page), re.M)
    for language, text in fences(page):
        if language in ("", "sh", "bash", "console"):
            yield from (line.strip() for line in text.splitlines())


def found(mention: str) -> list[Path]:
    """Files and folders a mention can mean: from the root, from the package, or by bare name."""
    places = [ROOT / mention, PACKAGE / mention, *ROOT.glob(f"tests/**/{mention}")]
    if "/" not in mention:
        places += PACKAGE.rglob(mention)
    return [place for place in places if place.exists()]


@cache
def names_in(path: Path) -> set[str]:
    """``name`` and ``Class.name`` for all that a module defines or imports at its top."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef)
            }
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


@cache
def every_name() -> frozenset[str]:
    return frozenset(name for path in PACKAGE.rglob("*.py") for name in names_in(path))


@cache
def parser_of(verb: str) -> Parser:
    assert verb in VERBS, f"there is no verb {verb!r}"
    parser = Parser(prog=f"dualflow {verb}")
    load_verb(verb).configure(parser)
    parser.add_argument("--debug", action="store_true")
    return parser


def commands(line: str) -> Iterator[list[str]]:
    """The words behind ``dualflow`` of every such command in a shell line, without comments."""
    if "dualflow " not in line:
        return
    for part in re.split(r"\s[|&;]+\s", line):
        words = shlex.split(part, comments=True)
        if words[:1] == ["torchrun"] and "dualflow" in words:
            words = words[words.index("dualflow") :]
        if words[:1] == ["dualflow"]:
            yield words[1:]


def check_command(words: list[str]) -> None:
    if words[:1] in (["VERB"], ["--help"], ["--version"]):
        return
    args = parse(words)
    if words[0] in ("train", "demo") and args.assignments:
        override(demo("dual"), args.assignments)  # raises where there is no such field
    if getattr(args, "recipe", None):
        assert args.recipe in RECIPES


def parse(words: list[str]) -> argparse.Namespace:
    try:
        return parser_of(words[0]).parse_args(words[1:])
    except SystemExit as stop:
        raise AssertionError(f"dualflow {shlex.join(words)} is no command") from stop


@each_page
def test_every_relative_link_resolves(page: Path) -> None:
    text = prose(page)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target.partition("#")[0]).exists(), target


@each_page
def test_every_path_exists(page: Path) -> None:
    for span in spans(page):
        mention, _, name = span.rstrip("/").partition(":")
        looks_like_a_path = re.fullmatch(r"\.?[\w*.-]+(/[\w.-]+)*\.(py|md|toml|txt|h|cpp)", mention)
        looks_like_a_path = looks_like_a_path or re.match(
            r"(src|docs|tests|scripts|\.ci)/", mention
        )
        looks_like_a_path = looks_like_a_path or re.fullmatch(r"\w+/", span)
        if not looks_like_a_path or MADE.search(span) or span in FORBIDDEN:
            continue
        paths = found(mention)
        assert paths, f"`{span}`: there is no such file"
        if name:
            assert any(name in names_in(path) for path in paths), f"`{span}`: no such name"


@each_page
def test_every_name_of_a_module_exists(page: Path) -> None:
    """`CausalLM.step`, `AuxRows.kept` and their like."""
    defined = every_name()
    for span in spans(page):
        if re.fullmatch(r"[A-Z]\w+[a-z]\w*\.\w+", span):  # Class.attribute
            name, _, attribute = span.partition(".")
            known = span in defined or (name in defined and has_field(name, attribute))
            assert known, f"`{span}`: no such name"


def has_field(name: str, attribute: str) -> bool:
    pattern = rf"^class {name}\b.*?^    {attribute}\s*:"
    return any(
        re.search(pattern, path.read_text(encoding="utf-8"), re.M | re.S)
        for path in PACKAGE.rglob("*.py")
    )


@each_page
def test_every_command_parses(page: Path) -> None:
    for line in indented(page):
        for words in commands(line):
            check_command(words)


@each_page
def test_every_verb_and_option_in_prose_exists(page: Path) -> None:
    every = {option for verb in VERBS for option in _options(parser_of(verb))}
    every |= {"--help", "--version", "--debug"}
    for span in spans(page):
        words = span.split()
        if words[0] == "dualflow" and len(words) > 1 and "|" not in words:
            assert words[1] in VERBS, f"`{span}`: no such verb"
            known = set(_options(parser_of(words[1])))
        elif words[0].startswith("--"):
            known = every
        else:
            continue
        for option in re.findall(r"(?<!\S)--[a-z][\w-]*", span):
            assert option in known, f"`{span}`: no option {option}"


@each_page
def test_every_make_target_exists(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):.*## ", makefile, re.M))
    lines = [*spans(page), *indented(page)]
    wanted = {match[1] for line in lines if (match := re.match(r"make ([a-z]+)", line))}
    assert wanted <= targets


@each_page
def test_every_toml_block_is_a_run(page: Path, tmp_path: Path) -> None:
    """A block with a model stands on its own; another is laid over the demo's. The model that comes
    with the package stands for every model to begin from.
    """
    for language, text in fences(page):
        if language == "toml":
            (tmp_path / "run.toml").write_text(text, encoding="utf-8")
            keys = tomllib.loads(text).keys()
            begun = [f"initial_model={PACKAGE / 'assets/tiny'}"] if "initial_model" in keys else []
            base = None if keys & {"model", "initial_model"} else demo("dual")
            read_run_config(tmp_path / "run.toml", base, begun)


@each_page
def test_every_extra_exists(page: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in re.findall(r"dualflow\[(\w+)\]", page.read_text(encoding="utf-8")):
        assert extra in project["optional-dependencies"]


@each_page
def test_pages_speak_of_the_product_alone(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://([\w.-]+)", text)) <= HOSTS
    assert not re.search(r"(?<![\w.])/(work|tmp|root|home|usr)/|localhost|\bissue \d", text)


def test_the_training_page_has_every_field_with_its_default() -> None:
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    rows = dict(
        re.findall(r"^\| `((?:data|optimizer|schedule|train)\.\w+)` \| (.*?) \|", text, re.M)
    )
    expected: dict[str, Any] = {}
    for table, cls in TABLES.items():
        for field in fields(cls):
            expected[f"{table}.{field.name}"] = field.default
    assert rows.keys() == expected.keys()
    for key, default in expected.items():
        shown = rows[key].strip("` –")
        if default is MISSING:
            assert not shown, key
            continue
        value = None if shown == "none" else tomllib.loads(f"value = {shown}")["value"]
        assert value == (list(default) if isinstance(default, tuple) else default), key


def test_the_training_page_names_every_preset_and_recipe() -> None:
    named = set(spans(ROOT / "docs/training.md"))
    assert PRESETS.keys() <= named
    assert RECIPES.keys() <= named


def test_the_example_of_the_training_page_says_true_defaults() -> None:
    """[model.aux] is shown with its defaults, as its comment says."""
    (_, text), *_ = fences(ROOT / "docs/training.md")
    shown = tomllib.loads(text)["model"]["aux"]
    from dualflow.spec import AuxConfig

    assert shown.items() <= to_dict(AuxConfig()).items()


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_every_room_is_on_the_map(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for init in PACKAGE.glob("*/__init__.py"):
        assert f"{init.parent.name}/" in text, init.parent.name


def test_the_changelog_names_every_verb() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert all(re.search(rf"\b{verb}\b", text) for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_example_of_a_verb_parses(verb: str) -> None:
    for line in load_verb(verb).EXAMPLES.strip().splitlines():
        found_commands = list(commands(line.strip()))
        assert found_commands, line
        for words in found_commands:
            check_command(words)


def test_every_verb_the_makefile_calls_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert set(re.findall(r"\$\(BIN\)/dualflow (\w+)", makefile)) <= set(VERBS)
