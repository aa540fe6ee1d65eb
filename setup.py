"""What pyproject.toml cannot say: the C++ kernels are compiled where there is a compiler.

Without one, or where it fails, the installation goes on without kernels: the engine then computes
with PyTorch.
"""

import importlib.util
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOM = Path(__file__).parent / "src" / "dualflow" / "ops" / "native"


def _load_build() -> Any:
    spec = importlib.util.spec_from_file_location("dualflow_kernel_build", ROOM / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = _load_build()


class BuildKernels(build_ext):
    """Plain shared libraries, which know nothing of Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or True  # as many at a time as there are cores

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        isa = ext.name.rpartition("_kernels_")[2]
        try:
            build.compile_kernels(isa, Path(self.get_ext_fullpath(ext.name)))
        except RuntimeError as error:
            raise CompileError(f"{error}; dualflow works without, and more slowly") from error


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            f"dualflow.ops.native._kernels_{isa}",
            sources=["src/dualflow/ops/native/csrc/kernels.cpp"],
            depends=[str(path) for path in sorted(build.SOURCES.iterdir())],
            optional=True,
        )
        for isa in build.instruction_sets()
    ],
)
