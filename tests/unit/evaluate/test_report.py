"""The files a comparison writes: rows, plots, and a page that needs nothing from outside."""

import importlib
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dualflow.evaluate.compare import compare_runs
from dualflow.evaluate.write import comparison_markdown, write_comparison
from tests.unit.evaluate.run_folders import change_json, write_pair_of_groups, write_run

VOID = {"meta", "img", "br", "link", "input"}
NAMES = ("loss-over-tokens", "loss-over-training-flops", "difference-by-seed")


class Page(HTMLParser):
    """Tags, attributes and text of a page; complains of tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("comparison")
    write_pair_of_groups(root / "runs")
    write_comparison(compare_runs([root / "runs"]), root / "out")
    return root / "out"


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def refuse(name: str, package: str | None = None) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", refuse)


def test_compare_json_is_flat_rows(written: Path):
    rows = json.loads((written / "compare.json").read_text())
    assert len(rows) == 6
    assert {row["variant"] for row in rows} == {"standard", "dual"}
    assert all(not isinstance(value, dict | list) for row in rows for value in row.values())
    assert rows[0]["val_loss_p"] is None


def test_plots_are_images(written: Path):
    for name in NAMES:
        assert (written / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n")
        assert ET.fromstring((written / f"{name}.svg").read_text()).tag.endswith("}svg")


def test_plots_do_not_depend_on_the_hour(written: Path, tmp_path: Path):
    write_comparison(compare_runs([written.parent / "runs"]), tmp_path)
    for name in NAMES:
        for ending in ("png", "svg"):
            file = f"{name}.{ending}"
            assert (tmp_path / file).read_bytes() == (written / file).read_bytes()


def test_the_page_is_well_formed_and_stands_alone(written: Path):
    text = (written / "report.html").read_text()
    page = Page(text)
    assert page.tags["svg"] == 3
    assert page.tags["table"] == 4
    assert not page.tags.keys() & {"script", "img", "link", "iframe", "object", "base", "form"}
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("href", "xlink:href", "src"):
            assert value.startswith("#"), (tag, name, value)
    assert "//" not in text.replace("<!--", "")
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text


def test_ids_are_unique_and_references_resolve(written: Path):
    page = Page((written / "report.html").read_text())
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    uses = {value[1:] for _, name, value in page.attributes if name.endswith("href")}
    clips = set(re.findall(r"url\(#([^)]+)\)", " ".join(v for _, _, v in page.attributes)))
    assert uses | clips <= set(ids)
    assert uses
    assert clips


def test_the_page_has_a_dark_face(written: Path):
    text = (written / "report.html").read_text()
    assert "prefers-color-scheme: dark" in text
    body = text[text.index("<body>") :]
    assert "currentColor" in body
    assert "#22262b" not in body.lower()
    assert not re.search(r'<g id="[^"]*-patch_1">\s*<path [^>]*#ffffff', body)


def test_the_page_says_what_was_found(written: Path):
    words = " ".join(Page((written / "report.html").read_text()).words)
    assert "dual is lower than standard by 0.1000 nats on average" in words
    assert "do not tell the two apart" in words
    assert "Equal FLOPs are not equal time." in words


def test_text_from_runs_cannot_become_markup(tmp_path: Path):
    evil = "<script>alert(1)</script>$x_{1$ & \"'"
    write_run(tmp_path / "runs" / "a", variant="standard")
    folder = write_run(tmp_path / "runs" / "b", variant=evil, name=evil)
    change_json(folder / "config.json", data={"source": evil})
    comparison = compare_runs([tmp_path / "runs"])
    write_comparison(comparison, tmp_path / "out", title=f"title {evil}")
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert not page.tags["script"]
    assert any(evil in words for words in page.words)
    assert "<script>" not in comparison_markdown(comparison)


def test_a_label_with_a_leading_underscore_is_in_the_legend(tmp_path: Path):
    write_run(tmp_path / "runs" / "a", variant="_hidden")
    write_comparison(compare_runs([tmp_path / "runs"]), tmp_path / "out")
    assert "_hidden (1 seed)" in (tmp_path / "out" / "loss-over-tokens.svg").read_text()


def test_single_points_and_equal_losses_can_be_drawn(tmp_path: Path):
    write_run(tmp_path / "runs" / "a", curve=((10, 2.0),))
    write_run(tmp_path / "runs" / "b", variant="dual", curve=((10, 2.0),))
    written = write_comparison(compare_runs([tmp_path / "runs"]), tmp_path / "out")
    assert written.without_plots is None


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_all_but_the_plots_is_written(tmp_path: Path):
    write_pair_of_groups(tmp_path / "runs")
    written = write_comparison(compare_runs([tmp_path / "runs"]), tmp_path / "out")
    assert written.without_plots is not None
    assert "pip install 'dualflow[plot]'" in written.without_plots
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["compare.json", "compare.md", "report.html"]
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert page.tags["table"] == 4
    assert "matplotlib is not installed" in " ".join(page.words)


def test_a_file_in_the_way(tmp_path: Path):
    write_run(tmp_path / "runs" / "a")
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match="is a file; expected a folder"):
        write_comparison(compare_runs([tmp_path / "runs"]), tmp_path / "out")


def test_reading_and_comparing_import_no_torch(tmp_path: Path):
    import subprocess
    import sys

    write_pair_of_groups(tmp_path / "runs")
    code = (
        "import sys; from dualflow.evaluate import compare_runs, write_comparison; "
        f"write_comparison(compare_runs([{str(tmp_path / 'runs')!r}]), {str(tmp_path / 'o')!r}); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
