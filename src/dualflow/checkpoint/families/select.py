"""Which family a config.json is of, and which one can express a model of ours."""

from collections.abc import Mapping
from typing import Any

from dualflow.checkpoint.families.family import Family, differences
from dualflow.checkpoint.families.gemma import GEMMA
from dualflow.checkpoint.families.gemma2 import GEMMA2
from dualflow.checkpoint.families.gemma3 import GEMMA3
from dualflow.checkpoint.families.gpt2 import GPT2
from dualflow.checkpoint.families.llama import LLAMA
from dualflow.checkpoint.families.mistral import MISTRAL
from dualflow.checkpoint.families.mixtral import MIXTRAL
from dualflow.checkpoint.families.olmo2 import OLMO2
from dualflow.checkpoint.families.olmoe import OLMOE
from dualflow.checkpoint.families.qwen2 import QWEN2
from dualflow.checkpoint.families.qwen2_moe import QWEN2_MOE
from dualflow.checkpoint.families.qwen3 import QWEN3
from dualflow.checkpoint.families.qwen3_moe import QWEN3_MOE
from dualflow.spec import ModelConfig

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, GEMMA, GEMMA2, GEMMA3, GPT2, MIXTRAL, QWEN2_MOE,
        QWEN3_MOE, OLMOE,
    )
}  # fmt: skip
"""By config.json's ``model_type``; a model of ours is written as the first that can express it."""

SUPPORTED = f"supported: {', '.join(FAMILIES)}"

_LATENT = "its attention is multi-head latent attention (MLA), which no model here has"
_REASONS = {"deepseek_v2": _LATENT, "deepseek_v3": _LATENT}
"""Why a model is not supported that one might expect to be."""


def find_family(table: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ``ValueError`` in one line that says what was found and
    what is supported.
    """
    model_type, names = table.get("model_type"), table.get("architectures") or []
    if not isinstance(names, list) or len(names) > 1:
        raise ValueError(f"it names the architectures {names!r}; expected one; {SUPPORTED}")
    by_name = {name: family for family in FAMILIES.values() for name in family.architectures}
    if model_type is None and not names:
        raise ValueError(f"it has neither model_type nor architectures; {SUPPORTED}")
    family = by_name.get(str(names[0])) if model_type is None else FAMILIES.get(str(model_type))
    if family is None:
        found = [f"model_type {model_type!r}"] if model_type is not None else []
        found += [f"architecture {names[0]!r}"] if names else []
        why = _REASONS.get(str(model_type))
        reason = f" ({why})" if why else ""
        raise ValueError(
            f"it has {' and '.join(found)}, which is not supported{reason}; {SUPPORTED}"
        )
    if names and names[0] not in family.architectures:
        raise ValueError(
            f"its architecture is {names[0]!r}; of model_type {family.model_type!r} "
            f"{family.architectures[0]} is supported"
        )
    return family


def express(config: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """A family that has exactly the primary of ``config``, and its config.json.

    Raises ``ValueError`` naming the fields that stand in the way of the nearest one.
    """
    nearest: tuple[Family, list[str]] | None = None
    fewest: tuple[bool, int] | None = None
    for family in FAMILIES.values():
        table, other_kind = family.write(config), False
        try:
            theirs = family.read(table)
            wrong = differences(config, theirs, family.model_type)
            other_kind = (config.moe is None) != (theirs.moe is None)
        except ValueError as error:  # the family has no such sizes, or no such combination
            wrong = [str(error)]
        wrong += family.refuses(config)
        if not wrong:
            return family, table
        # With experts or without is further away than any number of other switches.
        if fewest is None or (other_kind, len(wrong)) < fewest:
            nearest, fewest = (family, wrong), (other_kind, len(wrong))
    assert nearest is not None
    raise ValueError(
        f"no supported Hugging Face family can express this model; the nearest is "
        f"{nearest[0].model_type}: {'; '.join(nearest[1])}"
    )
