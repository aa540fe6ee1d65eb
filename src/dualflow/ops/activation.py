"""What the MLP does between its matrices."""

import torch.nn.functional as F
from torch import Tensor


def mlp_intermediate(kind: str, gate: Tensor | None, up: Tensor) -> Tensor:
    """act(gate) * up for the gated kinds (Shazeer 2020), act(up) for the others; GELU is the
    tanh form of GPT-2.
    """
    match kind, gate:
        case "swiglu", Tensor():
            return F.silu(gate) * up
        case "geglu", Tensor():
            return F.gelu(gate, approximate="tanh") * up
        case "gelu", None:
            return F.gelu(up, approximate="tanh")
        case "relu2", None:
            return F.relu(up).square()
    raise AssertionError(f"mlp kind {kind!r} with gate {gate is not None}")
