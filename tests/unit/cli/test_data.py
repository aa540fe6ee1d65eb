import json

import pytest

from dualflow.cli.main import main


@pytest.fixture
def notes(tmp_path, monkeypatch):
    monkeypatch.setenv("DUALFLOW_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "notes"
    folder.mkdir()
    for i in range(9):
        (folder / f"{i}.txt").write_text(f"note {i} [bold]\n" * 9)
    return folder


def test_prepare_then_info_of_source_and_of_folder_agree(notes, capsys):
    assert (
        main(
            [
                "data",
                "prepare",
                str(notes),
                "--tokenizer",
                "bpe:270",
                "--sequence-length",
                "8",
                "--json",
            ]
        )
        == 0
    )
    prepared = json.loads(capsys.readouterr().out)
    assert prepared["vocab_size"] == 270
    assert (
        prepared["splits"]["train"]["documents"] + prepared["splits"]["validation"]["documents"]
        == 9
    )
    assert main(["data", "info", str(notes), "--tokenizer", "bpe:270", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert main(["data", "info", prepared["folder"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == info
    assert info.pop("sample").startswith("note ")
    assert info == prepared


def test_info_shows_figures_and_a_sample_as_it_is(notes, capsys):
    assert main(["data", "info", str(notes), "--tokenizer", "bytes"]) == 0
    shown = capsys.readouterr()
    assert "259 ids" in shown.out
    assert "[bold]" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["prepare", "{notes}/0.txt", "--tokenizer", "bytes"],
            "0.txt: found 126 tokens of text; expected at least 257",
        ),
        (["prepare", "{notes}/absent.txt"], "absent.txt: no such file or folder"),
        (["info", "{notes}", "--tokenizer", "bpe:7"], "expected at least bpe:259"),
        (["info", "{notes}", "--validation-fraction", "2"], "validation_fraction is 2.0"),
        (["prepare"], "the following arguments are required: SOURCE"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(notes, capsys, arguments, complaint):
    assert main(["data", *(argument.format(notes=notes) for argument in arguments)]) == 2
    shown = capsys.readouterr()
    assert complaint in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_split_left_empty_is_noted_beside_the_figures(notes, capsys):
    (notes / "only.jsonl").write_text('{"text": "the same"}\n' * 2)
    assert main(["data", "info", str(notes / "only.jsonl"), "--tokenizer", "bytes", "--json"]) == 0
    shown = capsys.readouterr()
    assert "note: " in shown.err
    assert "the validation split is empty" in shown.err.replace("\n", " ")
    assert json.loads(shown.out)["splits"]["validation"]["tokens"] == 0


@pytest.mark.parametrize("action", ["prepare", "info"])
def test_help_of_both_actions_has_examples(capsys, action):
    assert main(["data", action, "--help"]) == 0
    assert f"dualflow data {action} python-stdlib" in capsys.readouterr().out
