import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest

from dualflow.data.config import DataConfig
from dualflow.data.sources import open_sources


def documents(source, **settings):
    opened, _ = open_sources(DataConfig(source=str(source), **settings))
    return list(opened.documents())


def texts(source, **settings):
    return [document.segments[0].text for document in documents(source, **settings)]


def identity(source):
    return open_sources(DataConfig(source=str(source)))[0].identity()


def test_standard_library_is_large_sorted_and_without_tests_or_the_machine_s_own_paths():
    source, validation = open_sources(DataConfig())
    found = list(source.documents())
    paths = [document.split_key or "" for document in found]
    assert validation is None
    assert paths == sorted(paths)
    assert "asyncio/events.py" in paths
    assert sum(document.num_characters for document in found) > 5_000_000
    folders = {part for path in paths for part in Path(path).parts[:-1]}
    assert not folders & {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
    }
    assert not [path for path in paths if "_sysconfigdata" in path or "config-" in path]
    assert source.identity() == open_sources(DataConfig())[0].identity()


def test_standard_library_of_an_interpreter_without_source_is_a_message(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="without its library's source"):
        open_sources(DataConfig())


def test_one_text_file_is_one_document_byte_for_byte(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_bytes("a\r\n\n\tbé\n".encode())
    assert texts(file) == ["a\r\n\n\tbé\n"]


def test_a_folder_is_read_in_the_order_of_paths_without_what_is_hidden_or_no_text(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "x.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff\xfe")
    assert texts(tmp_path) == ["first", "second"]


def test_tables_in_a_folder_are_the_data_and_the_readme_is_not(tmp_path):
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "rows.jsonl").write_text('{"text": "row"}\n')
    assert texts(tmp_path) == ["row"]


def test_a_folder_does_not_lead_out_over_a_linked_folder(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (inside / "a.txt").write_text("mine")
    (inside / "link").symlink_to(outside, target_is_directory=True)
    assert texts(inside) == ["mine"]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt", b"ab\xff", "not UTF-8 text \\(byte 2 is 0xff\\)"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text"', "line 3: not JSON"),
        ("a.jsonl", b'["x"]\n', "line 1: found list; expected an object"),
        ("a.jsonl", b'{"text": "\xff"}\n', "line 1: not JSON"),
        ("a.parquet", b"no table", "not a Parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_place(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.*{complaint}"):
        documents(tmp_path / name)


def test_absent_and_empty_sources_are_messages(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"corpus\.txt: no such file or folder.*python-stdlib"
    ):
        open_sources(DataConfig(source=str(tmp_path / "corpus.txt")))
    with pytest.raises(ValueError, match="holds no files"):
        open_sources(DataConfig(source=str(tmp_path)))


def test_identity_follows_content_and_not_the_place(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("same")
    before = identity(tmp_path / "one")
    assert before == identity(tmp_path / "two")
    os.utime(tmp_path / "one" / "a.txt", (0, 0))
    assert identity(tmp_path / "one") == before
    (tmp_path / "one" / "a.txt").write_text("else")
    assert identity(tmp_path / "one") != before


def test_parquet_rows_are_texts_or_chats(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": ["one", "two"], "id": [1, 2]}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["one", "two"]
    messages = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]]
    parquet.write_table(pa.table({"messages": messages}), tmp_path / "b.parquet")
    (chat,) = documents(tmp_path / "b.parquet")
    assert [s.text for s in chat.segments if s.counted] == ["a", "<|im_end|>"]
    parquet.write_table(pa.table({"body": ["x"]}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match=r"found the columns \['body'\]"):
        documents(tmp_path / "c.parquet")
    assert texts(tmp_path / "c.parquet", text_key="body") == ["x"]


@pytest.fixture
def saved_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    splits = {
        "train": datasets.Dataset.from_dict({"text": ["one", "two"], "id": [1, 2]}),
        "validation": datasets.Dataset.from_dict({"text": ["held out"], "id": [3]}),
    }
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_saved_dataset_gives_the_split_asked_for_and_its_own_validation(saved_dataset):
    train, validation = open_sources(DataConfig(source=str(saved_dataset)))
    assert [d.segments[0].text for d in train.documents()] == ["one", "two"]
    assert validation is not None
    assert [d.segments[0].text for d in validation.documents()] == ["held out"]
    assert texts(saved_dataset / "train") == ["one", "two"]
    with pytest.raises(ValueError, match="no split 'test'; found train, validation"):
        texts(saved_dataset, split="test")


def test_saved_dataset_whose_files_lead_out_of_the_folder_is_refused(saved_dataset):
    state = saved_dataset / "train" / "state.json"
    content = json.loads(state.read_text())
    content["_data_files"] = [{"filename": "../validation/data-00000-of-00001.arrow"}]
    state.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="names a file outside the folder"):
        texts(saved_dataset)


def test_code_beside_a_saved_dataset_is_never_run(saved_dataset):
    marker = saved_dataset / "ran"
    for name in ("saved.py", "train.py", "dataset.py"):
        (saved_dataset / "train" / name).write_text(f"open({str(marker)!r}, 'w')")
    assert texts(saved_dataset) == ["one", "two"]
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "package"), [("a.parquet", "pyarrow.parquet"), ("saved", "datasets")]
)
def test_a_missing_package_is_a_line_that_names_the_extra(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    if name == "saved":
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text('{"_data_files": []}')
        (tmp_path / name / "dataset_info.json").write_text("{}")
    else:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ImportError, match=r"pip install 'dualflow\[data\]'"):
        documents(tmp_path / name)


def test_a_home_folder_that_is_not_there_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    missing = "~no-such-user/text"
    for config in (
        DataConfig(source=missing),
        DataConfig(source=str(tmp_path / "a.txt"), validation_source=missing),
    ):
        with pytest.raises(ValueError, match=f"{missing}: there is no such home folder"):
            open_sources(config)
