"""The weights of a Hugging Face folder: one safetensors file, or several and their index. Headers
are checked before anything is read; pickled weights are never opened.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from dualflow.checkpoint.locate import read_json
from dualflow.checkpoint.tensors import TensorEntry, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_PICKLED = ("pytorch_model*.bin", "*.bin", "*.pt", "*.pth", "*.ckpt")


class StoredWeights:
    """Tensors of a folder by the names they are stored under.

    Raises ``ValueError`` in one line that names the file: none of safetensors, a missing shard, a
    damaged header, an index that does not fit its files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        headers = _headers(folder)
        self.entries: dict[str, TensorEntry] = {}
        self._files: dict[str, str] = {}
        for file, header in headers.items():
            for name, entry in header.items():
                if name in self.entries:
                    raise ValueError(f"{folder}: {name} is in {self._files[name]} and in {file}")
                self.entries[name], self._files[name] = entry, file
        self._open: dict[str, Any] = {}

    def place(self, name: str) -> tuple[str, int]:
        """The file of a tensor and where in it: what to sort by to read front to back."""
        return self._files[name], self.entries[name].begin

    def read(self, name: str) -> Tensor:
        """One tensor; it may share memory with the file, so copy what is kept."""
        file = self._files[name]
        try:
            if file not in self._open:  # one at a time, so that a shard is let go when it is done
                handle = safetensors.safe_open(self._folder / file, framework="pt")
                self._open = {file: handle}
            return self._open[file].get_tensor(name)
        except (safetensors.SafetensorError, OSError, RuntimeError) as error:
            raise ValueError(f"{self._folder / file}: {name} cannot be read: {error}") from error


def _headers(folder: Path) -> dict[str, dict[str, TensorEntry]]:
    if (folder / SINGLE).exists():
        return {SINGLE: read_header(folder / SINGLE)}
    if not (folder / INDEX).exists():
        raise ValueError(_missing(folder))
    named = _weight_map(folder)
    headers = {file: read_header(folder / file) for file in sorted(set(named.values()))}
    for file, header in headers.items():
        listed = {name for name, where in named.items() if where == file}
        if wrong := sorted(listed ^ header.keys()):
            raise ValueError(
                f"{folder / INDEX} does not fit {file}: {', '.join(wrong[:4])} "
                f"{'is' if len(wrong) == 1 else 'are'} in one of them alone"
            )
    return headers


def _weight_map(folder: Path) -> Mapping[str, str]:
    named = read_json(folder / INDEX).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise ValueError(f"{folder / INDEX} has no weight_map of tensors and their files")
    for file in set(map(str, named.values())):
        # The index must not lead out of the folder.
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{folder / INDEX} names {file!r}; expected a safetensors file in it")
        if not (folder / file).is_file():
            raise ValueError(f"{folder / file} is missing, and {INDEX} names it")
    return {name: str(file) for name, file in named.items()}


def _missing(folder: Path) -> str:
    pickled = next((path.name for glob in _PICKLED for path in sorted(folder.glob(glob))), None)
    if pickled:
        return (
            f"{folder} holds {pickled}, a pickled checkpoint that can run code when it is loaded, "
            f"and no {SINGLE}; where you trust it, load it with transformers and save it again: "
            "save_pretrained writes safetensors"
        )
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        return f"{folder} holds {shards[0]}, but neither {SINGLE} nor {INDEX}"
    return f"{folder} holds no {SINGLE}"
