"""``dualflow generate``: continue a text with a trained model, or every prompt of a file."""

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dualflow.cli.batch import add_batch_options, run_batch
from dualflow.cli.figures import figures_line, figures_of
from dualflow.cli.prompt import add_prompt_options, read_prompt
from dualflow.cli.request_fields import build_params
from dualflow.cli.request_options import (
    add_engine_options,
    add_model_argument,
    add_request_options,
    engine_settings,
    model_folder,
    request_fields,
)
from dualflow.cli.serving import load_llm, stream

if TYPE_CHECKING:
    from dualflow.engine.engine import Engine
    from dualflow.engine.outputs import Event
    from dualflow.engine.step_plan import Choice

HELP = "continue a text with a trained model, or every prompt of a file"

EXAMPLES = """\
  dualflow generate --prompt 'def main(' --max-tokens 60
  dualflow generate runs/demo/dual-seed0 --prompt-file start.py --temperature 0 --aux exact
  echo 'import os' | dualflow generate runs/demo/dual-seed0 --seed 7 --json
  dualflow generate runs/demo/dual-seed0 --input prompts.jsonl --output results.jsonl --seed 7
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    add_model_argument(parser)
    add_prompt_options(parser)
    add_batch_options(parser)
    parser.add_argument(
        "--echo", action="store_true", help="write the prompt before its continuation"
    )
    parser.add_argument(
        "--json", action="store_true", help="write one JSON object with text, tokens and figures"
    )
    add_request_options(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Generate to standard output; notes and figures go to standard error."""
    # Everything that can be wrong with the request is found before the model is loaded.
    fields = request_fields(args)
    params = build_params(fields)
    settings = engine_settings(args)
    if args.input is not None or args.output is not None:
        return run_batch(args, fields, settings)
    if not args.json and (args.logprobs is not None or args.prompt_logprobs is not None):
        raise ValueError("log-probabilities are reported in JSON alone; add --json")
    prompt = read_prompt(args)
    with model_folder(args.model) as folder:
        llm = load_llm(folder, max_running=params.n, **settings)
    engine = llm.engine
    # An empty text begins as every document did in training: after the end-of-text token.
    prompt_ids = engine.encode(prompt)
    events = stream(llm, prompt_ids, params)
    if args.json:
        _write_json(engine, prompt, prompt_ids, list(events))
    elif params.n == 1:
        _stream(engine, prompt if args.echo else "", events)
    else:
        _write_all(engine, prompt if args.echo else "", list(events))
    return 0


def _stream(engine: "Engine", prompt: str, events: "Iterator[Event]") -> None:
    """Write the text as it comes, and the figures at its end. Ctrl-C ends the line and goes on to
    the caller.
    """
    from dualflow.engine.outputs import FinishEvent, TokenEvent

    try:
        print(prompt, end="", flush=True)
        for event in events:
            if isinstance(event, TokenEvent | FinishEvent):
                print(event.text, end="", flush=True)
            if isinstance(event, FinishEvent):
                print(flush=True)
                _require_success(event)
                print(figures_line(figures_of(engine, event), event.reason), file=sys.stderr)
    except KeyboardInterrupt:
        print(flush=True)
        raise


def _write_all(engine: "Engine", prompt: str, events: "list[Event]") -> None:
    """Write several outputs one below the other, each under a line with its number."""
    from dualflow.engine.outputs import FinishEvent

    ends = sorted((e for e in events if isinstance(e, FinishEvent)), key=lambda end: end.index)
    for end in ends:
        _require_success(end)
        print(f"--- {end.index + 1} of {len(ends)}")
        print(prompt + _text(events, end.index))
        line = figures_line(figures_of(engine, end), end.reason)
        print(f"{end.index + 1}: {line}", file=sys.stderr)


def _write_json(
    engine: "Engine", prompt: str, prompt_ids: list[int], events: "list[Event]"
) -> None:
    """One object; the outputs of several stand in a list."""
    import json

    from dualflow.engine.outputs import FinishEvent, PromptEvent

    outputs: list[dict[str, Any]] = []
    result: dict[str, Any] = {"prompt": prompt, "prompt_ids": prompt_ids}
    for event in events:
        if isinstance(event, PromptEvent):
            result["prompt_tokens"] = [_token(choice) for choice in event.choices]
        if isinstance(event, FinishEvent):
            _require_success(event)
            outputs.append(
                {
                    "index": event.index,
                    "text": _text(events, event.index),
                    "finish_reason": event.reason,
                    "tokens": _tokens(events, event.index),
                    "figures": figures_of(engine, event).record(),
                }
            )
    outputs.sort(key=lambda output: output["index"])
    if len(outputs) == 1:
        del outputs[0]["index"]
        result |= outputs[0]
    else:
        result["outputs"] = outputs
    print(json.dumps(result, ensure_ascii=False))


def _require_success(end: "Any") -> None:
    if end.reason == "error":
        raise ValueError(end.error or "the request failed")


def _text(events: "list[Event]", index: int) -> str:
    from dualflow.engine.outputs import PromptEvent

    own = (e for e in events if not isinstance(e, PromptEvent) and e.index == index)
    return "".join(event.text for event in own)


def _tokens(events: "list[Event]", index: int) -> list[dict[str, Any]]:
    from dualflow.engine.outputs import TokenEvent

    own = (e for e in events if isinstance(e, TokenEvent) and e.index == index)
    return [{"text": event.text, **_token(event.choice)} for event in own]


def _token(choice: "Choice") -> dict[str, Any]:
    """``top`` is there where it was asked for."""
    shown: dict[str, Any] = {
        "token_id": choice.token_id,
        "log_r": choice.log_r,
        "log_p": choice.log_p,
        "log_q": choice.log_q,
        "alpha": choice.alpha,
        "source": choice.source,
    }
    if choice.top:
        shown["top"] = [{"token_id": token, "log_r": log_r} for token, log_r in choice.top]
    return shown
