"""Where dualflow keeps files that nobody named a place for."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where what can be made again is kept: ``$DUALFLOW_CACHE``, else ``~/.cache/dualflow``."""
    return Path(os.environ.get("DUALFLOW_CACHE") or "~/.cache/dualflow").expanduser()
