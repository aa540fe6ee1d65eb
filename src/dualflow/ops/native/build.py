"""Compiles the kernels, one library for each instruction set: at installation, or at any time by
``python -m dualflow.ops.native.build``.

This file is also loaded by setup.py, before there is a ``dualflow`` to import: it needs the
standard library alone.
"""

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"

FLAGS = (
    "-std=c++20", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-shared",
    "-fvisibility=hidden", "-pthread", "-Wall", "-Wno-psabi",
    "-Wno-maybe-uninitialized",  # in GCC 12's own AVX-512 header
    "-Wno-unknown-warning-option",
)  # fmt: skip

_AVX512 = (
    "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c",
    "-mprefer-vector-width=512",
)  # fmt: skip
INSTRUCTION_SETS = {
    "x86_64": {
        "baseline": (),
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
        "avx512": _AVX512,
        "avx512bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    },
}
"""Flags of every instruction set by machine; other machines have ``baseline`` alone, which on
64-bit ARM is NEON.
"""


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """What is compiled on this machine, with the flags of each."""
    machine = {"AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    return INSTRUCTION_SETS.get(machine, {"baseline": ()})


def compiler() -> str | None:
    """The C++ compiler: ``CXX``, else the first that is there; None: there is none."""
    if named := os.environ.get("CXX"):
        return named
    return next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def compile_kernels(isa: str, target: Path) -> None:
    """Compile the library of one instruction set. Raises ``RuntimeError``: what went wrong."""
    command = compiler()
    if command is None:
        raise RuntimeError("no C++ compiler was found (g++, clang++ or $CXX)")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    arguments = [
        *command.split(), *FLAGS, *instruction_sets()[isa], f'-DDF_ISA="{isa}"',
        str(SOURCES / "kernels.cpp"), "-o", str(unfinished),
    ]  # fmt: skip
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"the C++ compiler {command!r} cannot be run: {error}") from error
    if done.returncode:
        unfinished.unlink(missing_ok=True)
        reason = next((x for x in done.stderr.splitlines() if "error" in x), done.stderr[-400:])
        raise RuntimeError(f"{command} could not compile the {isa} kernels: {reason}")
    unfinished.replace(target)


def main() -> int:
    """Compile all libraries into the package."""
    folder = Path(__file__).parent
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {
            isa: pool.submit(compile_kernels, isa, folder / f"_kernels_{isa}.so")
            for isa in instruction_sets()
        }
    failed = 0
    for isa, job in jobs.items():
        error = job.exception()
        failed += error is not None
        print(f"{isa}: {error or 'compiled'}", file=sys.stderr if error else sys.stdout)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
