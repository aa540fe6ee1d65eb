"""The compiled kernels, through ctypes: finding the library, and the structs of csrc/api.h.

There is one library for every instruction set (``build.py`` compiles them); the best that this
machine runs is loaded. Where there is none, ``load`` says why and the torch path serves.
"""

import ctypes
import functools
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
MLPS = {"swiglu": 0, "geglu": 1, "gelu": 2, "relu2": 3}
NORMS = {"rmsnorm": 0, "layernorm": 1}
ISAS = ("baseline", "avx2", "avx512", "avx512bf16")
"""Instruction sets; who runs one runs those before it."""
READOUTS = {"mixture": 0, "aux_only": 1, "primary_only": 2, "learned": 3}


class KernelsMissingError(RuntimeError):
    """There is no compiled library that this machine can run; the message says how to get one."""


class Matrix(Structure):
    _fields_ = [
        ("format", c_int32), ("n", c_int32), ("k", c_int32), ("data", c_void_p),
        ("scale", c_void_p), ("minimum", c_void_p), ("bias", c_void_p),
    ]  # fmt: skip


class Gain(Structure):
    _fields_ = [("gain", c_void_p), ("bias", c_void_p)]


_NORMS = ("attention_norm", "mlp_norm", "attention_output_norm", "mlp_output_norm", "q_norm")


class Layer(Structure):
    _fields_ = [
        *((name, Gain) for name in (*_NORMS, "k_norm")),
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        ("window", c_int32),
    ]  # fmt: skip


class Own(Structure):
    _fields_ = [(name, Matrix) for name in ("whole", "a", "b")]


class AuxLayer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("query", "intermediate", "output")),
        *((name, Gain) for name in _NORMS),
        *((name, Own) for name in ("q", "o", "gate", "up", "down")),
    ]  # fmt: skip


class ModelSpec(Structure):
    _fields_ = [
        *((name, c_int32) for name in (
            "vocab", "width", "heads", "kv_heads", "head_dim", "inner", "layers", "flows",
            "positions", "mlp", "norm", "readout", "qk_row",
        )),
        *((name, c_float) for name in (
            "norm_eps", "embed_scale", "attention_scale", "attention_softcap", "final_softcap",
        )),
        *((name, c_int32) for name in ("page_size", "pages", "kv_format", "threads")),
        ("final_norm", Gain), ("embed", Matrix), ("head", Matrix), ("embed_positions", c_void_p),
        ("cosines", c_void_p), ("sines", c_void_p), ("local_cosines", c_void_p),
        ("local_sines", c_void_p), ("layer", POINTER(Layer)),
        ("aux_layer", POINTER(AuxLayer)), ("aux_embed", POINTER(Matrix)),
        ("aux_final_norm", POINTER(Gain)), ("aux_head", POINTER(Own)), ("alpha_weight", c_void_p),
    ]  # fmt: skip


class Step(Structure):
    _fields_ = [(name, c_int32) for name in ("tokens", "aux", "sequences", "reads", "keep")] + [
        (name, c_void_p)
        for name in (
            "token", "position", "slot", "aux_token", "aux_position", "aux_pin", "row_end",
            "aux_end", "page", "page_begin", "read", "aux_of_read", "log_p", "log_q", "log_r",
            "alpha", "complement", "sureness", "best",
        )
    ]  # fmt: skip


@functools.cache
def load(isa: str | None = None) -> Any:
    """The library for this machine, or for the instruction set ``isa`` (for tests), its functions
    declared.

    Raises ``KernelsMissingError``. ``DUALFLOW_ISA`` names an instruction set to use instead of the
    best.
    """
    best = _open("baseline").df_best_isa().decode()
    runs = ISAS[: ISAS.index(best) + 1]
    named = isa or os.environ.get("DUALFLOW_ISA")
    if named in ISAS and named not in runs:
        raise KernelsMissingError(
            f"this machine cannot run the {named} kernels; it runs {', '.join(runs)}"
        )
    if named is None:  # an old compiler may not have known the best
        named = next(isa for isa in reversed(runs) if _path(isa).is_file())
    return _open(named)


def why_missing() -> str | None:
    """Why there are no kernels here; None: there are."""
    try:
        load()
    except KernelsMissingError as error:
        return str(error)
    return None


def _path(isa: str) -> Path:
    return FOLDER / f"_kernels_{isa}.so"


def _open(isa: str) -> Any:
    path = _path(isa)
    if not path.is_file():
        have = ", ".join(sorted(p.stem.removeprefix("_kernels_") for p in FOLDER.glob("*.so")))
        raise KernelsMissingError(
            f"the C++ kernels for {isa!r} were not compiled (compiled: {have or 'none'}); with a "
            "C++20 compiler (g++ or clang++) they are by: python -m dualflow.ops.native.build"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsMissingError(f"the C++ kernels cannot be loaded: {error}") from error
    same = getattr(library, "df_layout", lambda: 0)()
    if same != _layout():
        raise KernelsMissingError(
            f"the C++ kernels for {isa!r} were compiled from another version of dualflow; compile "
            "them again: python -m dualflow.ops.native.build"
        )
    return _declare(library)


def _layout() -> int:
    """The number that a library with the same structs gives."""
    number = 0
    for struct in (ModelSpec, Layer, AuxLayer, Step):
        number = number * 61 + ctypes.sizeof(struct) // 4
    return number % 0x7FFFFFFF


def _declare(library: Any) -> Any:
    library.df_isa.restype = c_char_p
    library.df_best_isa.restype = c_char_p
    library.df_model_new.argtypes = [POINTER(ModelSpec), POINTER(c_char_p)]
    library.df_model_new.restype = c_void_p
    library.df_model_free.argtypes = [c_void_p]
    for name in ("df_model_weight_bytes", "df_model_cache_bytes"):
        getattr(library, name).argtypes = [c_void_p]
        getattr(library, name).restype = c_int64
    library.df_step.argtypes = [c_void_p, POINTER(Step)]
    library.df_step.restype = None
    library.df_copy_page.argtypes = [c_void_p, c_int32, c_int32]
    library.df_copy_page.restype = None
    library.df_matmul.argtypes = [
        POINTER(Matrix), c_void_p, c_int32, c_void_p, c_int32, c_int32,
    ]  # fmt: skip
    library.df_matmul.restype = None
    return library
