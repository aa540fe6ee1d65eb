"""The two texts: Python's standard library, and Debian's copy of the GNU Collaborative
International Dictionary of English.
"""

import gzip
from pathlib import Path

from dualflow.data.config import DataConfig
from dualflow.data.prepare import PreparedData, prepare

VALIDATION_FRACTION = 0.05


def prepared(
    corpus: str, *, model: Path, dictionary: Path, runs: Path, length: int
) -> PreparedData:
    """The corpus in the model's own tokens; a twentieth is held out: whole files of the library,
    the last pages of the dictionary.
    """
    source = corpus if corpus == "python-stdlib" else str(plain_text(dictionary, runs))
    return prepare(
        DataConfig(
            source=source,
            tokenizer=str(model),
            sequence_length=length,
            validation_fraction=VALIDATION_FRACTION,
            cache_dir=str(runs / "data"),
        )
    )


def plain_text(dictionary: Path, runs: Path) -> Path:
    """``gcide.txt`` of a ``gcide.dict.dz`` (which is gzip), made once. The few bytes that are no
    UTF-8 are left out, as ``iconv -c`` does.
    """
    text = runs / "gcide.txt"
    if not text.exists():
        if not dictionary.is_file():
            raise ValueError(
                f"{dictionary}: no such file; install Debian's dict-gcide, or name its "
                "gcide.dict.dz with --dictionary (README.md says how to get it)"
            )
        runs.mkdir(parents=True, exist_ok=True)
        content = gzip.decompress(dictionary.read_bytes()).decode("utf-8", "ignore")
        text.write_text(content, encoding="utf-8")
    return text
