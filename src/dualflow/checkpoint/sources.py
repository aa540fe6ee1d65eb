"""What a path that a person names is: a GGUF file, a Hugging Face folder, or a model of ours."""

from enum import Enum
from pathlib import Path
from typing import NamedTuple

from dualflow.checkpoint import families, locate
from dualflow.checkpoint.gguf.families import FAMILIES as GGUF_FAMILIES
from dualflow.checkpoint.huggingface import is_huggingface

SUPPORTED = (
    f"supported: GGUF files ({', '.join(GGUF_FAMILIES)}), Hugging Face folders with "
    f"safetensors ({', '.join(families.FAMILIES)}), folders of model_type {locate.MODEL_TYPE!r}, "
    f"version {locate.FORMAT_VERSION}, and run folders"
)


class SourceKind(Enum):
    """Formats a model can be read from."""

    GGUF = "GGUF file"
    HUGGINGFACE = "Hugging Face folder"
    OURS = "dualflow folder"


class Source(NamedTuple):
    """Where a model lies and in which format; for a run folder, the model inside it."""

    kind: SourceKind
    path: Path


def find_source(named: str | Path) -> Source:
    """The model that ``named`` means. No weights are read.

    Raises ``ValueError`` where there is nothing, or something else: what was found, where, and
    what is supported. A Hugging Face folder of a family that we do not know is told by whoever
    reads it.
    """
    path = Path(named)
    if is_gguf(path):
        return Source(SourceKind.GGUF, path)
    if path.is_dir() and is_huggingface(path):
        return Source(SourceKind.HUGGINGFACE, path)
    try:
        place = locate.find_model_folder(named)
        locate.read_model_config(place)
    except ValueError as error:
        raise ValueError(str(error).replace(locate.SUPPORTED, SUPPORTED)) from error
    return Source(SourceKind.OURS, place)


def is_gguf(path: Path) -> bool:
    """Whether a file says it is one, by its name or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
