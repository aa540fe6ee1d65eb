"""``dualflow doctor``: what works here, what does not, and how to mend it. Asks nothing of the
network.
"""

import argparse
import dataclasses
import importlib
import json
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from dualflow import __version__
from dualflow.extras import import_problem
from dualflow.folders import cache_folder

HELP = "check this machine and installation, and say how to mend what is amiss"
EXAMPLES = """\
dualflow doctor
dualflow doctor --json
"""

Status = Literal["ok", "absent", "warning", "broken"]

CORE = {"torch": "2.9", "numpy": "1.26", "safetensors": "0.5", "tokenizers": "0.21", "rich": "13.7"}
"""Required modules and their oldest version, as in pyproject.toml."""

OPTIONAL = {
    "tensorboard": ("train", "TensorBoard logs of a run"),
    "wandb": ("wandb", "Weights & Biases logs of a run"),
    "pyarrow": ("data", "training on Parquet files"),
    "datasets": ("data", "training on Hugging Face datasets saved on disk"),
    "matplotlib": ("plot", "plots of `dualflow compare`"),
    "transformers": ("transformers", "chat templates; models of ours in transformers"),
    "gguf": ("gguf", "GGUF files, read and written"),
    "llguidance": ("structured", "structured output (JSON schema, regex, grammar)"),
    "lm_eval": ("eval", "`dualflow eval --tasks`"),
}
"""Optional modules: the extra that brings each, and what it is for."""

FREE_GIB_WANTED = 2.0
KERNELS_OLD_AFTER = 60.0
"""Seconds by which compiled kernels may be older than their source: files of one installation are
not written at once.
"""


@dataclass(frozen=True)
class Check:
    """One finding. Only ``broken`` makes the exit code 1; ``mend`` says what to do about it."""

    name: str
    status: Status
    detail: str
    mend: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON object")


def run(args: argparse.Namespace) -> int:
    checks = list(examine())
    healthy = all(check.status != "broken" for check in checks)
    if args.json:
        findings = [dataclasses.asdict(check) for check in checks]
        print(json.dumps({"version": __version__, "ok": healthy, "checks": findings}, indent=2))
    else:
        print_report(checks, healthy)
    return 0 if healthy else 1


def print_report(checks: list[Check], healthy: bool) -> None:
    """The findings as aligned lines. Without rich, which is itself one of the things examined."""
    marks = {"ok": "ok", "absent": "-", "warning": "!", "broken": "BROKEN"}
    width = max(len(check.name) for check in checks)
    print(f"dualflow {__version__}")
    for check in checks:
        print(f"{marks[check.status]:>6}  {check.name:<{width}}  {check.detail}")
        if check.mend:
            print(f"{'':>6}  {'':<{width}}  -> {check.mend}")
    print("Everything needed works." if healthy else "Something needed is broken; see above.")


def examine() -> Iterator[Check]:
    """Every check, in the order it is reported."""
    yield check_python()
    for module, oldest in CORE.items():
        yield check_core(module, oldest)
    yield from check_devices()
    yield from check_kernels()
    yield check_compiler()
    for module, (extra, purpose) in OPTIONAL.items():
        yield check_optional(module, extra, purpose)
    folder = cache_folder()
    yield check_writable("cache folder", folder)
    yield check_disk(folder)
    yield Check("network", "ok", "not needed: nothing is downloaded or sent when dualflow runs")


def check_python() -> Check:
    version = platform.python_version()
    detail = f"{version} ({platform.system()} {platform.machine()}, {os.cpu_count()} CPUs)"
    return Check("python", "ok", detail)


def check_core(module: str, oldest: str) -> Check:
    """A required module: present, importable and not older than ``oldest``."""
    reinstall = f"pip install --upgrade '{module}>={oldest}'"
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a broken package may raise anything
        return Check(module, "broken", f"cannot be imported ({import_problem(error)})", reinstall)
    version = installed_version(module)
    if version is not None and _numbers(version) < _numbers(oldest):
        return Check(module, "broken", f"{version} is older than {oldest}", reinstall)
    return Check(module, "ok", version or "unknown version")


def check_devices() -> Iterator[Check]:
    """What torch can compute on; nothing where torch itself cannot be imported."""
    try:
        import torch
    except (Exception, SystemExit):  # reported by check_core
        return
    yield Check(
        "threads", "ok", f"{torch.get_num_threads()} for one operation (OMP_NUM_THREADS sets it)"
    )
    names = ["cpu"]
    names += [
        f"cuda:{index} ({torch.cuda.get_device_name(index)})"
        for index in range(torch.cuda.device_count())
    ]
    if torch.backends.mps.is_available():
        names.append("mps")
    yield Check("devices", "ok", ", ".join(names))


def check_kernels() -> Iterator[Check]:
    """Whether the engine's C++ kernels are compiled, can be loaded and are those of the source
    that lies beside them; nothing where torch cannot be imported.
    """
    try:
        from dualflow.ops.native import build, library
    except (Exception, SystemExit):  # torch, reported by check_core
        return
    compile_them = "python -m dualflow.ops.native.build compiles them, or says what is wrong"
    if (reason := library.why_missing()) is not None:
        mend = f"{compile_them} (the engine works without, on PyTorch: several times slower)"
        yield Check("kernels", "warning", reason.partition(";")[0], mend)
        return
    used = library.load().df_isa().decode()
    files = {isa: library.FOLDER / f"_kernels_{isa}.so" for isa in build.instruction_sets()}
    compiled = [isa for isa, path in files.items() if path.is_file()]
    newest = max(path.stat().st_mtime for path in build.SOURCES.iterdir())
    if files[used].stat().st_mtime < newest - KERNELS_OLD_AFTER:
        yield Check("kernels", "warning", f"{used}, older than their source", compile_them)
        return
    detail = f"{used} in use, of {', '.join(compiled)} (DUALFLOW_ISA chooses another)"
    yield Check("kernels", "ok", detail)


def check_compiler() -> Check:
    """Whether torch.compile can build CPU code: a C++ compiler and Python's headers."""
    compiler = next(
        filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), None
    )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    slower = "dualflow works without it; training steps take several times longer"
    if compiler is None:
        mend = f"install g++ or clang++ ({slower})"
        return Check("torch.compile", "warning", "no C++ compiler found", mend)
    if not header.exists():
        mend = f"install Python's headers, such as python3-dev ({slower})"
        return Check("torch.compile", "warning", f"{compiler}, but no Python.h", mend)
    return Check("torch.compile", "ok", f"{compiler} and Python's headers")


def check_optional(module: str, extra: str, purpose: str) -> Check:
    """A module that an extra brings. One that raises when imported counts as absent."""
    install = f"pip install 'dualflow[{extra}]'"
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a broken package may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            return Check(module, "absent", f"for {purpose}", install)
        detail = f"for {purpose}; installed, but treated as absent ({import_problem(error)})"
        return Check(module, "warning", detail, f"reinstall it: {install}")
    return Check(module, "ok", f"{installed_version(module) or 'unknown version'}, for {purpose}")


def check_writable(name: str, folder: Path) -> Check:
    """Whether files can be made in ``folder``, which is created if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        mend = "make it writable, or set DUALFLOW_CACHE to another folder"
        return Check(name, "broken", f"{folder}: {error.strerror or error}", mend)
    return Check(name, "ok", str(folder))


def check_disk(folder: Path) -> Check:
    """Free space at ``folder`` or its nearest existing parent."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    if free < FREE_GIB_WANTED:
        detail = f"{free:.1f} GiB free at {existing}"
        return Check(
            "disk", "warning", detail, f"free some: {FREE_GIB_WANTED:g} GiB are comfortable"
        )
    return Check("disk", "ok", f"{free:.0f} GiB free at {existing}")


def installed_version(module: str) -> str | None:
    """The version of the distribution named like the module; None where it cannot be told."""
    try:
        return metadata.version(module)
    except (metadata.PackageNotFoundError, ValueError):
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
