"""A ``CausalLM`` as the kernel library takes it: pointers to its tensors, in the structs of
csrc/api.h.

The library packs the matrices into memory of its own; embeddings, gains, biases and coupling
vectors are read where they lie, so ``Packer.kept`` must live as long as the library's model does.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from dualflow.ops.native import library
from dualflow.ops.rope import rotary_table
from dualflow.spec import ModelConfig

_FLOATS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def unsupported(config: ModelConfig, weights: str) -> str | None:
    """Why the kernels cannot run such a model; None: they can, where they are compiled."""
    if config.variant not in ("standard", "dual"):
        return f"there are kernels for standard and dual models, and this is {config.variant}"
    if config.moe is not None:
        return "there are kernels for MLPs, and this model has mixtures of experts"
    if weights not in library.FORMATS:
        return f"weights are {weights}; the kernels take {', '.join(library.FORMATS)}"
    sizes = {
        "head_dim": config.head_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
    }
    for name, size in sizes.items():
        if size % 16:
            return f"{name} is {size}; the kernels take multiples of 16"
    return None


class Packer:
    """Builds the structs, and keeps alive what they point to.

    kept:  for the library's lifetime; ``passing``: until its model is built.
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.passing: list[Any] = []

    def matrix(self, module: Any, keep: bool = False) -> library.Matrix:
        """An ``nn.Linear``, ``nn.Embedding`` or their quantised kin; None gives an empty struct."""
        if module is None:
            return library.Matrix()
        weight: Tensor = module.weight.detach()
        scale, minimum = getattr(module, "weight_scale", None), getattr(module, "weight_min", None)
        if scale is None:
            kind, k = _FLOATS[weight.dtype], weight.shape[1]
        else:
            kind = "int8" if minimum is None else "int4"
            sizes = (getattr(module, name, None) for name in ("in_features", "embedding_dim"))
            k = next(size for size in sizes if size is not None)
        bias = getattr(module, "bias", None)
        return library.Matrix(
            library.FORMATS[kind], weight.shape[0], k, self._point(weight, keep),
            self._point(scale, keep), self._point(minimum, keep),
            None if bias is None else self._floats(bias, keep),
        )  # fmt: skip

    def gain(self, norm: nn.Module | None) -> library.Gain:
        """A norm's gain and bias; None gives an empty struct."""
        if norm is None:
            return library.Gain()
        bias, gain = getattr(norm, "bias", None), getattr(norm, "gain", norm.weight)
        assert isinstance(gain, Tensor)
        return library.Gain(self._floats(gain), None if bias is None else self._floats(bias))

    def own(self, module: Any, shared: Any) -> library.Own:
        """What a flow owns of the matrix ``shared``: a linear, a LoRA of it, or None."""
        if not hasattr(module, "lora_A"):
            return library.Own(whole=self.matrix(module))
        # They are multiplied with the rows that there are for the shared matrix.
        narrow = shared.weight.dtype == torch.bfloat16
        dtype = torch.bfloat16 if narrow else torch.float32
        a, b = (self._low_rank(m, dtype) for m in (module.lora_A, module.lora_B))
        return library.Own(a=a, b=b)

    def _low_rank(self, module: nn.Linear, dtype: torch.dtype) -> library.Matrix:
        weight = module.weight.detach().to(dtype)
        return library.Matrix(
            library.FORMATS[_FLOATS[weight.dtype]], *weight.shape, self._point(weight, False)
        )

    def vector(self, vector: Tensor | None) -> int | None:
        """A coupling vector."""
        return None if vector is None else self._floats(vector)

    def array(self, kind: Any, items: list[Any]) -> Any:
        """A C array of structs."""
        array = (kind * max(1, len(items)))(*items)
        self.passing.append(array)
        return array

    def _floats(self, tensor: Tensor, keep: bool = True) -> int:
        pointer = self._point(tensor.detach().float(), keep)
        assert pointer is not None
        return pointer

    def _point(self, tensor: Tensor | None, keep: bool) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        (self.kept if keep else self.passing).append(tensor)
        return tensor.data_ptr()


def model_spec(
    model: Any, packer: Packer, *, num_pages: int, page_size: int, kv_dtype: str, threads: int
) -> library.ModelSpec:
    """The whole model as one struct."""
    c: ModelConfig = model.config
    flows = list(model.model.aux)
    layers = [
        _layer(layer, packer, c.window_of(index)) for index, layer in enumerate(model.model.layers)
    ]
    aux = [
        _aux_layer(layer.aux[flow], layer, packer)
        for flow in range(len(flows))
        for layer in model.model.layers
    ]
    tables = [getattr(flow, "embed_tokens", None) or model.model.embed_tokens for flow in flows]
    heads = [packer.own(getattr(flow, "lm_head", None), model.lm_head) for flow in flows]
    positions = model.model.embed_positions
    alpha = getattr(model, "aux_readout", None)
    (cosines, sines), (local_cosines, local_sines) = _turns(c)
    return library.ModelSpec(
        vocab=c.vocab_size, width=c.hidden_size, heads=c.num_heads, kv_heads=c.kv_heads,
        head_dim=c.head_size, inner=c.intermediate_size, layers=c.num_layers, flows=len(flows),
        positions=c.max_position, mlp=library.MLPS[c.mlp], norm=library.NORMS[c.norm],
        readout=library.READOUTS[c.readout.kind], qk_row=c.qk_norm_span == "row",
        norm_eps=c.norm_eps, embed_scale=_embedding_scale(model),
        attention_scale=c.attention_scale or c.head_size**-0.5,
        attention_softcap=c.attention_softcap or 0, final_softcap=c.final_softcap or 0,
        page_size=page_size,
        pages=num_pages, kv_format=library.FORMATS[kv_dtype], threads=threads,
        final_norm=packer.gain(model.model.norm),
        embed=packer.matrix(model.model.embed_tokens, keep=True),
        head=packer.matrix(model.lm_head),
        embed_positions=None if positions is None else packer.vector(_dense(positions)),
        cosines=packer.vector(cosines), sines=packer.vector(sines),
        local_cosines=packer.vector(local_cosines), local_sines=packer.vector(local_sines),
        layer=packer.array(library.Layer, layers),
        aux_layer=packer.array(library.AuxLayer, aux),
        aux_embed=packer.array(library.Matrix, [packer.matrix(t, keep=True) for t in tables]),
        aux_final_norm=packer.array(
            library.Gain, [packer.gain(getattr(flow, "norm", None)) for flow in flows]
        ),
        aux_head=packer.array(library.Own, heads),
        alpha_weight=None if alpha is None else packer.vector(alpha.weight),
    )  # fmt: skip


def _turns(c: ModelConfig) -> list[tuple[Tensor, Tensor] | tuple[None, None]]:
    """Cosines and sines of every position; and those of layers with a window, where they differ."""
    if c.position != "rotary":
        return [(None, None), (None, None)]
    positions = torch.arange(c.max_position, dtype=torch.float32)
    turns: Any = [rotary_table(positions, c.head_size, c.rope_theta, c.rope_scaling), (None, None)]
    if c.local_rope_theta is not None:
        turns[1] = rotary_table(positions, c.head_size, c.local_rope_theta)
    return turns


def _embedding_scale(model: Any) -> float:
    """What token embeddings are multiplied by, rounded to the activations' format."""
    if not model.config.scale_embeddings:
        return 1.0
    return float(torch.tensor(model.config.hidden_size**0.5, dtype=model.dtype))


def _dense(table: Any) -> Tensor:
    """The weights of a matrix, quantised or not."""
    return table.dequantised() if hasattr(table, "dequantised") else table.weight


_NORMS = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention_output_norm": "attention_output_layernorm",
    "mlp_output_norm": "mlp_output_layernorm",
}


def _layer(layer: Any, packer: Packer, window: int | None) -> library.Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return library.Layer(
        **{name: packer.gain(getattr(layer, norm)) for name, norm in _NORMS.items()},
        q_norm=packer.gain(attention.q_norm), k_norm=packer.gain(attention.k_norm),
        q=packer.matrix(attention.q_proj), k=packer.matrix(attention.k_proj),
        v=packer.matrix(attention.v_proj), o=packer.matrix(attention.o_proj),
        gate=packer.matrix(mlp.gate_proj), up=packer.matrix(mlp.up_proj),
        down=packer.matrix(mlp.down_proj), window=window or 0,
    )  # fmt: skip


def _aux_layer(own: Any, layer: Any, packer: Packer) -> library.AuxLayer:
    shared = {
        "q": ("q_proj", layer.self_attn), "o": ("o_proj", layer.self_attn),
        "gate": ("gate_proj", layer.mlp), "up": ("up_proj", layer.mlp),
        "down": ("down_proj", layer.mlp),
    }  # fmt: skip
    matrices = {
        name: packer.own(getattr(own, module, None), getattr(place, module))
        for name, (module, place) in shared.items()
    }
    return library.AuxLayer(
        query=packer.vector(own.query_coupling),
        intermediate=packer.vector(own.intermediate_coupling),
        output=packer.vector(own.output_coupling),
        **{name: packer.gain(getattr(own, norm, None)) for name, norm in _NORMS.items()},
        q_norm=packer.gain(getattr(own, "q_norm", None)), **matrices,
    )  # fmt: skip


def new_model(spec: library.ModelSpec) -> tuple[Any, int]:
    """The library and a model's handle in it. Raises ``MemoryError`` or ``ValueError``."""
    kernels = library.load()
    error = ctypes.c_char_p()
    handle = kernels.df_model_new(ctypes.byref(spec), ctypes.byref(error))
    if not handle:
        message = (error.value or b"the kernels refused the model").decode()
        raise MemoryError(message) if "memory" in message else ValueError(message)
    return kernels, handle
