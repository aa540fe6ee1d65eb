"""A model whose matrices are held in 8 or 4 bits, for inference: ``quantise_model``.

Every linear and embedding matrix of both flows is quantised (``ops.quantised``); norms, biases,
couplings and LoRA stay as they are. Activations keep the number format they had: a quantised
matrix is dequantised to the format of what it is multiplied with.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from dualflow.model.flows import LoRA
from dualflow.ops import quantised
from dualflow.ops.quantised import Quantised
from dualflow.spec import QuantisedFormat

if TYPE_CHECKING:
    from dualflow.model.backbone import CausalLM

QUANTISED_TENSORS = ("weight", "weight_scale", "weight_min")


class QuantisedMatrix(nn.Module):
    """Buffers of one [O, K] matrix, as ``ops.quantised.Quantised`` describes them.

    weight:        int8 [O, K], or uint8 [O, ceil(K / 2)] for int4.
    weight_scale:  float16 [O, G]; no ``.to(dtype)`` changes it.
    weight_min:    float16 [O, G] for int4; None for int8.

    A new one has room for its values and none of them.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_min: Tensor | None

    def __init__(
        self, outputs: int, inputs: int, kind: QuantisedFormat, device: torch.device | None = None
    ) -> None:
        super().__init__()
        if kind not in get_args(QuantisedFormat):
            known = " or ".join(get_args(QuantisedFormat))
            raise ValueError(f"matrices cannot be quantised to {kind!r}; expected {known}")
        self.kind: QuantisedFormat = kind
        self._inputs = inputs

        def grid() -> Tensor:
            shape = (outputs, quantised.group_count(inputs))
            return torch.empty(shape, dtype=torch.float16, device=device)

        columns, code = (inputs, torch.int8) if kind == "int8" else (-(-inputs // 2), torch.uint8)
        codes = torch.empty((outputs, columns), dtype=code, device=device)
        self.register_buffer("weight", codes)
        self.register_buffer("weight_scale", grid())
        self.register_buffer("weight_min", grid() if kind == "int4" else None)

    @property
    def matrix(self) -> Quantised:
        """The buffers together."""
        return Quantised(self.weight, self.weight_scale, self.weight_min)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights as floats, [O, K]."""
        return quantised.dequantise(self.matrix, self._inputs, dtype)

    def assign(self, weight_OK: Tensor) -> None:
        """Quantise a float matrix into the buffers.

        Raises ``ValueError``: another shape, or values that cannot be quantised.
        """
        shape = (len(self.weight), self._inputs)
        if tuple(weight_OK.shape) != shape:
            raise ValueError(f"a matrix of shape {list(weight_OK.shape)}; expected {list(shape)}")
        matrix = quantised.quantise(weight_OK, self.kind)
        for buffer, values in zip(self.matrix, matrix, strict=True):
            if buffer is not None and values is not None:
                buffer.copy_(values)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantisedMatrix":
        """What ``.to`` and its like do; they may move the scales, and never convert them."""
        before = {name: self._buffers[name] for name in QUANTISED_TENSORS}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            moved = self._buffers[name]
            if tensor is not None and moved is not None and moved.dtype != tensor.dtype:
                self._buffers[name] = tensor.to(moved.device)
        return self


class QuantisedLinear(QuantisedMatrix):
    """``nn.Linear`` with a quantised matrix; the bias, where there is one, is a float parameter."""

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kind: QuantisedFormat,
        bias: nn.Parameter | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(out_features, in_features, kind, device)
        self.in_features, self.out_features = in_features, out_features
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return quantised.linear(x, self.matrix, self.bias)


class QuantisedEmbedding(QuantisedMatrix):
    """``nn.Embedding`` with a quantised table. ``dtype`` is the number format of what it gives:
    ``.to(dtype)`` sets it.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        kind: QuantisedFormat,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, kind, device)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        return quantised.embedding(ids, self.matrix, self.embedding_dim, self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantisedEmbedding":
        super()._apply(fn, recurse)
        # What is done to a float tensor, tried on one without elements.
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self


def quantise_model(model: "CausalLM", kind: QuantisedFormat) -> "CausalLM":
    """Quantise every matrix of ``model`` in place; returns it, in evaluation mode.

    A tied head stays one tensor with the embedding. The result is for inference; training refuses
    it.

    Raises ``ValueError``, the model being as it was: it is quantised already, or a matrix (named)
    holds values that cannot be; or it has experts, whose stacked matrices stay floats.
    """
    if model.config.moe is not None:
        raise ValueError(f"a model with experts cannot be made {kind} yet; use float32 or bfloat16")
    made: list[_Place] = []
    for place in _float_matrices(model):
        matrix = _quantised_like(place.module, kind)
        try:
            matrix.assign(place.module.weight)
        except ValueError as error:
            raise ValueError(f"{place.path}.weight: {error}") from error
        made.append(place._replace(module=matrix))
    return _install(model, kind, made)


def with_quantised_modules(model: "CausalLM", kind: QuantisedFormat) -> "CausalLM":
    """Put quantised matrices without values in the place of ``model``'s own: what reads a
    checkpoint fills them. On the meta device this takes no memory.

    Raises ``ValueError``: the model is quantised already.
    """
    made = [
        place._replace(module=_quantised_like(place.module, kind))
        for place in _float_matrices(model)
    ]
    return _install(model, kind, made)


def quantised_matrices(model: nn.Module) -> dict[str, QuantisedMatrix]:
    """The quantised modules of a model by name; a head tied to the embedding is left out."""
    found: dict[int, tuple[str, QuantisedMatrix]] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantisedMatrix):
            found.setdefault(id(module.weight), (name, module))
    return dict(found.values())


class _Place(NamedTuple):
    """A module and where it hangs: ``getattr(parent, name)``; ``path`` is its name in the model."""

    parent: nn.Module
    name: str
    path: str
    module: Any


def _float_matrices(model: "CausalLM") -> list[_Place]:
    """Every linear and embedding but LoRA's and a tied head."""
    if model.quantised is not None:
        raise ValueError(
            f"the model's matrices are {model.quantised} already; quantise the float model instead"
        )
    return [
        _Place(parent, name, f"{prefix}.{name}" if prefix else name, module)
        for prefix, parent in model.named_modules()
        if not isinstance(parent, LoRA)
        for name, module in parent.named_children()
        if isinstance(module, nn.Linear | nn.Embedding)
        and not (module is model.lm_head and model.config.tie_embeddings)
    ]


def _quantised_like(
    module: nn.Linear | nn.Embedding, kind: QuantisedFormat
) -> QuantisedLinear | QuantisedEmbedding:
    weight = module.weight
    if isinstance(module, nn.Linear):
        sizes = module.in_features, module.out_features
        return QuantisedLinear(*sizes, kind, module.bias, weight.device)
    sizes = module.num_embeddings, module.embedding_dim
    return QuantisedEmbedding(*sizes, kind, weight.dtype, weight.device)


def _install(model: "CausalLM", kind: QuantisedFormat, places: list[_Place]) -> "CausalLM":
    if model.config.tie_embeddings:
        sizes = model.config.hidden_size, model.config.vocab_size
        head = QuantisedLinear(*sizes, kind, device=torch.device("meta"))
        places = [*places, _Place(model, "lm_head", "lm_head", head)]
    for place in places:
        setattr(place.parent, place.name, place.module)
    model.tie_head()
    model.quantised = kind
    return model.eval()
