"""The small model that comes with the package, so that ``dualflow generate`` works at once.

``dualflow train --recipe shipped``, then copy ``runs/shipped/model`` to ``assets/tiny``.
"""

import dataclasses

from dualflow.recipes.demo import as_dual, demo
from dualflow.spec import PRESETS
from dualflow.train.config import RunConfig


def shipped() -> RunConfig:
    """As large as 2 MB of float32 weights allow; about eight minutes on one core."""
    base = demo("dual")
    size = dataclasses.replace(PRESETS["demo"], hidden_size=72, intermediate_size=216)
    return dataclasses.replace(
        base,
        name="shipped",
        model=as_dual(size),
        train=dataclasses.replace(base.train, steps=1000, eval_every=500, checkpoint_every=250),
    )
