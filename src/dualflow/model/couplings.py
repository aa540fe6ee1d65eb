"""How the flows share and touch: shared or owned maps over all rows, and the vectors that couple
them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dualflow.model.flows import LoRA
from dualflow.model.rows import Rows


def per_flow(
    x_RC: Tensor,
    rows: Rows,
    shared: Callable[[Tensor], Tensor],
    owned: Sequence[Callable[[Tensor], Tensor] | None],
) -> Tensor:
    """Apply ``shared`` to all rows at once, or each flow's own module to its rows where it owns
    one.
    """
    if not rows.num_flows or all(module is None for module in owned):
        return shared(x_RC)
    blocks = rows.aux(x_RC).unbind(0)
    aux = [(module or shared)(block) for module, block in zip(owned, blocks, strict=True)]
    return rows.join(shared(rows.primary(x_RC)), torch.stack(aux))


def couple(
    x_RC: Tensor, rows: Rows, vectors: Sequence[Tensor | None], kept_AC: Tensor | None = None
) -> Tensor:
    """Add to each auxiliary row its flow's coupling vector times the primary's value at the pinned
    row.

    ``vectors`` holds one [C] vector per flow (None: that flow is not coupled here); ``kept_AC``
    stands in for the primary's rows where they are not part of this step. Primary rows pass through
    untouched.
    """
    if not rows.num_flows or all(vector is None for vector in vectors):
        return x_RC
    primary_AC = rows.pinned(rows.primary(x_RC)) if kept_AC is None else kept_AC
    blocks = rows.aux(x_RC).unbind(0)
    sums = [
        block if vector is None else block + vector.to(block.dtype) * primary_AC.to(block.dtype)
        for vector, block in zip(vectors, blocks, strict=True)
    ]
    if torch.is_grad_enabled():
        return rows.join(rows.primary(x_RC), torch.stack(sums))
    # Without gradients in place, so that the rows of a whole prompt are not copied for one more.
    rows.aux(x_RC).copy_(torch.stack(sums))
    return x_RC


def project(
    x_RC: Tensor, rows: Rows, shared: nn.Module, owned: Sequence[nn.Module | None]
) -> Tensor:
    """``shared`` over every row; a flow's LoRA is added to its rows, a flow's own matrix
    replaces the shared one.
    """
    if not any(isinstance(module, LoRA) for module in owned):
        return per_flow(x_RC, rows, shared, owned)
    y_RC = shared(x_RC)
    if not rows.num_flows:
        return y_RC
    blocks = zip(owned, rows.aux(x_RC), rows.aux(y_RC), strict=True)
    aux = [y if lora is None else y + lora(x) for lora, x, y in blocks]
    return rows.join(rows.primary(y_RC), torch.stack(aux))
