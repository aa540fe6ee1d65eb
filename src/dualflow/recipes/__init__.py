"""Named complete runs: functions that return a configuration. TOML and ``--set`` override it."""

import difflib
from collections.abc import Callable

from dualflow.recipes.demo import demo
from dualflow.recipes.matched_tokens import EQUAL_FLOPS, LADDER, matched_tokens
from dualflow.recipes.retrofit import retrofit
from dualflow.recipes.shipped import shipped
from dualflow.train.config import RunConfig

__all__ = ["RECIPES", "demo", "matched_tokens", "recipe", "retrofit", "shipped"]

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "demo-standard": lambda: demo("standard"),
    "demo-dual": lambda: demo("dual"),
    "retrofit": retrofit,
    "shipped": shipped,
    **{
        f"matched-tokens-{name}": lambda name=name: matched_tokens(name)
        for name in (*LADDER, EQUAL_FLOPS)
    },
}
"""What ``dualflow train --recipe`` knows."""


def recipe(name: str) -> RunConfig:
    """The recipe ``name`` with seed 0; raises ``ValueError`` with the known names."""
    if name in RECIPES:
        return RECIPES[name]()
    close = difflib.get_close_matches(name, RECIPES, n=1)
    advice = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(RECIPES)}"
    raise ValueError(f"there is no recipe {name!r}; {advice}")
