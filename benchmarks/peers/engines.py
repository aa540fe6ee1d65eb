"""Every engine as run.py starts it: a process of its own interpreter that sleeps unless asked."""

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from worker import THREADS, Reading, Task

HERE = Path(__file__).parent
START_SECONDS = 600
TASK_SECONDS = 180

SPINNING = {"OMP_WAIT_POLICY": "ACTIVE"}
"""Torch is quicker where its threads wait by spinning. llama.cpp keeps OpenMP's default; so do we,
whose kernels have threads of their own, which spinning ones would disturb.
"""


class EngineError(RuntimeError):
    """An engine could not be started, or failed at a task."""


@dataclass(frozen=True)
class EngineSpec:
    """What to start. ``check_only``: for its tokens, not for its speed."""

    engine: str
    variant: str
    precision: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    check_only: bool = False

    @property
    def name(self) -> tuple[str, str, str]:
        """What rows call it."""
        return self.engine, self.variant, self.precision

    def __str__(self) -> str:
        return " ".join(self.name)


def all_engines(folder: Path) -> list[EngineSpec]:
    """All that can be measured with what setup.sh made in ``folder``.

    transformers in float32 comes first: it is the reference for tokens.
    """
    weights = folder / "weights"
    huggingface = str(weights / "huggingface")
    llama = str(folder / "llama/bin/python")
    vllm = str(folder / "vllm/bin/python")
    specs = [
        EngineSpec(
            "transformers", "eager", short,
            (sys.executable, str(HERE / "transformers_worker.py"), huggingface, precision),
            SPINNING,
        )
        for short, precision in (("fp32", "float32"), ("bf16", "bfloat16"))
    ]  # fmt: skip
    specs += [
        EngineSpec(
            "llama.cpp", variant, short,
            (llama, str(HERE / "llama_cpp_worker.py"), str(weights / f"smollm2-{name}.gguf")),
        )
        for short, variant, name in (
            ("fp32", "F32", "f32"), ("bf16", "BF16", "bf16"), ("int8", "Q8_0", "q8_0"),
        )
    ]  # fmt: skip
    specs += [
        EngineSpec(
            "vllm", variant, short,
            (vllm, str(HERE / "vllm_worker.py"), huggingface, precision),
            SPINNING, check_only,
        )
        for short, precision, variant, check_only in (
            ("bf16", "bfloat16", "compiled", False), ("fp32", "float32", "eager", True),
        )
    ]  # fmt: skip
    specs += [
        EngineSpec(
            "dualflow", variant, short,
            (
                sys.executable, str(HERE / "ours_worker.py"),
                str(folder / "models" / variant), precision,
            ),
        )
        for short, precision in (
            ("fp32", "float32"), ("bf16", "bfloat16"), ("int8", "int8"), ("int4", "int4"),
        )
        for variant in ("standard", "dual")
    ]  # fmt: skip
    return specs


class EngineProcess:
    """A running engine. Between tasks all of its processes are stopped by signal: threads that
    wait by spinning would else take a core from the engine that is measured.
    """

    def __init__(self, spec: EngineSpec, log: Path) -> None:
        self.spec = spec
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            "OMP_NUM_THREADS": str(THREADS),
            "HF_HUB_OFFLINE": "1",
            **spec.environment,
            **os.environ,
        }
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                spec.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env=environment, text=True, encoding="utf-8", start_new_session=True,
            )  # fmt: skip
        try:
            self.versions: dict[str, str] = self._read(START_SECONDS)["versions"]
        except EngineError:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, task: Task, *, warm_up: Task | None = None) -> Reading:
        """Wake it, let it do the task (after another that is not looked at), and stop it again.

        Raises ``EngineError``; the process may be gone then.
        """
        self._signal(signal.SIGCONT)
        if warm_up is not None:
            self._ask(warm_up)
        reading = Reading(**self._ask(task))
        self._signal(signal.SIGSTOP)
        return reading

    def close(self) -> None:
        """End all of its processes."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def _ask(self, task: Task) -> dict:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(vars(task)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineError(f"{self.spec}: it is gone; see {self.log}") from error
        return self._read(TASK_SECONDS)

    def _read(self, seconds: float) -> dict:
        """The next line, of which there is one for each question."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise EngineError(f"{self.spec}: no answer in {seconds:g} s; see {self.log}")
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            raise EngineError(f"{self.spec}: {answer['error']}; see {self.log}")
        return answer

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


@contextmanager
def running(spec: EngineSpec, log: Path) -> Iterator[EngineProcess]:
    """The engine, for as long as the block runs."""
    process = EngineProcess(spec, log)
    try:
        yield process
    finally:
        process.close()
