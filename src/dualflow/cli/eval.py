"""``dualflow eval``: the loss of a trained model on a text, or its results in tasks of lm-eval."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from dualflow.cli.device import add_device_option
from dualflow.cli.eval_tasks import add_task_options, check_task_options, run_tasks

if TYPE_CHECKING:
    from dualflow.data import DataConfig
    from dualflow.evaluate.loss import EvaluatedLoss
    from dualflow.evaluate.tables import Table

HELP = "measure the loss of a trained model on a text, or run tasks of lm-eval on it"

EXAMPLES = """\
dualflow eval runs/demo/dual-seed0
dualflow eval runs/demo/dual-seed0/model --data notes.txt --split all --sequence-length 256
dualflow eval runs/demo/dual-seed0 --weights int4
dualflow eval models/smollm2-dual --tasks hellaswag,arc_easy --limit 200
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("model", metavar="MODEL_OR_RUN", help="model folder or run folder")
    parser.add_argument(
        "--data",
        metavar="SOURCE",
        help="text file, .jsonl, .parquet, folder or python-stdlib (default: the data of the run)",
    )
    parser.add_argument(
        "--split",
        choices=("validation", "all"),
        default="validation",
        help="what training holds out of the data, or all of it (default: validation)",
    )
    parser.add_argument(
        "--sequence-length",
        type=int,
        metavar="N",
        help="tokens per window (default: the run's, else the longest the model takes)",
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="windows at a time (default: 8)"
    )
    parser.add_argument(
        "--weights",
        choices=("int8", "int4"),
        help="quantise the matrices first (default: as they are stored)",
    )
    add_device_option(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON object instead")
    add_task_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the losses of r, p and q, or the results of tasks, to standard output."""
    check_task_options(args)
    if args.tasks is not None:
        return run_tasks(args)
    from dualflow.checkpoint import find_model_folder, read_config
    from dualflow.cli.console import output, remarks
    from dualflow.data import prepare

    if args.batch_size < 1:
        raise ValueError(f"--batch-size is {args.batch_size}; expected at least 1")
    folder = find_model_folder(args.model)
    model_config = read_config(folder)
    config = _data_config(args, folder, model_config.max_position)
    console = remarks()
    with console.status("preparing the data"):
        prepared = prepare(config)
    shards = prepared.train if args.split == "all" else prepared.validation
    if shards.num_tokens < 2:
        raise ValueError(
            f"{shards.name}: found {shards.num_tokens} tokens; expected at least 2; "
            "give more text, or --split all"
        )
    shards.check_vocabulary(model_config.num_real_tokens)
    with console.status("evaluating"):
        found = _evaluate(args, folder, config, shards)
    for note in prepared.notes:
        console.print(note, markup=False, soft_wrap=True)
    name = f"all of {config.source}" if args.split == "all" else shards.name
    if args.json:
        print(json.dumps(_record(args, name, found)))
    else:
        from dualflow.evaluate.tables import to_rich

        output().print(to_rich(_table(name, found)))
    return 0


def _data_config(args: argparse.Namespace, folder: Path, longest: int) -> "DataConfig":
    """The data that is asked for, in the model's own tokens; what is not asked for is the run's."""
    import dataclasses

    from dualflow.data import DataConfig
    from dualflow.train.config import read_run_config

    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"tokenizer.json is missing in {folder}: there is nothing to read text with"
        )
    run_config = Path(args.model) / "config.json"
    of_run = folder != Path(args.model) and run_config.is_file()
    config = read_run_config(run_config).data if of_run else None
    if args.data is None and config is None:
        raise ValueError(f"{args.model} is not a run folder, so its data is not known; give --data")
    length = args.sequence_length or (config.sequence_length if config else longest)
    if args.sequence_length is not None and not 1 <= args.sequence_length <= longest:
        raise ValueError(
            f"--sequence-length is {args.sequence_length}; expected 1 .. {longest}, the positions "
            "the model has"
        )
    if args.data is not None:
        mask = config.document_mask if config else False
        config = DataConfig(source=args.data, document_mask=mask)
    assert config is not None
    changes = {"validation_fraction": 0.0, "validation_source": None} if args.split == "all" else {}
    return dataclasses.replace(
        config, tokenizer=str(folder / "tokenizer.json"), sequence_length=length, **changes
    )


def _evaluate(
    args: argparse.Namespace, folder: Path, config: "DataConfig", shards: object
) -> "EvaluatedLoss":

    from dualflow.checkpoint import load_model
    from dualflow.data import BatchLoader, ShardSet
    from dualflow.evaluate.loss import evaluate_loss
    from dualflow.model.device import pick_device

    assert isinstance(shards, ShardSet)
    device = pick_device(args.device)
    batches = BatchLoader(shards, config.sequence_length, args.batch_size, seed=0, shuffle=False)
    # Bytes are known per token of the split: not where some tokens are no targets.
    whole = shards.counted is None and not shards.document_mask
    return evaluate_loss(
        load_model(folder, device=device, weights=args.weights),
        batches,
        device,
        bytes_per_token=shards.bytes_per_token if whole else None,
    )


def _record(args: argparse.Namespace, data: str, found: "EvaluatedLoss") -> dict[str, object]:
    return {
        "model": args.model,
        "data": data,
        "tokens": found.tokens,
        "val_loss": found.loss,
        "val_loss_p": found.loss_p,
        "val_loss_q": found.loss_q,
        "bits_per_byte": found.bits_per_byte,
    }


def _table(data: str, found: "EvaluatedLoss") -> "Table":
    import math

    from dualflow.evaluate.tables import Table

    meanings = {
        "r (the model's prediction)": found.loss,
        "p (the primary alone, auxiliary off)": found.loss_p,
        "q (the auxiliary alone)": found.loss_q,
    }
    rows: list[tuple[str, ...]] = []
    for meaning, loss in meanings.items():
        if loss is not None:
            bits = "–"
            if found.bytes_per_token:
                bits = f"{loss / math.log(2) / found.bytes_per_token:.4f}"
            perplexity = math.exp(loss) if loss < 700 else math.inf
            rows.append((meaning, f"{loss:.4f}", f"{perplexity:.2f}", bits))
    return Table(
        title=f"Loss on the {data}: {found.tokens:,} tokens",
        columns=("distribution", "nats per token", "perplexity", "bits per byte"),
        rows=tuple(rows),
    )
