"""The families of Hugging Face checkpoints that are read and written: one small file each, plain
data. No torch here.

A family says what its config.json means (``fields``, ``parts``, ``defaults``, ``neutral``), which
switches of ``spec.ModelConfig`` all its models have, and what its tensors are called. To add one,
write its file and put it into ``select.FAMILIES``.
"""

from dualflow.checkpoint.families.family import Family, canonical, differences
from dualflow.checkpoint.families.names import HEAD, Location, Names, rows_axis
from dualflow.checkpoint.families.select import FAMILIES, SUPPORTED, express, find_family

__all__ = [
    "FAMILIES", "HEAD", "SUPPORTED", "Family", "Location", "Names", "canonical", "differences",
    "express", "find_family", "rows_axis",
]  # fmt: skip
