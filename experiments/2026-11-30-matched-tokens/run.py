"""Train the ablation ladder at matched tokens: ``recipes/matched_tokens.py``, several seeds.

    python experiments/2026-11-30-matched-tokens/run.py --jobs 2

Each run is a process of its own with one thread; finished runs are kept and interrupted ones
continue, so the command may be repeated. At the end it adds its rows to results.json beside this
file; ``python -m dualflow.evaluate.experiment results.json --out .`` renders table and plot from
that alone.
"""

import argparse
import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from dualflow.recipes.matched_tokens import EQUAL_FLOPS, LADDER, SEEDS, matched_tokens
from dualflow.train.subprocesses import train_in_subprocess

HERE = Path(__file__).parent
COLUMNS = (
    "seed", "tokens", "val_loss", "val_loss_p", "val_loss_q", "params", "train_flops_per_token",
    "prefill_flops_per_token", "decode_flops_per_token", "kv_bytes_per_token", "train_seconds",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", default="runs/matched-tokens", help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    rungs = [*LADDER, EQUAL_FLOPS]
    parser.add_argument("--rungs", nargs="+", choices=rungs, default=rungs)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    args = parser.parse_args()
    # Seed by seed, so that an experiment stopped early still has whole ladders.
    tasks = [(seed, rung) for seed in args.seeds for rung in args.rungs]
    results = HERE / "results.json"
    rows = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = [pool.submit(one_run, rung, seed, args.runs) for seed, rung in tasks]
        for number, done in enumerate(as_completed(waiting), 1):
            row = done.result()
            print(f"{number} of {len(tasks)}: {row}", flush=True)
            key = (row["variant"], row["seed"])
            rows = [old for old in rows if (old["variant"], old["seed"]) != key] + [row]
    rows.sort(key=lambda row: (rungs.index(row["variant"]), row["seed"]))
    results.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def one_run(rung: str, seed: int, runs: str) -> dict:
    """The result columns of one run; trained now, or taken from its folder."""
    config = matched_tokens(rung, seed)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, threads=1))
    result = train_in_subprocess(config, runs, resume="auto")
    folder = Path(runs) / config.name
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    columns = {name: result[name] for name in COLUMNS}
    return {"variant": rung, **columns, "commit": environment["commit"]}


if __name__ == "__main__":
    main()
