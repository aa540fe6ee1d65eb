"""Documents from tables: JSONL, Parquet, datasets saved on disk. No torch here."""

import json
from collections.abc import Iterator
from pathlib import Path

from dualflow.data.documents import Document, document_from_row
from dualflow.extras import require_extra


def jsonl_documents(path: Path, text_key: str, messages_key: str) -> Iterator[Document]:
    """One document per line that is not blank; ``ValueError`` names a line that is no such row."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = "nested too deeply" if isinstance(error, RecursionError) else error
                raise ValueError(f"{where}: not JSON ({reason})") from error
            if not isinstance(row, dict):
                raise ValueError(
                    f'{where}: found {type(row).__name__}; expected an object: {{"text": "..."}}'
                )
            yield document_from_row(row, where, text_key, messages_key)


def parquet_documents(path: Path, text_key: str, messages_key: str) -> Iterator[Document]:
    """One document per row of a Parquet file, read in batches (extra ``data``)."""
    parquet = require_extra("pyarrow.parquet", "data", f"reading {path}")
    try:
        table = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a Parquet file ({error})") from error
    columns = [key for key in (text_key, messages_key) if key in table.schema_arrow.names]
    if not columns:
        raise ValueError(
            f"{path}: found the columns {sorted(table.schema_arrow.names)}, but neither "
            f"{text_key!r} nor "
            f"{messages_key!r}; set text_key or messages_key"
        )
    number = 0
    for batch in table.iter_batches(batch_size=1024, columns=columns):
        for row in batch.to_pylist():
            yield document_from_row(row, f"{path} row {number}", text_key, messages_key)
            number += 1


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``folder`` is one split written by ``datasets.save_to_disk``."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def saved_dataset_documents(folder: Path, text_key: str, messages_key: str) -> Iterator[Document]:
    """One document per row of a saved dataset (extra ``data``); nothing in it is ever run."""
    _check_data_files(folder)
    datasets = require_extra("datasets", "data", f"reading {folder}")
    dataset = datasets.load_from_disk(str(folder))
    columns = [key for key in (text_key, messages_key) if key in dataset.column_names]
    if not columns:
        raise ValueError(
            f"{folder}: found the columns {sorted(dataset.column_names)}, but neither {text_key!r} "
            "nor "
            f"{messages_key!r}; set text_key or messages_key"
        )
    for number, row in enumerate(dataset.select_columns(columns)):
        yield document_from_row(row, f"{folder} row {number}", text_key, messages_key)


def _check_data_files(folder: Path) -> None:
    """Refuse a ``state.json`` whose file names lead out of the folder."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        listed = [*(state.get("_data_files") or ()), *(state.get("_indices_data_files") or ())]
        names = [str(entry["filename"]) for entry in listed]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder}: state.json is not that of a saved dataset; save it again"
        ) from error
    for name in names:
        if Path(name).name != name or "\\" in name:
            raise ValueError(f"{folder}: state.json names a file outside the folder; refused")
