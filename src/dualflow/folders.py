"""Where dualflow keeps files that nobody named a place for."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where what can be made again is kept: ``$DUALFLOW_CACHE``, else ``~/.cache/dualflow``."""
    return expand_home(os.environ.get("DUALFLOW_CACHE") or "~/.cache/dualflow")


def expand_home(path: str | Path) -> Path:
    """``path`` with a leading ``~`` or ``~user`` replaced. Raises ``ValueError`` where there is no
    such home folder, as for a user without one in a container.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{path}: there is no such home folder; give a whole path, or set $HOME or "
            "$DUALFLOW_CACHE"
        ) from error
