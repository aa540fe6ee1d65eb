"""Our names of tensors and a family's, and where in a family's tensor one of ours lies."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
"""Our names of the two tensors that may be one; all families call the head so, too."""


class Slice(NamedTuple):
    """One of ``count`` equal parts of a module's output, where a family stores several in one."""

    module: str
    index: int
    count: int


class Location(NamedTuple):
    """Where one of our tensors lies: rows ``index`` of ``count`` equal parts of the tensor ``name``
    (after it is transposed, where it is stored so).
    """

    name: str
    index: int = 0
    count: int = 1
    transposed: bool = False


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a family calls its tensors; what is not named here is called as with us.

    prefix:     before every name but the head's; a model saved without its head lacks it.
    layers:     the list of layers.
    modules:    our module, inside a layer or outside of all, and theirs.
    transposed: their modules whose matrices are stored [inputs, outputs].
    buffers:    patterns of names of what old folders store beside parameters: masks, frequencies.
    """

    prefix: str = "model."
    layers: str = "layers"
    modules: Mapping[str, str | Slice] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    buffers: tuple[str, ...] = (r"(.+\.)?rotary_emb\.inv_freq",)

    def locate(self, ours: str) -> Location:
        """Where the tensor that we call ``ours`` lies, under its whole name."""
        module, _, kind = ours.rpartition(".")
        if ours == HEAD:
            return Location(HEAD)
        before = self.prefix
        if layer := re.match(r"model\.layers\.(\d+)\.", module):
            before += f"{self.layers}.{layer[1]}."
            module = module[layer.end() :]
        else:
            module = module.removeprefix("model.")
        theirs = self.modules.get(module, module)
        part = theirs if isinstance(theirs, Slice) else Slice(theirs, 0, 1)
        turned = kind == "weight" and part.module in self.transposed
        return Location(f"{before}{part.module}.{kind}", part.index, part.count, turned)

    @property
    def embedding(self) -> str:
        """Their name of the token embedding."""
        return self.locate(EMBEDDING).name

    def whole(self, stored: Collection[str]) -> dict[str, str]:
        """The names a folder stores, by the whole names of what is meant."""
        if any(name.startswith(self.prefix) for name in stored):
            return {name: name for name in stored}
        return {name if name == HEAD else self.prefix + name: name for name in stored}

    def is_buffer(self, name: str) -> bool:
        """Whether ``name`` holds no parameter, but what the model computes itself."""
        return any(re.fullmatch(pattern, name) for pattern in self.buffers)
