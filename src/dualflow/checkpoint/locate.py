"""From what a person names (a model, a run, a mistake) to the model folder that is meant."""

import json
import re
from pathlib import Path
from typing import Any, NoReturn

from dualflow.checkpoint.atomic import previous

MODEL_TYPE = "dualflow"
FORMAT_VERSION = 1
SUPPORTED = (
    f"supported: folders of model_type {MODEL_TYPE!r}, version {FORMAT_VERSION}, and run folders"
)

_MAX_JSON_BYTES = 16 * 1024 * 1024

_PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def find_model_folder(folder: str | Path) -> Path:
    """``folder`` itself, or the model of a run folder: ``model/``, else the newest checkpoint.

    Raises ``ValueError``, one line with what was found, where, and what is supported.
    """
    path = Path(folder)
    if not path.exists():
        if previous(path).is_dir():  # the writer died between the two renames that replace a folder
            return previous(path)
        raise ValueError(_missing(str(folder)))
    if not path.is_dir():
        raise ValueError(_file(path))
    if is_model_folder(path):
        return path
    inside = _inside_run(path)
    return inside if inside is not None else path


def is_model_folder(folder: Path) -> bool:
    """Whether ``folder`` holds a config.json of ours, of whatever version."""
    try:
        return read_json(folder / "config.json").get("model_type") == MODEL_TYPE
    except ValueError:
        return False


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ``ValueError`` naming the file."""
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise ValueError(f"it has {size:,} bytes; expected {_MAX_JSON_BYTES:,} at most")
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path} is not usable JSON: {reason}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}; expected an object")
    return value


def _no_number(name: str) -> NoReturn:
    """Python reads NaN and Infinity, which are no JSON and could not be written again."""
    raise ValueError(f"it has the value {name}")


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder, of a ``model_type`` and ``format_version`` we can read.

    Raises ``ValueError``: an empty folder, another architecture, pickled weights, a newer format.
    """
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(_no_config(folder))
    table = read_json(path)
    found = table.get("model_type")
    if found != MODEL_TYPE:
        names = table.get("architectures")
        what = f"model_type {found!r}" if found is not None else "no model_type"
        what += f" (architectures {names!r})" if names else ""
        raise ValueError(f"{path} has {what}: not a dualflow model; {SUPPORTED}")
    version = table.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        newer = type(version) is int and version > FORMAT_VERSION
        hint = "; it was written by a newer dualflow: upgrade to read it" if newer else ""
        raise ValueError(
            f"{path} has format_version {version!r}; this dualflow reads {FORMAT_VERSION}{hint}"
        )
    return table


def _inside_run(run: Path) -> Path | None:
    if is_model_folder(run / "model"):
        return run / "model"
    checkpoints = run / "checkpoints"
    if not checkpoints.is_dir():
        return None
    pointer = checkpoints / "latest"
    if pointer.is_file():
        with pointer.open("rb") as file:
            name = file.read(256).decode("utf-8", "replace").strip()
        if name in ("", ".", "..") or not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(
                f"{pointer} names {name!r}; expected the name of a checkpoint beside it"
            )
        if not is_model_folder(checkpoints / name):
            raise ValueError(
                f"{pointer} names {name!r}, but {checkpoints / name} holds no dualflow model"
            )
        return checkpoints / name
    steps = sorted(path for path in checkpoints.glob("step-*") if is_model_folder(path))
    if not steps:
        raise ValueError(
            f"{run} is a run without a finished model or a checkpoint yet; train it further first"
        )
    return max(steps, key=lambda path: int(re.sub(r"\D", "", path.name) or 0))


def _missing(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        return (
            f"there is no folder {name}; if this is the name of a model on a hub, "
            "download it yourself first: "
            f"dualflow reads local folders and never the network; {SUPPORTED}"
        )
    return f"there is no folder {name}; {SUPPORTED}"


def _file(path: Path) -> str:
    if path.suffix in _PICKLE_ENDINGS:
        what = "looks like a pickled checkpoint, which can run code when loaded; use safetensors"
    else:
        what = "is a file; expected the folder that holds config.json and model.safetensors"
    return f"{path} {what}; {SUPPORTED}"


def _no_config(folder: Path) -> str:
    return f"{folder} holds no config.json ({_listing(folder)}); {SUPPORTED}"


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        return "it is empty"
    return (
        "it holds "
        + ", ".join(names[:5])
        + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    )


def missing_weights(folder: Path) -> str:
    """Why a folder with a good config.json but no model.safetensors cannot be loaded."""
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_ENDINGS)
    if pickled:
        return (
            f"{folder} holds {pickled[0]}, a pickled checkpoint that can run code when loaded, "
            "and no model.safetensors; use safetensors"
        )
    return f"model.safetensors is missing in {folder} ({_listing(folder)})"
