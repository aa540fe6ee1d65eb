"""The text files beside a model's weights that go where the model goes: its tokenizer, the names of
its special tokens, the ids that end a text, its chat template. No torch here.
"""

from collections.abc import Mapping
from pathlib import Path

from dualflow.checkpoint.atomic import write_atomic

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

COMPANIONS = (TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG, CHAT_TEMPLATE)
"""Names and contents are Hugging Face's."""

_MAX_BYTES = 256 * 1024 * 1024


def read_companions(folder: Path) -> dict[str, str]:
    """The text of each companion file that ``folder`` has. Raises ``ValueError`` naming the file
    that cannot be read.
    """
    texts: dict[str, str] = {}
    for name in COMPANIONS:
        path = folder / name
        if not path.is_file():
            continue
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{path} has {path.stat().st_size:,} bytes; that is no such file")
        try:
            # Not read_text: a chat template's line ends are part of what it writes.
            texts[name] = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}") from error
    return texts


def write_companions(folder: Path, texts: Mapping[str, str]) -> None:
    """Write companion files into an existing ``folder``."""
    for name, text in texts.items():
        assert name in COMPANIONS, name
        data = text.encode("utf-8")
        write_atomic(folder / name, lambda temporary, data=data: temporary.write_bytes(data))
