"""From a source to token shards: split, tokenizer, encoding, a cache by content.

No torch here. A folder in the cache is complete or not there: it is written under another name and
renamed, so preparations that run at the same time, or are killed, leave nothing half done.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dualflow.data.config import DataConfig, bpe_size
from dualflow.data.documents import Document
from dualflow.data.encode import encode_documents
from dualflow.data.shards import ShardSet, SplitHeader, SplitWriter, header_to_dict, open_split
from dualflow.data.sources import Source, open_sources
from dualflow.data.split import (
    Split,
    SplitRule,
    Survey,
    choose_split,
    filled_documents,
    sample_limit,
    survey,
)
from dualflow.data.tokenizers import (
    Tokenizer,
    configured_eos,
    load_tokenizer,
    tokenizer_file,
    train_bpe,
)
from dualflow.folders import cache_folder, expand_home

Progress = Callable[[str, int, int], None]
"""Called with a stage (``reading``, ``training the tokenizer``, ``encoding``), the characters done
and those in all (0: not known).
"""

_FORMAT, _VERSION = "dualflow-data", 1
_DRAFT = ".draft-"
_PIECE = 1 << 20


@dataclass(frozen=True)
class PreparedData:
    """Token shards ready to train on.

    tokenizer_json:  the text of the ``tokenizer.json`` that goes into model folders.
    vocab_size:      rows an embedding needs for these tokens.
    folder:          where the shards lie.
    source:          what people call the text.
    notes:           what people should know, a sentence each; empty where all is as asked.
    """

    train: ShardSet
    validation: ShardSet
    tokenizer_json: str
    vocab_size: int
    eos_token: str
    folder: Path
    source: str
    notes: tuple[str, ...] = ()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_json(self.tokenizer_json, self.eos_token)


def prepare(config: DataConfig, progress: Progress | None = None) -> PreparedData:
    """The tokens of ``config``, from the cache where they were prepared before.

    Raises ``ValueError`` or ``FileNotFoundError`` in one line where the source is absent, cannot be
    read, or gives fewer tokens than one window and its last target take (sequence_length + 1).
    Where only holding text out makes it too short, nothing is held out and a note says so.
    """
    train, validation = open_sources(config)
    folder = _cache_root(config) / f"data-{_key(config, train, validation)}"
    if not (folder / "header.json").is_file():
        _build(folder, config, train, validation, progress or _silent)
    prepared = open_prepared(folder, document_mask=config.document_mask, source=train.name)
    found, needed = prepared.train.num_text_tokens, config.sequence_length + 1
    held_out = 0 if validation else prepared.validation.num_text_tokens
    if found < needed <= found + held_out:
        whole = prepare(dataclasses.replace(config, validation_fraction=0.0), progress)
        note = (
            f"{train.name}: training takes all {found + held_out} tokens, so nothing is held "
            "out for validation"
        )
        return dataclasses.replace(whole, notes=(note,))
    if found < needed:
        raise ValueError(_too_short(train.name, found + held_out, config))
    for shards in (prepared.train, prepared.validation):
        if shards.num_tokens and not shards.header.counted:
            raise ValueError(
                f"{shards.name}: nothing in it counts for the loss; expected an assistant's turns "
                "in the chats"
            )
    asked = validation is not None or config.validation_fraction > 0
    if asked and not prepared.validation.num_tokens:
        note = (
            f"{train.name}: the validation split is empty; give more documents, or name a "
            "validation_source"
        )
        return dataclasses.replace(prepared, notes=(note,))
    return prepared


def open_prepared(
    folder: str | Path, *, document_mask: bool = False, source: str | None = None
) -> PreparedData:
    """What ``prepare`` left in ``folder``; ``source``: what to call its text, if not as then.

    Raises ``ValueError`` where it is not such a folder or is damaged.
    """
    folder = Path(folder)
    try:
        header: dict[str, Any] = json.loads((folder / "header.json").read_text(encoding="utf-8"))
        if header["format"] != _FORMAT or header["version"] != _VERSION:
            raise ValueError(
                f"format {header['format']} {header['version']}, expected {_FORMAT} {_VERSION}"
            )
        tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
        source, vocab_size = source or str(header["source"]), int(header["vocab_size"])
        splits = {
            split: SplitHeader(**header["splits"][split]) for split in ("train", "validation")
        }
        eos_id, eos_token = int(header["eos_id"]), str(header["eos_token"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder}: not a folder of prepared data ({error}); delete it and prepare again"
        ) from error
    train, validation = (
        open_split(
            folder,
            split,
            splits[split],
            name=f"{label} split of {source}",
            eos_id=eos_id,
            vocab_size=vocab_size,
            document_mask=document_mask,
        )
        for split, label in (("train", "training"), ("validation", "validation"))
    )
    return PreparedData(train, validation, tokenizer_json, vocab_size, eos_token, folder, source)


def is_prepared(folder: str | Path) -> bool:
    """Whether ``folder`` looks like one that ``prepare`` left."""
    return Path(folder, "header.json").is_file() and Path(folder, "tokenizer.json").is_file()


def _build(
    folder: Path, config: DataConfig, train: Source, validation: Source | None, progress: Progress
) -> None:
    progress("reading", 0, 0)
    seen = survey(train)
    _refuse_tiny(config, train, seen)
    rule = choose_split(seen, config.validation_fraction if validation is None else 0.0)
    tokenizer = _tokenizer(config, train, seen, rule, progress)
    draft = _draft(folder)
    try:
        splits = _write_splits(
            draft, _documents(train, validation, rule), tokenizer, seen, validation, progress
        )
        (draft / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        header = {
            "format": _FORMAT,
            "version": _VERSION,
            "source": train.name,
            "tokenizer": config.tokenizer,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "eos_token": tokenizer.eos_token,
            "splits": {split: header_to_dict(found) for split, found in splits.items()},
        }
        (draft / "header.json").write_text(
            json.dumps(header, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        _publish(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _tokenizer(
    config: DataConfig, train: Source, seen: Survey, rule: SplitRule, progress: Progress
) -> Tokenizer:
    size = bpe_size(config.tokenizer)
    if size is None:
        return load_tokenizer(config.tokenizer, config.eos_token)
    try:
        return train_bpe(
            _training_texts(train, seen, rule, config.tokenizer_sample, progress), size
        )
    except ValueError as error:
        raise ValueError(f"{train.name}: {error}") from error


def _training_texts(
    train: Source, seen: Survey, rule: SplitRule, characters: int, progress: Progress
) -> Iterator[str]:
    """Texts of the training split alone: a tokenizer must not have seen what is held out."""
    limit = sample_limit(seen, rule, characters) if rule.cut is None else None
    total, done = min(characters, seen.characters), 0
    for document, split in rule.apply(filled_documents(train)):
        if split == "train" and (limit is None or document.split_hash <= limit):
            for segment in document.segments:
                if not segment.control and done < characters:
                    text = segment.text[: characters - done]
                    # The library holds a whole piece with an offset per character.
                    yield from (text[i : i + _PIECE] for i in range(0, len(text), _PIECE))
                    done += len(text)
            progress("training the tokenizer", min(done, total), total)
        if done >= characters:
            return


def _documents(
    train: Source, validation: Source | None, rule: SplitRule
) -> Iterator[tuple[Document, Split]]:
    yield from rule.apply(filled_documents(train))
    if validation is not None:
        for document in filled_documents(validation):
            yield document, "validation"


def _write_splits(
    folder: Path,
    documents: Iterator[tuple[Document, Split]],
    tokenizer: Tokenizer,
    seen: Survey,
    validation: Source | None,
    progress: Progress,
) -> dict[str, SplitHeader]:
    has_mask = not (seen.all_plain and (validation is None or survey(validation).all_plain))
    done = 0
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(SplitWriter(folder, split, tokenizer.vocab_size, has_mask))
            for split in ("train", "validation")
        }
        for split, encoded in encode_documents(tokenizer, documents):
            writers[split].add(encoded.ids, encoded.counted, encoded.text_bytes)
            done += encoded.characters
            progress("encoding", min(done, seen.characters), seen.characters)
        return {split: writer.header() for split, writer in writers.items()}


def _refuse_tiny(config: DataConfig, train: Source, seen: Survey) -> None:
    """Refuse what has fewer bytes than tokens are needed, before a BPE is trained on it."""
    if bpe_size(config.tokenizer) is not None and seen.characters <= config.sequence_length:
        text_bytes = sum(document.num_bytes for document in filled_documents(train))
        if text_bytes <= config.sequence_length:
            raise ValueError(_too_short(train.name, text_bytes, config))


def _draft(folder: Path) -> Path:
    """A new hidden folder beside ``folder``; what killed preparations left a day ago is removed."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=folder.parent))
    except OSError as error:
        raise ValueError(
            f"cannot write to the cache {folder.parent} ({error.strerror}); set cache_dir or "
            "$DUALFLOW_CACHE"
        ) from error
    for old in folder.parent.glob(f"{_DRAFT}*"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > 24 * 3600:
                shutil.rmtree(old, ignore_errors=True)
    return draft


def _publish(draft: Path, folder: Path) -> None:
    """Give the draft its name; where another preparation was first, keep that: it is the same."""
    for path in draft.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    # mkdtemp makes folders private; a cache may be shared.
    draft.chmod(0o755)
    try:
        draft.rename(folder)
    except OSError as error:
        if not (folder / "header.json").is_file():
            raise ValueError(
                f"{folder} is in the way and holds no prepared data; delete it"
            ) from error


def _cache_root(config: DataConfig) -> Path:
    return expand_home(config.cache_dir) if config.cache_dir else cache_folder()


def _key(config: DataConfig, train: Source, validation: Source | None) -> str:
    """A hash of all that decides the tokens: content, tokenizer, options; not where files lie."""
    tokenizer = [config.tokenizer]
    if config.tokenizer != "bytes" and bpe_size(config.tokenizer) is None:
        file = tokenizer_file(config.tokenizer)
        tokenizer = [
            hashlib.sha256(file.read_bytes()).hexdigest(),
            config.eos_token or configured_eos(file.parent),
            "before_ids",  # not in the caches of versions that left them out
        ]
    parts = [
        _VERSION,
        train.identity(),
        validation and validation.identity(),
        tokenizer,
        config.validation_fraction if validation is None else None,
        config.tokenizer_sample,
        config.text_key,
        config.messages_key,
    ]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=10).hexdigest()


def _too_short(name: str, found: int, config: DataConfig) -> str:
    return (
        f"{name}: found {found} tokens of text; expected at least {config.sequence_length + 1}, a "
        "window of sequence_length "
        f"{config.sequence_length} and its last target; give more text or lower sequence_length"
    )


def _silent(stage: str, done: int, total: int) -> None:
    pass
