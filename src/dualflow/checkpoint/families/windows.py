"""Sliding windows in config.json: how wide, and in which layers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dualflow.checkpoint.families.keys import whole_number
from dualflow.spec import ModelConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class EveryLayer:
    """``sliding_window`` holds for all layers; null: none slides (Mistral)."""

    @property
    def keys(self) -> frozenset[str]:
        return frozenset({"sliding_window"})

    def read(self, table: Mapping[str, Any]) -> dict[str, Any]:
        return {"sliding_window": table["sliding_window"]}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": config.sliding_window}


@dataclass(frozen=True)
class SwitchedWindow:
    """``sliding_window`` holds for all layers where ``use_sliding_window`` is true (Qwen 3 MoE).

    Of a ``max_window_layers`` above 0 readers make different things there, so it is refused.
    """

    @property
    def keys(self) -> frozenset[str]:
        return frozenset({"sliding_window", "use_sliding_window", "max_window_layers"})

    def read(self, table: Mapping[str, Any]) -> dict[str, Any]:
        if not _switch(table, "use_sliding_window"):
            return {"sliding_window": None}
        if table.get("max_window_layers"):
            raise ValueError(
                f"max_window_layers = {table['max_window_layers']!r} is not supported where "
                "use_sliding_window is true (expected 0)"
            )
        return {"sliding_window": table["sliding_window"]}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        window = config.sliding_window
        return {"use_sliding_window": window is not None, "sliding_window": window}


@dataclass(frozen=True)
class LayerTypes:
    """``layer_types`` names what each layer does.

    slides:  whether a layer does where there is no such list: from config.json and its number.
    rule:    the keys that ``slides`` reads.
    switch:  a key that must be true for any window to hold.
    """

    slides: Callable[[Mapping[str, Any], int], bool]
    rule: tuple[str, ...] = ()
    switch: str | None = None

    @property
    def keys(self) -> frozenset[str]:
        switch = [self.switch] if self.switch else []
        return frozenset({"sliding_window", "layer_types", *self.rule, *switch})

    def read(self, table: Mapping[str, Any]) -> dict[str, Any]:
        window = table["sliding_window"]
        if self.switch is not None and not _switch(table, self.switch):
            window = None
        types = table.get("layer_types")
        if types is not None:
            layers = _sliding(types, table["num_hidden_layers"])
        elif window is None and self.switch is not None:
            layers = []
        else:
            layers = [
                layer
                for layer in range(whole_number(table, "num_hidden_layers"))
                if self.slides(table, layer)
            ]
        if not layers:
            return {"sliding_window": None, "sliding_layers": None, "local_rope_theta": None}
        if window is None:
            raise ValueError(f"layer {layers[0]} has a sliding window, but none is given its size")
        whole = len(layers) == table["num_hidden_layers"]
        return {"sliding_window": window, "sliding_layers": None if whole else layers}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        types = [
            _FULL if config.window_of(layer) is None else _SLIDING
            for layer in range(config.num_layers)
        ]
        table: dict[str, Any] = {"layer_types": types}
        if self.switch is not None:
            table[self.switch] = _SLIDING in types
        # transformers wants a size where no layer has a window, too.
        return {**table, "sliding_window": config.sliding_window or config.max_position}


def _sliding(types: Any, count: Any) -> list[int]:
    if not isinstance(types, list) or len(types) != count:
        found = f"{len(types)} entries" if isinstance(types, list) else repr(types)
        raise ValueError(f"layer_types has {found}; expected one for each of {count} layers")
    for layer, kind in enumerate(types):
        if kind not in (_FULL, _SLIDING):
            raise ValueError(
                f"layer_types[{layer}] = {kind!r} is not supported (expected {_FULL} or {_SLIDING})"
            )
    return [layer for layer, kind in enumerate(types) if kind == _SLIDING]


def _switch(table: Mapping[str, Any], key: str) -> bool:
    value = table[key]
    if type(value) is not bool:
        raise ValueError(f"{key} = {value!r}; expected true or false")
    return value


def past_first_layers(table: Mapping[str, Any], layer: int) -> bool:
    """Qwen: from layer ``max_window_layers`` on."""
    return layer >= _first_layers(table)


def every_second_of_first_layers(table: Mapping[str, Any], layer: int) -> bool:
    """Qwen 2 MoE: the first, the third, ... below layer ``max_window_layers``."""
    return layer % 2 == 0 and layer < _first_layers(table)


def _first_layers(table: Mapping[str, Any]) -> int:
    first = table["max_window_layers"]
    if type(first) is not int:
        raise ValueError(f"max_window_layers = {first!r}; expected a whole number")
    return first


def every_second(table: Mapping[str, Any], layer: int) -> bool:
    """Gemma 2: the first, the third, ..."""
    return layer % 2 == 0


def all_but_each_nth(table: Mapping[str, Any], layer: int) -> bool:
    """Gemma 3: all but every ``sliding_window_pattern``-th."""
    return (layer + 1) % whole_number(table, "sliding_window_pattern") != 0
