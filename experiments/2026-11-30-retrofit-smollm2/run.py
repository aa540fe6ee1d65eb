"""Retrofit SmolLM2-135M with an auxiliary flow, its primary frozen, and measure what it earns.

    python experiments/2026-11-30-retrofit-smollm2/run.py --model MODEL --dictionary GCIDE.dict.dz

A cell is one training run of minutes (``--list`` names them). A finished cell is kept and not run
again, an interrupted one begins anew, so the command may be stopped and repeated; two may run at
once on different cells (``--only gcide``, ``--only python-stdlib``). At the end of each cell
results.json beside this file is written from all that are there, and table and plot from it alone
(``render.py``).
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from cells import Cell, chosen, grid
from corpora import prepared
from models import AdaptedPrimary, Auxiliary, Passes, autocast
from render import render
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from scores import Scores, fitted_weight, joined, readouts
from settings import (
    BATCH,
    FIT_BATCHES,
    HELD_OUT_BATCH,
    HELD_OUT_TOKENS,
    LENGTH,
    TOKENS,
    optimizer_config,
    schedule_config,
)

from dualflow.checkpoint.store import load_model
from dualflow.checkpoint.tensors import load_tensors, save_tensors
from dualflow.data.loader import Batch, BatchLoader
from dualflow.data.prepare import PreparedData
from dualflow.train.machine import keep_freed_memory
from dualflow.train.optimizers import Optimizers
from dualflow.train.run_folder import environment, write_json
from dualflow.train.schedule import learning_rate_factor

HERE = Path(__file__).parent


class Laboratory:
    """The model, the texts and the primary's passes, shared by the cells of this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.runs = Path(args.runs)
        self.tokens: int = args.tokens
        self.model_folder = Path(args.model)
        self.dictionary = Path(args.dictionary)
        self.primary = load_model(self.model_folder)
        self.passes = Passes(is_kept=not args.low_memory)
        self._data: dict[str, PreparedData] = {}
        self._before: dict[str, tuple[Scores, Scores]] = {}

    def data(self, corpus: str) -> PreparedData:
        """The corpus in tokens."""
        if corpus not in self._data:
            self._data[corpus] = prepared(
                corpus, model=self.model_folder, dictionary=self.dictionary, runs=self.runs,
                length=LENGTH,
            )  # fmt: skip
        return self._data[corpus]

    def held_out(self, corpus: str) -> list[Batch]:
        """The same windows for every cell, drawn from all that is held out."""
        loader = BatchLoader(self.data(corpus).validation, LENGTH, HELD_OUT_BATCH, seed=0)
        return [loader.batch_at(i) for i in range(HELD_OUT_TOKENS // (HELD_OUT_BATCH * LENGTH))]

    def training(self, cell: Cell) -> tuple[list[Batch], list[Batch]]:
        """The batches to train on, a function of corpus and seed alone, and the next few of the
        same stream, which nothing is trained on: a learned α is fitted to them.
        """
        loader = BatchLoader(self.data(cell.corpus).train, LENGTH, BATCH, cell.seed)
        steps = self.steps
        batches = [loader.batch_at(i) for i in range(steps + FIT_BATCHES)]
        return batches[:steps], batches[steps:]

    @property
    def steps(self) -> int:
        return self.tokens // (BATCH * LENGTH)

    def before(self, corpus: str) -> tuple[Scores, Scores]:
        """The scores of p and q of a newborn retrofit on what is held out."""
        file = self.runs / f"before-{corpus}-{HELD_OUT_TOKENS}tokens.safetensors"
        if corpus not in self._before and file.exists():
            saved = load_tensors(file)
            parts = [Scores(*(saved[f"{x}.{name}"] for name in Scores._fields)) for x in "pq"]
            self._before[corpus] = parts[0], parts[1]
        elif corpus not in self._before:
            newborn = Auxiliary(self.primary, 0, "mixture", 0, self.passes)
            batches = self.held_out(corpus)
            p, q = self._before[corpus] = _score_all(newborn, f"held out {corpus}", batches)
            found = {"p": p._asdict(), "q": q._asdict()}
            save_tensors(file, {f"{x}.{n}": t for x, of in found.items() for n, t in of.items()})
        return self._before[corpus]


def main() -> None:
    args = _arguments()
    cells = chosen(grid(), args.only, args.tokens)
    runs = Path(args.runs)
    if args.tokens < BATCH * LENGTH:
        sys.exit(f"error: --tokens is {args.tokens}; expected at least {BATCH * LENGTH}, one step")
    if args.list:
        for cell in cells:
            name = cell.name(args.tokens)
            print(f"{'finished' if _file(runs, name).exists() else 'to do   '}  {name}")
        return
    (runs / "cells").mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    left = [cell for cell in cells if not _file(runs, cell.name(args.tokens)).exists()]
    try:
        if left:
            _run_cells(left, Laboratory(args), args.threads)
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\nstopped; finished cells are kept, the same command goes on with the others")
    _publish(runs, args.tokens)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="models/smollm2-f32", help="folder (%(default)s)")
    parser.add_argument(
        "--dictionary", default="/usr/share/dictd/gcide.dict.dz", help="of dict-gcide (%(default)s)"
    )
    parser.add_argument("--runs", default="runs/retrofit-smollm2", help="folder (%(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="a cell's (%(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD",
                        help="cells whose name holds every word")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="name the cells and stop")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    parser.add_argument("--low-memory", action="store_true",
                        help="make the frozen primary's passes anew for every cell")  # fmt: skip
    return parser.parse_args()


def _run_cells(cells: list[Cell], laboratory: Laboratory, threads: int) -> None:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), TextColumn("{task.percentage:.0f} %"),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    machine = environment(torch.device("cpu"), 1)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(cells) * laboratory.steps)
        last = cells[0]
        for number, cell in enumerate(cells, 1):
            name = cell.name(laboratory.tokens)
            progress.update(task, description=f"{number} of {len(cells)}: {name}")
            file = _file(laboratory.runs, name)
            if file.exists():  # another process was faster
                progress.advance(task, laboratory.steps)
                continue
            if cell.corpus != last.corpus or cell.seed != last.seed:
                laboratory.passes.forget("train" if cell.corpus == last.corpus else "")
            last = cell
            row = _run_cell(cell, laboratory, lambda: progress.advance(task))
            row |= {"commit": machine["commit"], "torch": machine["torch"],
                    "machine": f"{machine['cpu']}, {threads} thread"}  # fmt: skip
            write_json(file, row)
            _publish(laboratory.runs, laboratory.tokens)
            progress.console.print(f"{number} of {len(cells)}: {json.dumps(row)}", soft_wrap=True)


def _run_cell(cell: Cell, laboratory: Laboratory, advance) -> dict:
    """Train and measure one cell; its row."""
    p_before, q_before = laboratory.before(cell.corpus)
    batches, fit = laboratory.training(cell)
    if cell.trained == "aux":
        trainee = Auxiliary(
            laboratory.primary, cell.lora_rank, cell.objective, cell.seed, laboratory.passes
        )
    else:
        trainee = AdaptedPrimary(laboratory.primary, cell.lora_rank, cell.seed)
    reused = cell.trained == "aux" and laboratory.passes.has(f"train {cell.corpus} {cell.seed} 0")
    begun, cpu = time.perf_counter(), time.process_time()
    optimizers = _train(trainee, cell, batches, advance)
    minutes, cpu = (time.perf_counter() - begun) / 60, (time.process_time() - cpu) / 60
    row = {
        "corpus": cell.corpus, "seed": cell.seed, "lora_rank": cell.lora_rank,
        "trained": cell.trained, "objective": cell.objective, "loss_p": p_before.loss,
    }  # fmt: skip
    if isinstance(trainee, Auxiliary):
        born = readouts(p_before, q_before, torch.zeros(3))
        row["loss_r_before"] = born[cell.objective]
        row |= _aux_losses(trainee, cell, laboratory, fit)
    else:
        held_out = laboratory.held_out(cell.corpus)
        row["loss_r_before"] = p_before.loss
        row["loss_r_after"] = joined([trainee.score(batch) for batch in held_out]).loss
    return row | {
        "train_tokens": len(batches) * BATCH * LENGTH,
        "held_out_tokens": len(p_before.log_prob),
        "train_minutes": round(minutes, 2),
        "train_cpu_minutes": round(cpu, 2),
        "primary_passes_reused": reused,
        "trainable_parameters": sum(p.numel() for p in optimizers.parameters.values()),
    }


def _train(
    trainee: Auxiliary | AdaptedPrimary, cell: Cell, batches: list[Batch], advance
) -> Optimizers:
    config, schedule = optimizer_config(cell.lora_rank), schedule_config(len(batches))
    optimizers = Optimizers(trainee.model, config)
    assert config.grad_clip is not None
    for step, batch in enumerate(batches):
        optimizers.set_factor(learning_rate_factor(step, len(batches), schedule))
        optimizers.zero_grad()
        with autocast():
            loss = trainee.loss(f"train {cell.corpus} {cell.seed} {step}", batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(optimizers.parameters.values(), config.grad_clip)
        optimizers.step()
        advance()
    return optimizers


def _aux_losses(
    trainee: Auxiliary, cell: Cell, laboratory: Laboratory, fit: list[Batch]
) -> dict[str, float]:
    """The losses of p, q and every readout after training."""
    p_before, _ = laboratory.before(cell.corpus)
    held_out = laboratory.held_out(cell.corpus)
    trainee.check_frozen()
    again = trainee.primary_scores(held_out[0])
    assert torch.equal(again.log_prob, p_before.log_prob[: len(again.log_prob)]), "p has changed"
    named = enumerate(held_out)
    q = joined([trainee.score_q(f"held out {cell.corpus} {i}", batch) for i, batch in named])
    fitted_3 = fitted_weight(*_score_all(trainee, f"train {cell.corpus} {cell.seed} fit", fit))
    weight_3 = fitted_3 if trainee.weight_3 is None else trainee.weight_3
    losses = readouts(p_before, q, weight_3)
    return {
        "loss_r_after": losses[cell.objective],
        "loss_q_after": q.loss,
        **{f"loss_{kind}_after": loss for kind, loss in losses.items()},
        "loss_fitted_after": readouts(p_before, q, fitted_3)["learned"],
        **{f"alpha_w{i}": round(w, 4) for i, w in enumerate(weight_3.tolist())},
        **{f"alpha_fitted_w{i}": round(w, 4) for i, w in enumerate(fitted_3.tolist())},
    }


def _score_all(model: Auxiliary, name: str, batches: list[Batch]) -> tuple[Scores, Scores]:
    p = joined([model.score_p(f"{name} {i}", batch) for i, batch in enumerate(batches)])
    q = joined([model.score_q(f"{name} {i}", batch) for i, batch in enumerate(batches)])
    return p, q


def _file(runs: Path, name: str) -> Path:
    return runs / "cells" / f"{name}.json"


def _publish(runs: Path, tokens: int) -> None:
    """results.json from the finished cells, in the grid's order, and what is drawn from it."""
    files = (_file(runs, cell.name(tokens)) for cell in grid())
    rows = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    if rows:
        write_json(HERE / "results.json", rows)
        render(HERE / "results.json", HERE)


if __name__ == "__main__":
    main()
