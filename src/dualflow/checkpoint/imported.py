"""What an importer makes of a file or folder of another format."""

from dataclasses import dataclass, field
from typing import Any

from dualflow.model import CausalLM


@dataclass(frozen=True)
class Imported:
    """A model in eval mode, and what belongs to it.

    companions:      texts of ``companions.COMPANIONS`` by file name.
    primary_config:  the family's own config.json, word for word; None: the source had none.
    """

    model: CausalLM
    companions: dict[str, str] = field(default_factory=dict)
    primary_config: dict[str, Any] | None = None
