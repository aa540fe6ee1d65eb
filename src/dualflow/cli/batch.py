"""The offline batch of ``dualflow generate``: every prompt of a file, going on where it ended."""

import argparse
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dualflow.cli.batch_input import BadLinesError, BatchRequest, read_requests
from dualflow.cli.batch_output import Held, ResultsFile, check_output
from dualflow.cli.interrupts import stop_request
from dualflow.cli.request_fields import Fields
from dualflow.cli.request_options import model_folder
from dualflow.cli.serving import load_llm, warnings_as_lines

if TYPE_CHECKING:
    from dualflow.engine.llm import LLM
    from dualflow.engine.outputs import OutputCollector, RequestOutput
    from dualflow.engine.step_plan import Choice

AHEAD = 2
"""Requests handed to the engine, for each that it runs at once: it never waits for the next, and
the whole file is never in its queue.
"""

_SHOWN_LINES = 10
_PIECE = 1 << 20


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    """Declare ``--input`` and what belongs to it."""
    group = parser.add_argument_group("many prompts")
    group.add_argument(
        "--input", metavar="FILE",
        help="a JSON object a line: prompt, prompt_ids or messages, an id, and any of the options "
        "below under its name with _ for -",
    )  # fmt: skip
    group.add_argument(
        "--output", metavar="FILE",
        help="where the results go, a JSON object a line, in the order they end; what is there "
        "already is not run again",
    )  # fmt: skip
    group.add_argument(
        "--overwrite", action="store_true", help="start anew, whatever the output file holds"
    )
    group.add_argument(
        "--retry-failed", action="store_true", help="run requests that ended in an error again"
    )
    group.add_argument(
        "--max-running", type=int, default=64, metavar="N",
        help="requests at once at most (default: 64)",
    )  # fmt: skip


def run_batch(args: argparse.Namespace, fields: Fields, settings: dict[str, Any]) -> int:
    """Run what has no result yet; 1 where a request failed, now or before."""
    source, target = _paths(args)
    with model_folder(args.model) as folder:
        salt = f"{fingerprint(folder)} {settings['weights']} {settings['kv_dtype']}"
        try:
            requests = read_requests(source, fields, salt)
        except BadLinesError as bad:
            return _report(bad)
        check_output(target, source)
        with ResultsFile(
            target, requests, retry_failed=args.retry_failed, overwrite=args.overwrite
        ) as results:
            held = results.held
            missing = [request for request in requests if request.line not in held.lines]
            _tell_held(held, len(requests), target)
            failed = held.failed
            if missing:
                chats = any(request.kind == "messages" for request in missing)
                llm = load_llm(folder, chats=chats, max_running=args.max_running, **settings)
                failed += _Batch(llm, results, len(requests), held).run(missing)
    if failed:
        again = "" if args.retry_failed else "; --retry-failed runs them again"
        print(f"{failed:,} of {len(requests):,} requests failed{again}", file=sys.stderr)
    return 1 if failed else 0


def fingerprint(folder: Path) -> str:
    """Tells models apart without reading all of them: configuration, tokenizer, chat template, and
    size and both ends of each file of weights.
    """
    from dualflow.checkpoint import find_model_folder

    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(find_model_folder(folder).iterdir()):
        if path.suffix not in (".json", ".safetensors", ".jinja", ".gguf"):
            continue
        if path.name == "metrics.json":  # recorded, not computed with
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(_PIECE))
            file.seek(max(0, size - _PIECE))
            digest.update(file.read(_PIECE))
    return digest.hexdigest()


class _Batch:
    """Requests on their way through an engine, and their results on the way to the file."""

    def __init__(self, llm: "LLM", results: ResultsFile, total: int, held: Held) -> None:
        self._llm, self._engine, self._results = llm, llm.engine, results
        self._total, self._done = total, len(held.lines)
        self._live: dict[str, tuple[BatchRequest, OutputCollector]] = {}
        self._failed = 0

    def run(self, missing: Sequence[BatchRequest]) -> int:
        """Run them all; returns how many failed.

        On Ctrl-C the step in progress ends, what is done by then is kept, and
        ``KeyboardInterrupt`` is raised.
        """
        waiting = iter(missing)
        with _Progress(self._done, self._total) as progress, stop_request() as stop:
            while True:
                with warnings_as_lines():
                    self._hand_over(waiting)
                progress.at(self._done, self._engine.stats().new_tokens)
                if not self._engine.has_work:
                    break
                self._step()
                if stop.asked:
                    progress.at(self._done, self._engine.stats().new_tokens)
                    print(
                        f"\n{self._done:,} of {self._total:,} results are kept; the same command "
                        "goes on",
                        file=sys.stderr,
                    )
                    raise KeyboardInterrupt
        return self._failed

    def _hand_over(self, waiting: Iterator[BatchRequest]) -> None:
        from dualflow.engine.outputs import OutputCollector

        while len(self._live) < AHEAD * self._engine.config.max_running:
            request = next(waiting, None)
            if request is None:
                return
            try:
                ids = self._ids(request)
                name = self._engine.add(ids, request.params, request_id=f"line-{request.line}")
            except ValueError as error:  # RequestError and ChatError: of this request alone
                self._fail(request, str(error))
            else:
                self._live[name] = request, OutputCollector(name, None, tuple(ids))

    def _ids(self, request: BatchRequest) -> Sequence[int]:
        if request.kind == "messages":
            return self._llm.encode_chat(request.prompt)
        return self._engine.encode(request.prompt) if request.kind == "prompt" else request.prompt

    def _step(self) -> None:
        for event in self._engine.step():
            request, collector = self._live[event.request_id]
            collector.add(event)
            if collector.finished:
                del self._live[event.request_id]
                self._write(request, collector.output())

    def _write(self, request: BatchRequest, output: "RequestOutput") -> None:
        errors = [
            one.error or "it failed" for one in output.outputs if one.finish_reason == "error"
        ]
        if errors:
            self._fail(request, errors[0])
            return
        self._results.write(request, result_record(output, request))
        self._done += 1

    def _fail(self, request: BatchRequest, why: str) -> None:
        self._results.write(request, {"error": " ".join(why.split())})
        self._failed += 1
        self._done += 1


def result_record(output: "RequestOutput", request: BatchRequest) -> dict[str, Any]:
    """What the results file says of a request that ended well."""
    usages = [one.usage for one in output.outputs]
    record: dict[str, Any] = {
        "outputs": [
            {
                "text": one.text,
                "finish_reason": one.finish_reason,
                "token_ids": list(one.token_ids),
                **_logprobs(one.choices, request.params.logprobs),
            }
            for one in output.outputs
        ],
        "usage": {
            "prompt_tokens": usages[0].prompt_tokens,
            "cached_tokens": usages[0].cached_tokens,
            "new_tokens": sum(usage.new_tokens for usage in usages),
            "aux_positions": sum(usage.aux_positions for usage in usages),
            "drafted": sum(usage.drafted for usage in usages),
            "accepted": sum(usage.accepted for usage in usages),
        },
    }
    if output.prompt_choices is not None:
        record["prompt_logprobs"] = [_logprob(choice) for choice in output.prompt_choices]
    return record


def _logprobs(choices: "Sequence[Choice]", asked: int | None) -> dict[str, Any]:
    return {} if asked is None else {"logprobs": [_logprob(choice) for choice in choices]}


def _logprob(choice: "Choice") -> dict[str, Any]:
    """JSON has no infinity: an id that is never chosen has a null."""
    top = [[token, log_r if math.isfinite(log_r) else None] for token, log_r in choice.top]
    log_r = choice.log_r if math.isfinite(choice.log_r) else None
    return {"token_id": choice.token_id, "log_r": log_r, "top": top}


def _paths(args: argparse.Namespace) -> tuple[Path, Path]:
    if args.input is None or args.output is None:
        there, missing = ("--input", "--output") if args.output is None else ("--output", "--input")
        raise ValueError(f"{there} is given without {missing}; a batch needs both")
    for option in ("prompt", "prompt_file"):
        if getattr(args, option) is not None:
            name = option.replace("_", "-")
            raise ValueError(f"--{name} and --input exclude each other: one prompt, or a file")
    for option in ("echo", "json"):
        if getattr(args, option):
            raise ValueError(f"--{option} says nothing about a batch, whose results are JSON")
    if args.max_running < 1:
        raise ValueError(f"--max-running is {args.max_running}; expected at least 1")
    return Path(args.input), Path(args.output)


def _report(bad: BadLinesError) -> int:
    for number, problem in bad.problems[:_SHOWN_LINES]:
        print(f"line {number}: {problem}", file=sys.stderr)
    if len(bad.problems) > _SHOWN_LINES:
        print(f"and {len(bad.problems) - _SHOWN_LINES:,} more", file=sys.stderr)
    print(f"dualflow generate: {bad}", file=sys.stderr)
    return 2


def _tell_held(held: Held, total: int, target: Path) -> None:
    if held.lines:
        print(f"{len(held.lines):,} of {total:,} results are in {target} already", file=sys.stderr)
    if held.dropped:
        print(
            f"{held.dropped:,} results of other requests, such as lines that were changed since, "
            f"were removed from {target}",
            file=sys.stderr,
        )


class _Progress:
    """A bar with an estimate on standard error where that is a terminal, and a line at the end."""

    def __init__(self, done: int, total: int) -> None:
        import time

        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        from dualflow.cli.console import remarks

        console = remarks()
        self._bar = Progress(
            TextColumn("requests"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            Remaining(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done, rate="")
        self._clock, self._started = time.monotonic, time.monotonic()
        self._first = self._done = done
        self._tokens = 0

    def __enter__(self) -> "_Progress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        seconds = self._clock() - self._started
        print(
            f"{self._done - self._first:,} results in {seconds:,.1f} s"
            + (f" | {self._tokens / seconds:,.0f} new tokens/s" if seconds > 0 else ""),
            file=sys.stderr,
        )

    def at(self, done: int, tokens: int) -> None:
        """``done`` results are written, and ``tokens`` were generated since the start."""
        self._done, self._tokens = done, tokens
        seconds = self._clock() - self._started
        rate = f"{tokens / seconds:,.0f} tokens/s" if seconds > 1 else ""
        self._bar.update(self._task, completed=done, rate=rate)
