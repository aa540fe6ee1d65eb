"""Our names of tensors and a family's, and where in a family's tensor one of ours lies."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dualflow.spec import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
"""Our names of the two tensors that may be one; all families call the head so, too."""


class Slice(NamedTuple):
    """One of ``count`` equal parts of a module's output, where a family stores several in one. Of
    experts' matrices, of every expert's.
    """

    module: str
    index: int
    count: int


class Location(NamedTuple):
    """Where one of our tensors lies: rows ``index`` of ``count`` equal parts of the tensor ``name``
    (after it is transposed, where it is stored so).

    expert:  the tensor holds this one of the matrices that we stack; None: all of ours.
    """

    name: str
    index: int = 0
    count: int = 1
    transposed: bool = False
    expert: int | None = None

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of the tensor ``name``, from those of ours."""
        sizes = list(ours if self.expert is None else ours[1:])
        sizes[rows_axis(len(sizes))] *= self.count
        return tuple(reversed(sizes)) if self.transposed else tuple(sizes)


def rows_axis(dimensions: int) -> int:
    """The axis that counts the outputs of a vector, of a matrix, or of a stack of matrices."""
    return max(dimensions - 2, 0)


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a family calls its tensors; what is not named here is called as with us.

    prefix:     before every name but the head's; a model saved without its head lacks it.
    layers:     the list of layers.
    modules:    our module, inside a layer or outside of all, and theirs.
    with_experts: the same, in layers with experts alone.
    stacked:    our tensor, inside a layer, that stacks every expert's matrix, and theirs: one name
                with ``{}`` for the number of the expert, or a stack as ours.
    transposed: their modules whose matrices are stored [inputs, outputs].
    buffers:    patterns of names of what old folders store beside parameters: masks, frequencies.
    sign:       how the name of a tensor ends that no folder has whose tensors are called otherwise.
    """

    prefix: str = "model."
    layers: str = "layers"
    modules: Mapping[str, str | Slice] = field(default_factory=dict)
    with_experts: Mapping[str, str] = field(default_factory=dict)
    stacked: Mapping[str, str | Slice] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    buffers: tuple[str, ...] = (r"(.+\.)?rotary_emb\.inv_freq",)
    sign: str = ""

    def locate(self, ours: str, config: ModelConfig) -> list[Location]:
        """Where the tensor of ``config`` that we call ``ours`` lies, under its whole name: in one
        tensor of theirs, or in one for each expert.
        """
        if ours == HEAD:
            return [Location(HEAD)]
        layer = re.match(r"model\.layers\.(\d+)\.", ours)
        if layer is None:
            return [self._inside(self.prefix, ours.removeprefix("model."), self.modules)]
        before, inner = f"{self.prefix}{self.layers}.{layer[1]}.", ours[layer.end() :]
        if inner in self.stacked:
            return self._stacked(before, self.stacked[inner], config)
        modules = self.modules
        if config.has_experts(int(layer[1])):
            modules = {**modules, **self.with_experts}
        return [self._inside(before, inner, modules)]

    def _inside(self, before: str, inner: str, modules: Mapping[str, str | Slice]) -> Location:
        module, _, kind = inner.rpartition(".")
        part = _slice(modules.get(module, module))
        turned = kind == "weight" and part.module in self.transposed
        return Location(f"{before}{part.module}.{kind}", part.index, part.count, turned)

    def _stacked(self, before: str, theirs: str | Slice, config: ModelConfig) -> list[Location]:
        assert config.moe is not None
        part = _slice(theirs)
        if "{}" not in part.module:
            return [Location(before + part.module, part.index, part.count)]
        return [
            Location(before + part.module.format(expert), part.index, part.count, expert=expert)
            for expert in range(config.moe.num_experts)
        ]

    def count_separate(self, config: ModelConfig) -> int:
        """Experts of all layers that have tensors of their own."""
        separate = any("{}" in _slice(theirs).module for theirs in self.stacked.values())
        if config.moe is None or not separate:
            return 0
        return config.moe.num_experts * (config.num_layers - len(set(config.moe.dense_layers)))

    @property
    def embedding(self) -> str:
        """Their name of the token embedding."""
        return self._inside(self.prefix, EMBEDDING.removeprefix("model."), self.modules).name

    def but(self, **changes: Any) -> "Names":
        """The same with ``changes`` to its fields."""
        return dataclasses.replace(self, **changes)

    def whole(self, stored: Collection[str]) -> dict[str, str]:
        """The names a folder stores, by the whole names of what is meant."""
        if any(name.startswith(self.prefix) for name in stored):
            return {name: name for name in stored}
        return {name if name == HEAD else self.prefix + name: name for name in stored}

    def is_buffer(self, name: str) -> bool:
        """Whether ``name`` holds no parameter, but what the model computes itself."""
        return any(re.fullmatch(pattern, name) for pattern in self.buffers)


def _slice(theirs: str | Slice) -> Slice:
    return theirs if isinstance(theirs, Slice) else Slice(theirs, 0, 1)
