"""What a model on disk is, from its headers and small files alone: no weights are read."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualflow.checkpoint import families
from dualflow.checkpoint.companions import (
    CHAT_TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    read_companions,
)
from dualflow.checkpoint.gguf.config import read_gguf_config
from dualflow.checkpoint.gguf.families import find_family
from dualflow.checkpoint.gguf.parts import read_gguf_parts
from dualflow.checkpoint.gguf.tokenizer import import_tokenizer
from dualflow.checkpoint.huggingface_folder import StoredWeights
from dualflow.checkpoint.huggingface_text import companions_of, real_ids
from dualflow.checkpoint.locate import missing_weights, read_json
from dualflow.checkpoint.sources import Source, SourceKind, find_source
from dualflow.checkpoint.store import read_config, read_metrics, read_primary_config, read_quantised
from dualflow.checkpoint.strict import AUX_FILE, PRIMARY_FILE, check_counts
from dualflow.checkpoint.tensors import TensorEntry, read_header
from dualflow.model.flows import is_aux
from dualflow.spec import ModelConfig, QuantisedFormat


@dataclass(frozen=True)
class Stored:
    """What one flow's tensors take on disk: bytes by number format ("BF16", "Q4_1")."""

    formats: Mapping[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of all formats together; headers are not counted."""
        return sum(self.formats.values())


@dataclass(frozen=True, kw_only=True)
class Description:
    """A model on disk.

    path:          the file or folder itself; of a run folder, the model inside it.
    family:        what the primary's own format calls its architecture; None: not known.
    quantised:     format of the matrices of a dualflow folder; None: floats.
    primary, aux:  bytes on disk by owner.
    metrics:       recorded losses.
    """

    kind: SourceKind
    path: Path
    family: str | None
    config: ModelConfig
    primary: Stored
    aux: Stored = Stored()
    quantised: QuantisedFormat | None = None
    has_tokenizer: bool = False
    has_chat_template: bool = False
    metrics: Mapping[str, Any] = field(default_factory=dict)


def describe(named: str | Path) -> Description:
    """The model that ``named`` means. Raises ``ValueError`` as reading the model would, but for
    what only its weights show.
    """
    source = find_source(named)
    if source.kind is SourceKind.GGUF:
        return _of_gguf(source)
    if source.kind is SourceKind.HUGGINGFACE:
        return _of_huggingface(source)
    return _of_ours(source)


def _of_ours(source: Source) -> Description:
    path = source.path
    headers: dict[str, TensorEntry] = {}
    for file in (PRIMARY_FILE, AUX_FILE):
        if (path / file).exists():
            headers |= read_header(path / file)
    if not headers:
        raise ValueError(missing_weights(path))
    return _in_folder(
        source, (read_primary_config(path) or {}).get("model_type"), read_config(path), headers,
        read_companions(path), quantised=read_quantised(path), metrics=read_metrics(path),
    )  # fmt: skip


def _of_huggingface(source: Source) -> Description:
    path, table = source.path, read_json(source.path / "config.json")
    try:
        family = families.find_family(table)
        config = family.read(table)
    except ValueError as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from error
    headers = StoredWeights(path).entries
    texts = companions_of(path, table, config.vocab_size)
    real = real_ids(texts, path)
    if real is not None and real < config.vocab_size:
        config = dataclasses.replace(config, real_vocab_size=real)
    return _in_folder(source, family.model_type, config, headers, texts)


def _of_gguf(source: Source) -> Description:
    file = read_gguf_parts(source.path)
    try:
        family = find_family(file.metadata)
        texts, real = import_tokenizer(file.metadata)
        config = read_gguf_config(file, family, real)
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from error
    formats: dict[str, int] = {}
    for tensor in file.tensors.values():
        formats[tensor.format] = formats.get(tensor.format, 0) + tensor.end - tensor.begin
    return Description(
        kind=source.kind, path=source.path, family=family.architecture, config=config,
        primary=Stored(formats), has_tokenizer=TOKENIZER in texts,
        has_chat_template=_has_template(texts),
    )  # fmt: skip


def _in_folder(
    source: Source,
    family: str | None,
    config: ModelConfig,
    headers: Mapping[str, TensorEntry],
    texts: Mapping[str, str],
    **more: Any,
) -> Description:
    check_counts(source.path, config, len(headers))
    return Description(
        kind=source.kind, path=source.path, family=family, config=config,
        primary=_stored(headers, aux=False), aux=_stored(headers, aux=True),
        has_tokenizer=TOKENIZER in texts, has_chat_template=_has_template(texts), **more,
    )  # fmt: skip


def _stored(tensors: Mapping[str, TensorEntry], aux: bool) -> Stored:
    formats: dict[str, int] = {}
    for name, entry in tensors.items():
        if is_aux(name) == aux:
            formats[entry.dtype] = formats.get(entry.dtype, 0) + entry.end - entry.begin
    return Stored(formats)


def _has_template(texts: Mapping[str, str]) -> bool:
    if CHAT_TEMPLATE in texts:
        return True
    try:
        table = json.loads(texts.get(TOKENIZER_CONFIG, "{}"))
    except (ValueError, RecursionError):
        return False
    return isinstance(table, dict) and bool(table.get("chat_template"))
