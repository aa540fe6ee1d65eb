"""What a path means, and what is said where it means nothing (C09)."""

import json
from pathlib import Path

import pytest

from dualflow.checkpoint import save_model
from dualflow.checkpoint.sources import SourceKind, find_source
from dualflow.testing import tiny_config
from dualflow.testing.tensors import tiny_model

BOTH = r"supported: GGUF files \(llama, .*\), Hugging Face folders .*, folders of model_type"


def test_folders_of_ours_and_runs(tmp_path: Path):
    save_model(tiny_model(tiny_config()), tmp_path / "run/model")
    (tmp_path / "run/config.json").write_text('{"name": "run"}')
    for named in ("run", "run/model"):
        found = find_source(tmp_path / named)
        assert found == (SourceKind.OURS, tmp_path / "run/model")


def test_gguf_files_by_name_or_first_bytes(tmp_path: Path):
    (tmp_path / "a.GGUF").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"GGUF and more")
    for name in ("a.GGUF", "b"):
        assert find_source(tmp_path / name).kind is SourceKind.GGUF


@pytest.mark.parametrize(
    "table", [{"model_type": "llama"}, {"architectures": ["FooForCausalLM"]}, {"model_type": "foo"}]
)
def test_other_folders_with_a_config_are_hugging_faces(tmp_path: Path, table):
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert find_source(tmp_path).kind is SourceKind.HUGGINGFACE


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: None, "there is no folder"),
        (lambda path: path.mkdir(), r"holds no config.json \(it is empty\)"),
        (lambda path: path.write_text("{}"), "is a file; expected the folder"),
    ],
)
def test_nothing_is_told_with_what_is_supported(tmp_path: Path, make, found):
    make(tmp_path / "it")
    with pytest.raises(ValueError, match=f"it {found}|{found}.*it") as caught:
        find_source(tmp_path / "it")
    assert caught.match(BOTH)
    assert "\n" not in str(caught.value)


def test_a_name_on_a_hub_is_told_to_be_downloaded_first():
    with pytest.raises(ValueError, match="download it yourself first") as caught:
        find_source("someone/some-model")
    assert caught.match(BOTH)
