"""torch.compile where it works: the loss function is compiled, never the module, so parameter names
stay as they are.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from dualflow.train.step import LossFunction

CompileMode = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Loss:
    """The function training calls, whether it is compiled, and a note for the log on why or why
    not.
    """

    function: LossFunction
    is_compiled: bool
    note: str


def compile_loss(
    loss: LossFunction, mode: CompileMode, trial: Callable[[LossFunction], None]
) -> Loss:
    """``loss`` compiled as ``mode`` asks.

    trial: runs the compiled function forward and backward once; compilation happens in it, so that
           in mode ``auto`` whatever goes wrong leads back to ``loss`` itself before anything has
           been trained.
    Raises ``ValueError`` in mode ``on`` where compilation fails.
    """
    if mode == "off":
        return Loss(loss, False, "eager (train.compile is off)")
    if mode == "auto" and find_cpp_compiler() is None:
        return Loss(loss, False, f"eager: no working C++ compiler was found ({_INSTALL})")
    # Compiled code is kept per Python function, eight versions at most: earlier runs of this
    # process must not use them up.
    torch.compiler.reset()
    compiled = torch.compile(loss, dynamic=False)
    try:
        trial(compiled)
    except Exception as error:  # a compiler may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        if mode == "on":
            raise ValueError(
                f"torch.compile failed ({reason}); set train.compile to 'off', "
                "or to 'auto' to go on without it"
            ) from error
        torch.compiler.reset()
        return Loss(loss, False, f"eager: torch.compile failed ({reason})")
    return Loss(compiled, True, "compiled")


_INSTALL = "g++ or clang++ makes training several times faster"


def find_cpp_compiler() -> str | None:
    """The C++ compiler torch.compile would call, if it can build and link a trivial program; else
    None.
    """
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++", "cl"):
        path = shutil.which(name) if name else None
        if path is not None and _works(path):
            return path
    return None


def _works(compiler: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <cmath>\nint main() { return std::isnan(1.0); }\n")
        output = ["/Feprobe.exe"] if Path(compiler).stem == "cl" else ["-o", "probe"]
        try:
            done = subprocess.run(
                [compiler, str(source), *output],
                cwd=folder,
                capture_output=True,
                timeout=60,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0
