"""Where text comes from: files, folders, Python's standard library, saved datasets. No torch here.



A source gives its documents in a fixed order as often as it is asked, and an identity: a hash of
what it holds. A text file is one document; a folder's ``.jsonl`` and ``.parquet`` files are read
row by row, and where there are any, its other files are not read. Nothing is fetched from anywhere,
and nothing found in the data is run.
"""

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

from dualflow.data import rows
from dualflow.data.config import DataConfig
from dualflow.data.documents import Document
from dualflow.folders import expand_home

PYTHON_STDLIB = "python-stdlib"
_ROW_SUFFIXES = {
    ".jsonl": rows.jsonl_documents,
    ".ndjson": rows.jsonl_documents,
    ".parquet": rows.parquet_documents,
}
# Left out of the standard library: its tests, what is installed beside it, and what a build or a
# site wrote into it (those hold the machine's own paths).
_STDLIB_SKIPPED_FOLDERS = (
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "config-*",
)
_STDLIB_SKIPPED_FILES = (
    "_sysconfigdata*.py",
    "_sysconfig_vars*",
    "sitecustomize.py",
    "usercustomize.py",
)


class Source(Protocol):
    """Documents in a fixed order, and a name and an identity for them."""

    @property
    def name(self) -> str:
        """What people call it: a path, or ``python-stdlib (3.12.1)``."""
        ...

    def documents(self) -> Iterator[Document]: ...

    def identity(self) -> str:
        """A hash that changes when the documents do."""
        ...


@dataclass(frozen=True)
class FileSource:
    """Files under ``root``, read by suffix; ``lenient`` passes over what is not UTF-8 text."""

    name: str
    root: Path
    files: tuple[Path, ...]
    text_key: str
    messages_key: str
    lenient: bool

    def documents(self) -> Iterator[Document]:
        for path in self.files:
            read = _ROW_SUFFIXES.get(path.suffix.lower())
            if read is not None:
                yield from read(path, self.text_key, self.messages_key)
            else:
                yield from self._text(path)

    def _text(self, path: Path) -> Iterator[Document]:
        data = path.read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            if self.lenient:
                return
            raise ValueError(
                f"{path}: not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}); "
                "convert it to UTF-8"
            ) from error
        yield Document.plain(text, split_key=path.relative_to(self.root).as_posix())

    def identity(self) -> str:
        return _files_identity(self.root, self.files)


@dataclass(frozen=True)
class SavedDatasetSource:
    """One split of a folder written by ``datasets.save_to_disk`` (extra ``data``)."""

    name: str
    folder: Path
    text_key: str
    messages_key: str

    def documents(self) -> Iterator[Document]:
        return rows.saved_dataset_documents(self.folder, self.text_key, self.messages_key)

    def identity(self) -> str:
        return _files_identity(self.folder, _walk(self.folder))


def open_sources(config: DataConfig) -> tuple[Source, Source | None]:
    """The source to train on, and the one to validate on where there is one of its own.

    Raises ``FileNotFoundError`` where a path is absent and ``ValueError`` where nothing in it can
    be read as text.
    """
    train = _open(config, config.source, config.split)
    if config.validation_source is not None:
        return train, _open(config, config.validation_source, config.validation_split)
    folder = expand_home(config.source)
    if _dataset_splits(folder) and config.validation_split in _dataset_splits(folder):
        return train, _open(config, config.source, config.validation_split)
    return train, None


def _open(config: DataConfig, source: str, split: str) -> Source:
    if source == PYTHON_STDLIB:
        return _standard_library(config)
    path = expand_home(source)
    if not path.exists():
        raise FileNotFoundError(
            f"{source}: no such file or folder; expected a path on this machine, or "
            f"{PYTHON_STDLIB} for the built-in text"
        )
    if rows.is_saved_dataset(path):
        return SavedDatasetSource(source, path, config.text_key, config.messages_key)
    splits = _dataset_splits(path)
    if splits:
        if split not in splits:
            raise ValueError(f"{source}: no split {split!r}; found {', '.join(splits)}; set split")
        return SavedDatasetSource(
            f"{source} ({split})", path / split, config.text_key, config.messages_key
        )
    files = _walk(path) if path.is_dir() else (path,)
    if not files:
        raise ValueError(
            f"{source}: the folder holds no files; expected text, .jsonl or .parquet files"
        )
    # Tables beside a README or a licence are the data; the texts around them are not.
    tables = tuple(file for file in files if file.suffix.lower() in _ROW_SUFFIXES)
    root = path if path.is_dir() else path.parent
    return FileSource(
        source, root, tables or files, config.text_key, config.messages_key, lenient=path.is_dir()
    )


def _standard_library(config: DataConfig) -> FileSource:
    root = Path(sysconfig.get_path("stdlib"))
    files = tuple(
        path
        for path in _walk(root, _STDLIB_SKIPPED_FOLDERS)
        if path.suffix == ".py"
        and not any(fnmatch(path.name, pattern) for pattern in _STDLIB_SKIPPED_FILES)
    )
    if not files:
        raise ValueError(
            f"{PYTHON_STDLIB}: this interpreter came without its library's source; give the path "
            "of a text instead"
        )
    name = f"{PYTHON_STDLIB} ({platform.python_version()})"
    return FileSource(name, root, files, config.text_key, config.messages_key, lenient=True)


def _walk(root: Path, skipped_folders: tuple[str, ...] = ()) -> tuple[Path, ...]:
    """Files under ``root`` by relative path, without hidden ones and linked folders."""
    found: list[Path] = []
    for folder, names, files in os.walk(root, followlinks=False):
        names[:] = [
            name
            for name in names
            if name[0] != "." and not any(fnmatch(name, skip) for skip in skipped_folders)
        ]
        found += [Path(folder, name) for name in files if name[0] != "."]
    return tuple(
        sorted(
            (path for path in found if path.is_file()),
            key=lambda path: path.relative_to(root).as_posix(),
        )
    )


def _dataset_splits(folder: Path) -> tuple[str, ...]:
    """Names of the splits of a saved DatasetDict; empty where ``folder`` is not one."""
    try:
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    # A split's name is a folder's name; anything that would lead elsewhere is no split.
    return tuple(
        name for name in splits if rows.is_saved_dataset(folder / name) and Path(name).name == name
    )


def _files_identity(root: Path, files: tuple[Path, ...]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "blake2b").digest()
        digest.update(json.dumps(path.relative_to(root).as_posix()).encode() + content)
    return digest.hexdigest()
