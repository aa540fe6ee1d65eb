"""The kernel library by itself: products, structs, what it refuses, and doing without it."""

import ctypes
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualflow.engine import EngineConfig, build_engine
from dualflow.engine import native_executor as executors
from dualflow.engine.torch_executor import TorchExecutor
from dualflow.model import build_model
from dualflow.ops import quantised
from dualflow.ops.native import build, library, pack
from dualflow.spec import AuxConfig
from dualflow.testing import tiny_config
from dualflow.testing.tensors import seeded

HEADER = (build.SOURCES / "api.h").read_text(encoding="utf-8")
need_kernels = pytest.mark.skipif(
    library.why_missing() is not None, reason="the kernels are not compiled"
)
BASELINE: Any = None if library.why_missing() else library.load("baseline")

# ---- products ------------------------------------------------------------------------------------


class Case:
    """x [rows, k] and a matrix [n, k] in one of the formats, with a bias or without."""

    def __init__(self, kind: str, rows: int, n: int, k: int, bias: bool, size: float = 1) -> None:
        random = seeded(kind, rows, n, k)
        weight = torch.randn(n, k, generator=random)
        self.kind, self.n, self.k = kind, n, k
        self.x = torch.randn(rows, k, generator=random) * size
        self.bias = torch.randn(n, generator=random) if bias else None
        self.scale = self.minimum = None
        if kind in ("int8", "int4"):
            matrix = quantised.quantise(weight, kind)  # type: ignore[arg-type]
            self.data, self.scale, self.minimum = matrix
            self.weight = quantised.dequantise(matrix, k, torch.float64)
        else:
            self.data = weight.to(getattr(torch, kind))
            self.weight = self.data.double()

    def product(self, kernels: Any, threads: int = 1, repeats: int = 1) -> Tensor:
        """What the library makes of it, [rows, n]."""

        def point(tensor: Tensor | None) -> int | None:
            return None if tensor is None else tensor.data_ptr()

        matrix = library.Matrix(
            library.FORMATS[self.kind], self.n, self.k, point(self.data), point(self.scale),
            point(self.minimum), point(self.bias),
        )  # fmt: skip
        # A row behind the last, to see that nothing is written there.
        y = torch.full((len(self.x) + 1, self.n), math.pi)
        kernels.df_matmul(
            ctypes.byref(matrix), self.x.data_ptr(), len(self.x), y.data_ptr(), threads, repeats
        )
        assert torch.equal(y[-1], torch.full((self.n,), math.pi))
        return y[:-1]

    def check(self, y: Tensor) -> None:
        """Within what rounding the inputs, and nothing else, may make of every output."""
        x, large = self.x.double(), self.weight.abs()
        want = x @ self.weight.T + (0 if self.bias is None else self.bias.double())
        # Every input is off by a share of itself (bfloat16), or of the largest of its 32 (codes).
        error = x.abs() * (2.0**-8 if self.kind == "bfloat16" else 0)
        if self.scale is not None:
            groups = torch.nn.functional.pad(x, (0, -self.k % 32)).unflatten(1, (-1, 32))
            error = self._per_input(groups.abs().amax(-1)) * 2.0**-16
        if self.minimum is not None:  # it is the distance from there that is multiplied
            large = large + 2 * self._per_input(self.minimum.double().abs())
        allowed = error @ large.T + (x.abs() @ large.T + want.abs()) * 2.0**-20 + 1e-7
        excess = ((y.double() - want).abs() - allowed).max()
        assert excess <= 0, f"{excess:.2e} beyond what rounding explains"

    def _per_input(self, of_group: Tensor) -> Tensor:
        return of_group.repeat_interleave(32, 1)[:, : self.k]


kinds = st.sampled_from(sorted(library.FORMATS))


BUILT = library.FOLDER


def isas() -> list[str]:
    """The instruction sets that were compiled and can be run."""
    return ["baseline"] if library.why_missing() else isas_of(BUILT)


def isas_of(folder: Path) -> list[str]:
    best = library.ISAS.index(BASELINE.df_best_isa().decode())
    return [isa for isa in library.ISAS[: best + 1] if (folder / f"_kernels_{isa}.so").is_file()]


@need_kernels
@pytest.mark.parametrize("isa", isas())
@settings(max_examples=60, deadline=None)
@given(
    kind=kinds, rows=st.integers(1, 30), n=st.integers(1, 90), k=st.integers(1, 140),
    bias=st.booleans(), threads=st.integers(1, 3),
)  # fmt: skip
def test_a_product_is_that_of_the_dequantised_matrix(
    isa: str, kind: str, rows: int, n: int, k: int, bias: bool, threads: int
) -> None:
    case = Case(kind, rows, n, k, bias)
    case.check(case.product(library.load(isa), threads))


@need_kernels
@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", library.FORMATS)
def test_a_row_of_a_product_depends_on_that_row_alone(isa: str, kind: str) -> None:
    case = Case(kind, 27, 200, 130, True)
    whole, rows = case.product(library.load(isa), threads=2, repeats=2), case.x
    for count in (1, 2, 3, 4, 5, 6, 7, 13, 24):
        case.x = rows[3 : 3 + count].contiguous()
        assert torch.equal(case.product(library.load(isa)), whole[3 : 3 + count])


@need_kernels
@pytest.mark.parametrize("kind", library.FORMATS)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-5, 1e5, 1e30])
def test_inputs_of_any_size(kind: str, size: float) -> None:
    case = Case(kind, 3, 20, 70, False, size)
    y = case.product(library.load()) / (size or 1)
    case.x = case.x / (size or 1)
    case.check(y)


@need_kernels
@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("kind", library.FORMATS)
@pytest.mark.parametrize("column", [0, 5, 16, 33, 69])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible_in_its_own_row(
    isa: str, kind: str, column: int, value: float
) -> None:
    case = Case(kind, 3, 20, 70, True)
    clean = case.product(library.load(isa))
    case.x[1, column] = value
    y = case.product(library.load(isa))
    assert not y[1].isfinite().any()
    assert torch.equal(y[::2], clean[::2])


# ---- structs -------------------------------------------------------------------------------------

STRUCTS = {
    "DfMatrix": library.Matrix, "DfGain": library.Gain, "DfLayer": library.Layer,
    "DfOwn": library.Own, "DfAuxLayer": library.AuxLayer, "DfModelSpec": library.ModelSpec,
    "DfStep": library.Step,
}  # fmt: skip
SCALARS = {"int32_t": ctypes.c_int32, "float": ctypes.c_float}


def fields_in_header(name: str) -> Iterator[tuple[str, str, bool]]:
    """(field, type, whether it is a pointer) of a struct of api.h, in order."""
    found = re.search(r"typedef struct \{([^{}]*)\} " + name + ";", HEADER)
    assert found, f"api.h has no {name}"
    for declaration in re.sub(r"//[^\n]*", "", found[1]).split(";"):
        if not declaration.strip():
            continue
        kind, rest = re.fullmatch(r"(?:const )?(\w+) (.*)", declaration.strip(), re.S).groups()  # type: ignore[union-attr]
        for item in rest.split(","):
            yield item.strip().lstrip("* "), kind, "*" in item


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_are_those_of_the_header(name: str) -> None:
    struct = STRUCTS[name]
    mine = [(field[0], field[1]) for field in struct._fields_]
    header = list(fields_in_header(name))
    assert [field for field, _ in mine] == [field for field, _, _ in header]
    for (field, kind), (_, in_c, is_pointer) in zip(mine, header, strict=True):
        if is_pointer:
            assert ctypes.sizeof(kind) == ctypes.sizeof(ctypes.c_void_p), field
        else:
            assert kind is (SCALARS.get(in_c) or STRUCTS.get(in_c)), field


def test_sizes_are_those_that_a_compiler_lays_out() -> None:
    sizes = {name: ctypes.sizeof(struct) for name, struct in STRUCTS.items()}
    assert sizes["DfMatrix"] == 48
    assert sizes["DfLayer"] == 6 * 16 + 7 * 48 + 8
    assert sizes["DfAuxLayer"] == 3 * 8 + 5 * 16 + 5 * 3 * 48
    assert sizes["DfStep"] == 24 + 19 * 8


def test_numbers_are_those_of_the_header() -> None:
    for names, enum in (
        (library.FORMATS, "DfFormat"), (library.MLPS, "DfMlp"), (library.NORMS, "DfNorm"),
        (library.READOUTS, "DfReadout"),
    ):  # fmt: skip
        found = re.search(rf"enum {enum} \{{(.*?)\}}", HEADER)
        assert found
        assert [int(x) for x in re.findall(r"= (\d+)", found[1])] == list(names.values())


@need_kernels
def test_every_function_of_the_header_is_there() -> None:
    kernels = library.load()
    for name in re.findall(r"\b(df_\w+)\(", HEADER):
        assert getattr(kernels, name)


# ---- what is refused -----------------------------------------------------------------------------

SIXTEENS = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 48}


@pytest.mark.parametrize(
    ("variant", "changes", "weights", "reason"),
    [
        ("dual", {}, "float32", None),
        ("standard", {}, "int4", None),
        ("phd2", {}, "float32", "there are kernels for standard and dual models, .* phd2"),
        ("two_softmax", {}, "float32", "this is two_softmax"),
        ("dual", {"aux": AuxConfig(owns=("mlp",))}, "float32", None),
        ("dual", {}, "float64", "weights are float64; the kernels take float32, bfloat16, int8"),
        ("dual", {"head_dim": 8}, "float32", "head_dim is 8; the kernels take multiples of 16"),
        ("dual", {"hidden_size": 40, "head_dim": 16}, "float32", "hidden_size is 40"),
        ("dual", {"intermediate_size": 44}, "float32", "intermediate_size is 44"),
    ],
)
def test_it_says_what_it_cannot_run(
    variant: Any, changes: dict[str, Any], weights: str, reason: str | None
) -> None:
    got = pack.unsupported(tiny_config(variant, **(SIXTEENS | changes)), weights)
    assert (got is None) == (reason is None)
    if reason is not None:
        assert re.search(reason, got or "")


@need_kernels
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_dtype": "float64"}, "the cache is float64; the kernels take float32, bfloat16"),
        ({"page_size": 8}, "the page size must be 16, 32, 64, 128 or 256"),
        ({"page_size": 48}, "the page size must be"),
        ({"threads": -1}, "at least one thread"),
    ],
)
def test_an_executor_says_what_it_cannot_do(changes: dict[str, Any], reason: str) -> None:
    model = build_model(tiny_config("dual", **SIXTEENS))
    settings: dict[str, Any] = {"num_pages": 4, "kv_dtype": "float32"}
    with pytest.raises(ValueError, match=reason):
        executors.NativeExecutor(model, **(settings | changes))


# ---- doing without it ----------------------------------------------------------------------------


@pytest.fixture
def no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package as it is where nothing could be compiled."""
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    library.load.cache_clear()
    yield tmp_path
    library.load.cache_clear()


def test_a_missing_library_is_explained(no_kernels: Path) -> None:
    with pytest.raises(library.KernelsMissingError, match=r"compiled: none.*native.build"):
        library.load()
    assert "were not compiled" in (library.why_missing() or "")


def test_a_library_that_cannot_be_loaded_is_explained(no_kernels: Path) -> None:
    (no_kernels / "_kernels_baseline.so").write_bytes(b"not a library")
    with pytest.raises(library.KernelsMissingError, match="cannot be loaded"):
        library.load()


def test_without_it_auto_takes_torch_and_native_says_why(no_kernels: Path) -> None:
    model = build_model(tiny_config("dual", **SIXTEENS))
    engine = build_engine(model, None, EngineConfig(num_pages=8))
    assert isinstance(engine._executor, TorchExecutor)
    assert engine.config.backend == "torch"
    with pytest.raises(ValueError, match=r"backend is 'native'.*were not compiled"):
        build_engine(model, None, EngineConfig(num_pages=8, backend="native"))


@need_kernels
def test_an_instruction_set_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library.load.cache_clear()
    try:
        monkeypatch.setenv("DUALFLOW_ISA", "baseline")
        assert library.load().df_isa() == b"baseline"
        library.load.cache_clear()
        monkeypatch.setenv("DUALFLOW_ISA", "mmx")
        with pytest.raises(library.KernelsMissingError, match=r"'mmx' were not compiled \(comp"):
            library.load()
    finally:
        library.load.cache_clear()


@need_kernels
def test_the_best_that_was_compiled_is_taken(
    no_kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the compiler is too old for the newest instructions."""
    for isa in isas_of(BUILT)[:2]:
        (no_kernels / f"_kernels_{isa}.so").symlink_to(BUILT / f"_kernels_{isa}.so")
    assert library.load().df_isa().decode() == isas_of(BUILT)[:2][-1]


def test_what_the_machine_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def df_best_isa(self) -> bytes:
            return b"avx2"

    monkeypatch.setattr(library, "_open", lambda isa: Old())
    library.load.cache_clear()
    with pytest.raises(library.KernelsMissingError, match=r"cannot run the avx512 .* baseline, av"):
        library.load("avx512")
    library.load.cache_clear()


@need_kernels
def test_each_library_was_compiled_for_what_its_name_says() -> None:
    for isa in isas():
        assert library.load(isa).df_isa().decode() == isa


class TestBuild:
    def test_without_a_compiler_it_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert build.compiler() is None
        with pytest.raises(RuntimeError, match=r"no C\+\+ compiler was found"):
            build.compile_kernels("baseline", tmp_path / "k.so")

    def test_a_compiler_that_is_not_there_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
        with pytest.raises(RuntimeError, match=r"no-compiler' cannot be run"):
            build.compile_kernels("baseline", tmp_path / "k.so")

    def test_a_compiler_that_fails_leaves_nothing_behind(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = tmp_path / "cc"
        script.write_text("#!/bin/sh\necho 'kernels.cpp:1: error: too old' >&2\nexit 1\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        with pytest.raises(RuntimeError, match="could not compile the baseline.*too old"):
            build.compile_kernels("baseline", tmp_path / "out" / "k.so")
        assert list((tmp_path / "out").iterdir()) == []

    def test_a_machine_that_is_not_known_gets_the_baseline(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
        assert build.instruction_sets() == {"baseline": ()}
        monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
        assert next(iter(build.instruction_sets())) == "baseline"
