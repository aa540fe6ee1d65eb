"""Optional packages: imported where they are used, and named plainly where they are missing.

Only torch, numpy, safetensors, tokenizers and rich are required. Everything else comes with an
extra, and a package that is installed but raises while it is imported counts as missing, with the
reason in the message.
"""

import importlib
from types import ModuleType


class MissingExtraError(ImportError):
    """An optional package is needed and cannot be imported; the message names its extra."""


def require_extra(module: str, extra: str, purpose: str) -> ModuleType:
    """Import ``module`` (dotted names allowed), which the extra ``extra`` brings.

    ``purpose`` completes "... is needed for PURPOSE", such as ``"drawing plots"``.
    Raises ``MissingExtraError`` (an ``ImportError``) in one line that says how to install it.
    """
    install = f"pip install 'dualflow[{extra}]'"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:  # of the module itself, or of something it needs
        missing = (error.name or module).partition(".")[0]
        raise MissingExtraError(f"{missing} is needed for {purpose}: {install}") from error
    except (Exception, SystemExit) as error:  # a broken package may raise anything
        raise MissingExtraError(
            f"{module} is needed for {purpose}; it is installed but cannot be imported "
            f"({import_problem(error)}); reinstall it: {install}"
        ) from error


def find_extra(module: str) -> ModuleType | None:
    """``module`` if it can be imported, else None: for what is used only where present."""
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit):  # a broken package may raise anything
        return None


def import_problem(error: BaseException) -> str:
    """What an import raised, in one line of at most 120 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 120 else text[:117] + "..."
