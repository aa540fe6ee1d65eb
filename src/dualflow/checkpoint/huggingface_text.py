"""What a Hugging Face folder says about text: its companion files, what older folders keep
elsewhere, and how many ids its tokenizer has. No torch here.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from dualflow.checkpoint.companions import (
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    read_companions,
)
from dualflow.extras import find_extra, import_problem

_SLOW = ("vocab.json", "tokenizer.model", "spiece.model", "vocab.txt")
"""Vocabularies of folders from before tokenizer.json."""

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def companions_of(folder: Path, table: Mapping[str, Any], rows: int) -> dict[str, str]:
    """The companion files of ``folder``, by name, as text.

    table, rows: its config.json and the rows of its embedding.

    Where there is no tokenizer.json, transformers makes one of an older vocabulary if it is
    installed; else the model comes without, and a warning says so. Where there is no
    generation_config.json, the special ids of config.json are written to one.
    """
    texts = read_companions(folder)
    old = next((name for name in _SLOW if (folder / name).is_file()), None)
    if TOKENIZER not in texts and old is not None:
        made = _from_old_vocabulary(folder, old)
        if made is not None:
            texts[TOKENIZER] = made
    if GENERATION_CONFIG not in texts:
        limit = min(rows, real_ids(texts, folder) or rows)
        ids = {key: table[key] for key in _SPECIAL_IDS if _are_ids(table.get(key), limit)}
        if ids:
            texts[GENERATION_CONFIG] = json.dumps(ids, indent=2) + "\n"
    return texts


def real_ids(companions: Mapping[str, str], folder: Path) -> int | None:
    """How many ids the tokenizer has, gaps included; None: there is no tokenizer."""
    if TOKENIZER not in companions:
        return None
    try:
        backend = tokenizers.Tokenizer.from_str(companions[TOKENIZER])
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{folder / TOKENIZER} cannot be read: {error}") from error
    ids = set(backend.get_vocab(with_added_tokens=True).values())
    # Names that the tokenizer does not know itself may be given ids there.
    try:
        added = json.loads(companions.get(TOKENIZER_CONFIG, "{}")).get("added_tokens_decoder", {})
        ids |= {int(number) for number in added}
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    return max(ids, default=-1) + 1


def _are_ids(value: Any, limit: int) -> bool:
    listed = value if isinstance(value, list) and value else [value]
    return all(type(number) is int and 0 <= number < limit for number in listed)


def _from_old_vocabulary(folder: Path, old: str) -> str | None:
    library: Any = find_extra("transformers")
    reason = "transformers, which can make one, is not installed"
    if library is not None:
        try:
            made = library.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
            return made.backend_tokenizer.to_str()
        except Exception as error:  # whatever a vocabulary of unknown making leads to
            reason = f"transformers could not make one ({import_problem(error)})"
    warnings.warn(
        f"{folder} has {old}, but no {TOKENIZER}, and {reason}: the model comes without a "
        "tokenizer and can be fed with ids alone",
        stacklevel=4,
    )
    return None
