"""Options of the verbs that run the engine: what is asked of it, and how it runs."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dualflow.cli.device import add_device_option

WEIGHTS = ("auto", "float64", "float32", "bfloat16", "int8", "int4")
KV_DTYPES = ("auto", "float64", "float32", "bfloat16", "int8")
BACKENDS = ("auto", "native", "torch")


def add_model_argument(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Declare MODEL, which may be left out unless it is ``required``."""
    if required:
        parser.add_argument("model", metavar="MODEL", help="model folder or run folder")
        return
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="model folder or run folder (default: the small model that comes with dualflow)",
    )  # fmt: skip


@contextlib.contextmanager
def model_folder(name: str | None) -> Iterator[Path]:
    """The folder that MODEL means. Raises ``ValueError`` where it was left out and none came with
    the package, and for a GGUF file.
    """
    if name is not None:
        if name.endswith(".gguf"):
            raise ValueError(
                f"{name} is a GGUF file, not a model folder; make one of it: "
                f"dualflow convert {name} FOLDER"
            )
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


def add_request_options(parser: argparse.ArgumentParser, max_tokens: int = 128) -> None:
    """Declare what ``request_fields`` reads."""
    group = parser.add_argument_group("how long")
    group.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N",
        help=f"new tokens at most (default: {max_tokens})",
    )  # fmt: skip
    group.add_argument(
        "--min-tokens", type=int, default=0, metavar="N",
        help="new tokens before anything ends the text (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--stop", action="append", metavar="TEXT",
        help="end before TEXT; may be given several times",
    )  # fmt: skip
    group.add_argument(
        "--stop-id", action="append", type=int, metavar="ID", help="end at this token; likewise"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end-of-text token"
    )
    _add_sampling(parser.add_argument_group("which token"))
    _add_shape(parser.add_argument_group("which shape (needs: pip install 'dualflow[structured]')"))
    _add_flows(parser.add_argument_group("which computation"))


def _add_sampling(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--temperature", type=float, default=0.8, metavar="T",
        help="0 takes the likeliest token (default: 0.8)",
    )  # fmt: skip
    group.add_argument(
        "--top-k", type=int, default=0, metavar="K",
        help="keep the K likeliest tokens (default: 0, all)",
    )  # fmt: skip
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P",
        help="keep the fewest tokens that together reach probability P (default: 1, all)",
    )  # fmt: skip
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="P",
        help="keep tokens at least P times as likely as the likeliest (default: 0, all)",
    )  # fmt: skip
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X",
        help="make tokens of the prompt and the output less likely by this factor (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--presence-penalty", type=float, default=0.0, metavar="X",
        help="take X off the logit of every token in the output (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="X",
        help="take X off for each time it is there (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--logit-bias", action="append", metavar="ID=B",
        help="add B to the logit of token ID; may be given several times",
    )  # fmt: skip
    group.add_argument(
        "--allow-id", action="append", type=int, metavar="ID",
        help="sample this token, and those of further --allow-id, alone",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=int, metavar="N", help="same seed, same text (default: a new one each time)"
    )
    group.add_argument("--n", type=int, default=1, metavar="N", help="how many texts (default: 1)")
    group.add_argument(
        "--logprobs", type=int, metavar="N",
        help="with --json or --input: report the N likeliest tokens at each position",
    )  # fmt: skip
    group.add_argument(
        "--prompt-logprobs", type=int, metavar="N", help="likewise for the prompt's tokens"
    )


def _add_shape(group: "argparse._ArgumentGroup") -> None:
    shape = group.add_mutually_exclusive_group()
    shape.add_argument("--json-schema", metavar="FILE", help="JSON that fits the schema in FILE")
    shape.add_argument("--any-json", action="store_true", help="any JSON value")
    shape.add_argument("--regex", metavar="RE", help="a text that the regular expression matches")
    shape.add_argument(
        "--grammar", metavar="FILE", help="a text of the grammar in FILE (Lark or GBNF)"
    )


def _add_flows(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--aux", default="on", metavar="on|off|exact|threshold=T",
        help="when a dual model's auxiliary flow runs. on: at every new token; off: never, cheap "
        "and usually worse; exact: left out only where the tokens cannot depend on it, which "
        "saves at --temperature 0, or at 1 without cuts, and else is like on; threshold=T: only "
        "where the primary's weight in the mixture is below T, approximate (default: on)",
    )  # fmt: skip
    group.add_argument(
        "--drafts", choices=("off", "ngram", "primary"), default="off",
        help="guess tokens ahead, from what was written or with the primary alone, and verify them "
        "in one pass: same distribution (default: off)",
    )  # fmt: skip
    group.add_argument(
        "--num-drafts", type=int, default=4, metavar="N", help="guesses a step (default: 4)"
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Declare what ``engine_settings`` reads."""
    group = parser.add_argument_group("how it runs")
    add_device_option(group)
    group.add_argument(
        "--weights", choices=WEIGHTS, default="auto", help="number format (default: as stored)"
    )
    group.add_argument(
        "--kv-dtype", choices=KV_DTYPES, default="auto",
        help="number format of the KV cache (default: that of the weights)",
    )  # fmt: skip
    group.add_argument(
        "--backend", choices=BACKENDS, default="auto",
        help="our kernels, or PyTorch (default: our kernels where they fit)",
    )  # fmt: skip
    group.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads (default: one per core)"
    )


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of ``EngineConfig`` that the options set. Raises ``ValueError`` for what is not here.

    A device is looked for now, before a model is loaded.
    """
    from dualflow.model.device import pick_device

    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads is {args.threads}; expected at least 1")
    settings: dict[str, Any] = {
        "weights": args.weights,
        "kv_dtype": args.kv_dtype,
        "backend": args.backend,
        "device": pick_device(args.device),
    }
    return settings | ({} if args.threads is None else {"threads": args.threads})


def request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What the options ask for, as ``cli.request_fields.build_params`` takes it. Raises
    ``ValueError`` where a file cannot be read or ID=B is not of that form.
    """
    shapes: dict[str, Any] = {"regex": args.regex, "json": args.any_json or None}
    if args.json_schema is not None:
        shapes["json_schema"] = _read("--json-schema", args.json_schema)
    if args.grammar is not None:
        shapes["grammar"] = _read("--grammar", args.grammar)
    fields = {
        "max_tokens": args.max_tokens,
        "min_tokens": args.min_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "presence_penalty": args.presence_penalty,
        "frequency_penalty": args.frequency_penalty,
        "logit_bias": _biases(args.logit_bias),
        "allowed_ids": args.allow_id,
        "stop": args.stop,
        "stop_ids": args.stop_id,
        "ignore_eos": args.ignore_eos,
        "seed": args.seed,
        "n": args.n,
        "logprobs": args.logprobs,
        "prompt_logprobs": args.prompt_logprobs,
        "aux": args.aux,
        "drafts": args.drafts,
        "num_drafts": args.num_drafts,
        **shapes,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _biases(pairs: list[str] | None) -> dict[str, float] | None:
    if not pairs:
        return None
    biases: dict[str, float] = {}
    for pair in pairs:
        token, equals, bias = pair.partition("=")
        try:
            if not equals or str(int(token)) != token.strip():
                raise ValueError
            biases[token.strip()] = float(bias)
        except ValueError as error:
            raise ValueError(
                f"--logit-bias is {pair!r}; expected ID=B, as in --logit-bias 13=-2.5"
            ) from error
    return biases


def _read(option: str, name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {option} {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {name} is not UTF-8: byte {error.start}") from error
