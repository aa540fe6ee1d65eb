"""``dualflow generate``: continue a text with a trained model."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dualflow.cli.device import add_device_option, pick_device

if TYPE_CHECKING:
    from dualflow.data.tokenizers import Tokenizer
    from dualflow.model import CausalLM
    from dualflow.model.generate import FinishEvent, GenerationParams, TokenEvent

HELP = "continue a text with a trained model"

EXAMPLES = """\
  dualflow generate --prompt 'def main(' --max-tokens 60
  dualflow generate runs/demo/dual-seed0 --prompt-file start.py --temperature 0 --aux off
  echo 'import os' | dualflow generate runs/demo/dual-seed0 --seed 7 --json
"""

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="model folder or run folder (default: the small model that comes with dualflow)",
    )  # fmt: skip
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompt", metavar="TEXT", help="the text to continue; '' starts a new text"
    )
    prompt.add_argument(
        "--prompt-file", metavar="FILE",
        help="read it from FILE (UTF-8), '-' for standard input; "
        "without either option, what is piped in is read",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="new tokens at most (default: 128)"
    )
    _add_sampling(parser)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before TEXT; may be given several times",
    )
    parser.add_argument(
        "--aux",
        choices=("on", "off"),
        default="on",
        help="run the auxiliary flow from the last prompt token on (default: on)",
    )
    add_device_option(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="number format (default: as stored)"
    )
    parser.add_argument(
        "--echo", action="store_true", help="write the prompt before its continuation"
    )
    parser.add_argument(
        "--json", action="store_true", help="write one JSON object with text, tokens and figures"
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """Declare how each token is chosen."""
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the likeliest token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="keep the K likeliest tokens (default: 0, all)",
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P",
        help="keep the fewest tokens that together reach probability P (default: 1, all)",
    )  # fmt: skip
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P",
        help="keep tokens at least P times as likely as the likeliest (default: 0, all)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, metavar="N", help="same seed, same text (default: a new one each time)"
    )


def run(args: argparse.Namespace) -> int:
    """Generate to standard output; notes and figures go to standard error."""
    import torch

    from dualflow.checkpoint import load_model, load_tokenizer_of, read_metrics
    from dualflow.data.detokenize import StreamDetokenizer, TokenTexts
    from dualflow.model.generate import aux_off_warning, generate

    # Everything that can be wrong with the request is found before the model is loaded.
    _params(args, stop_ids=frozenset())
    prompt = _prompt(args)
    device = pick_device(args.device)
    with _model_folder(args.model) as folder:
        tokenizer = load_tokenizer_of(folder)
        # An empty text begins as every document did in training: after the end-of-text token.
        prompt_ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
        detokenizer = StreamDetokenizer(TokenTexts(tokenizer), args.stop, prompt_ids)
        dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
        model = load_model(folder, device=device, dtype=dtype)
        warning = aux_off_warning(read_metrics(folder)) if args.aux == "off" else None
    _check_vocabulary(tokenizer, model)
    events = generate(model, prompt_ids, _params(args, frozenset({tokenizer.eos_id})), detokenizer)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    if args.json:
        _write_json(prompt, prompt_ids, list(events))
    else:
        _stream(prompt if args.echo else "", events)
    return 0


def _params(args: argparse.Namespace, stop_ids: frozenset[int]) -> "GenerationParams":
    from dualflow.model.generate import GenerationParams
    from dualflow.model.sampling import SamplingParams

    sampling = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
    )
    return GenerationParams(
        max_tokens=args.max_tokens, sampling=sampling, stop_ids=stop_ids, aux=args.aux
    )


def _prompt(args: argparse.Namespace) -> str:
    """The prompt as text. Raises ``ValueError`` where it cannot be read, or is not UTF-8."""
    if args.prompt is not None:
        source, data = "--prompt", args.prompt.encode("utf-8", "surrogateescape")
    elif args.prompt_file == "-" or (args.prompt_file is None and _piped()):
        source, data = "standard input", sys.stdin.buffer.read()
    elif args.prompt_file is not None:
        source = args.prompt_file
        try:
            data = Path(source).read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read the prompt file {source}: {error.strerror}") from error
    else:
        return ""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the prompt from {source} is not UTF-8: "
            f"byte {error.start} is 0x{data[error.start]:02x}"
        ) from error


def _piped() -> bool:
    """Whether something was piped or redirected into the command; a terminal or a closed input is
    not waited for.
    """
    import os
    import stat

    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # no standard input, or one that is not a file
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


@contextlib.contextmanager
def _model_folder(name: str | None) -> Iterator[Path]:
    if name is not None:
        yield Path(name)
        return
    from importlib import resources

    shipped = resources.files("dualflow") / "assets" / "tiny"
    if not shipped.is_dir():
        raise ValueError(
            "this installation has no built-in model; name the MODEL or run folder to use"
        )
    with resources.as_file(shipped) as folder:
        yield folder


def _check_vocabulary(tokenizer: "Tokenizer", model: "CausalLM") -> None:
    known = model.config.num_real_tokens
    if tokenizer.vocab_size > known:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {known}; "
            "they do not belong together"
        )


def _stream(prompt: str, events: "Iterator[TokenEvent | FinishEvent]") -> None:
    """Write the text as it comes, and the figures at its end. Ctrl-C ends the line and goes on to
    the caller.
    """
    from dualflow.model.generate import FinishEvent

    try:
        print(prompt, end="", flush=True)
        for event in events:
            print(event.text, end="", flush=True)
            if isinstance(event, FinishEvent):
                print(flush=True)
                print(_figures_line(event), file=sys.stderr)
    except KeyboardInterrupt:
        print(flush=True)
        raise


def _figures_line(end: "FinishEvent") -> str:
    f = end.figures
    prefill, decode = f.prefill_tokens_per_second, f.decode_tokens_per_second
    parts = [
        f"{f.prompt_tokens} prompt + {f.new_tokens} new tokens ({end.reason})",
        f"prefill {f.prefill_seconds:.3f} s" + (f", {prefill:,.0f} tokens/s" if prefill else ""),
        f"decode {decode:,.1f} tokens/s" if decode else "no decode steps",
        f"KV cache {f.cache_bytes / 1024:,.1f} KiB",
        f"auxiliary at {f.aux_positions} of {f.prompt_tokens + f.new_tokens - 1} positions",
    ]
    return " | ".join(parts)


def _write_json(
    prompt: str, prompt_ids: list[int], events: "list[TokenEvent | FinishEvent]"
) -> None:
    import dataclasses
    import json

    from dualflow.model.generate import FinishEvent, TokenEvent

    end = events[-1]
    assert isinstance(end, FinishEvent)
    result = {
        "prompt": prompt,
        "prompt_ids": prompt_ids,
        "text": "".join(event.text for event in events),
        "finish_reason": end.reason,
        "tokens": [dataclasses.asdict(event) for event in events if isinstance(event, TokenEvent)],
        "figures": {
            **dataclasses.asdict(end.figures),
            "prefill_tokens_per_second": end.figures.prefill_tokens_per_second,
            "decode_tokens_per_second": end.figures.decode_tokens_per_second,
        },
    }
    print(json.dumps(result, ensure_ascii=False))
