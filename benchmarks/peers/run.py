"""Measure our engine beside llama.cpp, vLLM and transformers, on the same weights in one run.

    .venv/bin/python benchmarks/peers/run.py FOLDER

FOLDER is what setup.sh made. Writes results.json and the measured part of README.md beside it.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from engines import EngineError, EngineProcess, EngineSpec, all_engines, running
from worker import THREADS, Reading, Task

from dualflow.bench.measurement import this_machine
from dualflow.bench.peers import FIGURES, make_row, results_text, with_results
from dualflow.train.run_folder import write_json

HERE = Path(__file__).parent
CHECK_TOKENS = 32
STREAM_STRIDE = 64
"""Stream i's prompt begins at this multiple of i in the text."""


def main() -> None:
    """Start all engines, compare their tokens, measure figure by figure in interleaved rounds."""
    options = parse_options()
    folder: Path = options.folder.resolve()
    ids = json.loads((folder / "weights/prompt.json").read_text(encoding="utf-8"))["ids"]
    specs = chosen_engines(folder, options.only)
    if (load := os.getloadavg()[0]) > 0.5:
        say(f"warning: something else is running here (load {load:.1f}); figures will be low")
    failed: list[str] = []
    with ExitStack() as stack:
        processes = start(specs, folder / "logs", stack, failed)
        agreement = compare_tokens(processes, ids, failed)
        readings = measure(processes, ids, options, failed)
        results = {
            "rows": make_rows(processes, readings),
            "agreement": agreement,
            "failed": [text.replace(str(folder), "FOLDER") for text in failed],
        }
    print(results_text(results))
    if options.out is not None:
        write(results, options.out)


def parse_options() -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="what setup.sh made")
    parser.add_argument("--rounds", type=int, default=3, help="readings of each (default: 3)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT",
        help='engines whose name contains TEXT, such as "dualflow dual" or bf16; repeatable',
    )  # fmt: skip
    parser.add_argument(
        "--figure", action="append", choices=tuple(FIGURES), help="measure this alone; repeatable"
    )
    parser.add_argument("--new-tokens", type=int, default=64, help="of a stream (default: 64)")
    parser.add_argument(
        "--quick", action="store_true",
        help="one round of few tokens, to see that all runs; writes nothing without --out",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, help="where the rows go (default: results.json beside this file)"
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.new_tokens = 1, 8
    elif options.out is None:
        options.out = HERE / "results.json"
    if options.rounds < 1 or options.new_tokens < 2:
        parser.error("--rounds must be at least 1 and --new-tokens at least 2")
    return options


def chosen_engines(folder: Path, only: Sequence[str]) -> list[EngineSpec]:
    """The engines whose names contain one of the texts; all where there is none."""
    specs = [
        spec
        for spec in all_engines(folder)
        if not only or any(text in str(spec) for text in only)
    ]  # fmt: skip
    if not specs:
        names = ", ".join(str(spec) for spec in all_engines(folder))
        raise SystemExit(f"run.py: --only matches no engine; there are: {names}")
    return specs


def start(
    specs: Sequence[EngineSpec], logs: Path, stack: ExitStack, failed: list[str]
) -> list[EngineProcess]:
    """Start the engines one after the other; one that fails is told and left out."""
    processes = []
    for spec in specs:
        say(f"starting {spec}")
        try:
            log = logs / f"{'-'.join(spec.name)}.log"
            processes.append(stack.enter_context(running(spec, log)))
        except (EngineError, OSError) as error:
            report(error, failed)
    return processes


def compare_tokens(
    processes: list[EngineProcess], ids: list[int], failed: list[str]
) -> list[dict[str, object]]:
    """How many greedy tokens agree with the first engine's, prompt by prompt; what is here for
    its tokens alone is closed.
    """
    entries: list[dict[str, object]] = []
    reference: list[list[int]] | None = None
    task = Task([ids[8 * STREAM_STRIDE * i :][:128] for i in range(4)], CHECK_TOKENS, False)
    for process in list(processes):
        try:
            outputs = process.run(task).outputs
        except EngineError as error:
            drop(process, processes, error, failed)
            continue
        reference = reference or outputs
        agree = [common(a, b) for a, b in zip(outputs, reference, strict=True)]
        spec = process.spec
        say(f"{spec}: {agree} of {CHECK_TOKENS} tokens agree")
        entries.append(
            {
                "engine": spec.engine, "variant": spec.variant, "precision": spec.precision,
                "agree": agree, "of": CHECK_TOKENS,
            }
        )  # fmt: skip
        if spec.check_only:
            process.close()
            processes.remove(process)
    return entries


def measure(
    processes: list[EngineProcess],
    ids: list[int],
    options: argparse.Namespace,
    failed: list[str],
) -> dict[tuple[tuple[str, str, str], str], list[float]]:
    """Tokens per second by engine and figure, a reading for each round."""
    readings: dict[tuple[tuple[str, str, str], str], list[float]] = {}
    for figure in options.figure or FIGURES:
        for number in range(options.rounds):
            # Whoever is first in one round is last in the next.
            turn = number % max(1, len(processes))
            for process in [*processes[turn:], *processes[:turn]]:
                task, warm_up = tasks(figure, ids, number, options.new_tokens)
                try:
                    reading = process.run(task, warm_up=warm_up)
                except EngineError as error:
                    drop(process, processes, error, failed)
                    continue
                value = speed(figure, task, reading)
                readings.setdefault((process.spec.name, figure), []).append(value)
                say(f"{figure}, round {number + 1}: {process.spec}: {value:.1f}")
    return readings


def tasks(figure: str, ids: list[int], number: int, new_tokens: int) -> tuple[Task, Task]:
    """The task of a figure in a round, and what is run before it to wake threads and caches."""
    if figure == "prefill_512":
        # The first token is another in every round, so that no cache knows the prompt.
        prompt = [ids[600 + number], *ids[:511]]
        return Task([prompt], 1, False), Task([[ids[700 + number], *ids[:127]]], 1, False)
    if figure.startswith("decode_b1_"):
        prompts = [ids[: int(figure.removeprefix("decode_b1_"))]]
    else:
        count = int(figure.removeprefix("decode_b"))
        prompts = [ids[STREAM_STRIDE * i :][:128] for i in range(count)]
    assert len(prompts[-1]) >= 128, "the text is too short"
    return Task(prompts, new_tokens, True), Task(prompts, 4, True)


def speed(figure: str, task: Task, reading: Reading) -> float:
    """Tokens per second: of the prompt until its first new token, or new ones from then on."""
    if figure == "prefill_512":
        return len(task.prompts[0]) / reading.first_seconds
    return reading.rest_tokens / reading.rest_seconds


def make_rows(
    processes: Sequence[EngineProcess],
    readings: dict[tuple[tuple[str, str, str], str], list[float]],
) -> list[dict[str, object]]:
    """The rows, in the engines' order."""
    machine = {**asdict(this_machine()), "threads": THREADS}
    del machine["torch"]
    return [
        make_row(
            process.spec.name,
            figure,
            readings[process.spec.name, figure],
            versions=", ".join(f"{name} {text}" for name, text in process.versions.items()),
            **machine,
        )
        for process in processes
        for figure in FIGURES
        if (process.spec.name, figure) in readings
    ]


def write(results: dict[str, object], path: Path) -> None:
    """results.json, and the page beside it where there is one."""
    write_json(path, results)
    say(f"wrote {path}")
    page = path.parent / "README.md"
    if page.exists():
        page.write_text(with_results(page.read_text(encoding="utf-8"), results), encoding="utf-8")
        say(f"wrote {page}")


def drop(
    process: EngineProcess, processes: list[EngineProcess], error: Exception, failed: list[str]
) -> None:
    """Go on without an engine that failed."""
    report(error, failed)
    process.close()
    processes.remove(process)


def report(error: Exception, failed: list[str]) -> None:
    """Tell, and remember."""
    say(f"failed: {error}")
    failed.append(str(error))


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids are the same before the first that differs."""
    same = 0
    for a, b in zip(first, second, strict=True):
        if a != b:
            break
        same += 1
    return same


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
