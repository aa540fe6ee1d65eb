"""``dualflow data prepare | info``: make token shards, and show what is in them."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualflow.data.prepare import PreparedData, Progress

HELP = "prepare text for training, or show what prepared text holds"
EXAMPLES = """\
dualflow data prepare python-stdlib --tokenizer bpe:1024
dualflow data prepare chats.jsonl --tokenizer bytes --sequence-length 512
dualflow data prepare corpus/ --tokenizer gpt2/tokenizer.json --validation-fraction 0.01
dualflow data info python-stdlib
dualflow data info notes.txt --tokenizer bytes --json
"""

SAMPLE_TOKENS = 48
_SOURCE = (
    "python-stdlib, or the path of a text, .jsonl or .parquet file, of a folder of them, or of a "
    "dataset saved on disk"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="prepare | info")
    prepare = actions.add_parser(
        "prepare",
        help="split and tokenize a text and keep the result in the cache",
        description="Split and tokenize a text and keep the result in the cache.",
        epilog=_examples("prepare"),
    )
    prepare.add_argument("source", metavar="SOURCE", help=_SOURCE)
    prepare.add_argument(
        "--sequence-length",
        type=int,
        default=256,
        metavar="N",
        help="positions per window, which the text has to fill at least once (default: 256)",
    )
    info = actions.add_parser(
        "info",
        help="show documents, tokens, splits and a sample; prepares what is not prepared",
        description="Show documents, tokens, splits and a sample of a text, prepared if need be.",
        epilog=_examples("info"),
    )
    info.add_argument(
        "source", metavar="SOURCE|FOLDER", help=f"{_SOURCE}; or a folder that prepare made"
    )
    # Figures of a short text are figures too.
    info.set_defaults(sequence_length=1)
    for action in (prepare, info):
        _add_options(action)
        action.add_argument("--json", action="store_true", help="write the figures as JSON")


def _examples(action: str) -> str:
    lines = [line for line in EXAMPLES.splitlines() if f" {action} " in line]
    return "\n  ".join(["examples:", *lines])


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Options named like the fields of ``DataConfig``, left out of the namespace if not given."""

    def option(flag: str, **settings: Any) -> None:
        parser.add_argument(flag, default=argparse.SUPPRESS, **settings)

    option(
        "--tokenizer",
        metavar="NAME",
        help="bytes, bpe:N (trained on the text) or the path of a tokenizer.json "
        "(default: bpe:1024)",
    )
    option(
        "--validation-fraction",
        type=float,
        metavar="F",
        help="share of the text that is held out (default: 0.05)",
    )
    option("--validation-source", metavar="SOURCE", help="validate on this text instead")
    option("--text-key", metavar="NAME", help="column of texts (default: text)")
    option("--messages-key", metavar="NAME", help="column of chats (default: messages)")
    option("--split", metavar="NAME", help="split of a saved dataset (default: train)")
    option("--eos-token", metavar="TOKEN", help="end-of-text token of a tokenizer.json")
    option(
        "--cache-dir",
        metavar="FOLDER",
        help="where to keep the tokens (default: $DUALFLOW_CACHE or ~/.cache/dualflow)",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare, and print the figures; ``info`` adds a sample."""
    from dualflow.cli.console import remarks

    data = _load(args)
    for note in data.notes:
        remarks().print(f"note: {note}", markup=False)
    figures = _figures(data)
    if args.action == "info":
        figures["sample"] = _sample(data)
    if args.json:
        print(json.dumps(figures, indent=2, ensure_ascii=False))
    else:
        _print_figures(figures)
    return 0


def _load(args: argparse.Namespace) -> "PreparedData":
    from dualflow.data.config import DataConfig
    from dualflow.data.prepare import is_prepared, open_prepared, prepare

    if args.action == "info" and is_prepared(args.source):
        return open_prepared(args.source)
    fields = DataConfig.__dataclass_fields__
    config = DataConfig(**{name: value for name, value in vars(args).items() if name in fields})
    with _progress() as progress:
        return prepare(config, progress)


@contextmanager
def _progress() -> "Iterator[Progress]":
    """A progress bar per stage on standard error; nothing where that is not a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from dualflow.cli.console import remarks

    console = remarks()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    tasks: dict[str, Any] = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=None)
        bars.update(tasks[stage], completed=done, total=total or None)

    with bars:
        yield show


def _figures(data: "PreparedData") -> dict[str, Any]:
    splits = {"train": data.train, "validation": data.validation}
    return {
        "source": data.source,
        "vocab_size": data.vocab_size,
        "eos_token": data.eos_token,
        "folder": str(data.folder),
        "splits": {
            name: {
                "documents": shards.num_documents,
                "tokens": shards.num_tokens,
                "counted_tokens": shards.header.counted,
                "text_bytes": shards.header.text_bytes,
                "bytes_per_token": round(shards.bytes_per_token, 4),
            }
            for name, shards in splits.items()
        },
    }


def _sample(data: "PreparedData") -> str:
    """The beginning of the document in the middle of the training split."""
    document = data.train.document(data.train.num_documents // 2)
    return data.tokenizer.decode(document[:SAMPLE_TOKENS].tolist())


def _print_figures(figures: dict[str, Any]) -> None:
    from rich.table import Table

    from dualflow.cli.console import output

    console = output()
    columns = ("documents", "tokens", "counted_tokens", "text_bytes", "bytes_per_token")
    table = Table("split", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for name, split in figures["splits"].items():
        table.add_row(name, *(f"{split[column]:,}" for column in columns))
    eos = figures["eos_token"]
    console.print(f"source      {figures['source']}", markup=False)
    console.print(f"vocabulary  {figures['vocab_size']:,} ids, end of text {eos}", markup=False)
    console.print(f"folder      {Path(figures['folder'])}", markup=False, soft_wrap=True)
    console.print()
    console.print(table)
    if "sample" in figures:
        console.print(f"\nsample\n{figures['sample']}", markup=False)
