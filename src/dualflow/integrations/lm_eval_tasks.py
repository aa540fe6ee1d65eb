"""Run tasks of lm-eval on a model of ours and give their results as flat rows."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import evaluator
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.tasks import TaskManager

from dualflow.integrations.lm_eval import DualFlowLM

BOOTSTRAPS = 1000
"""Resamplings behind the standard errors that have no formula."""


def evaluate_tasks(
    model: DualFlowLM,
    tasks: Sequence[str],
    *,
    include_path: str | Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> list[dict[str, Any]]:
    """A row for each metric of each task: ``task``, ``metric``, ``filter``, ``value``, ``stderr``
    (None: there is none), ``higher_is_better``, ``num_fewshot``, ``samples``, ``version``.

    tasks:         names of tasks or groups.
    include_path:  a folder with tasks of one's own (YAML), which may be named beside lm-eval's.
    limit:         the first so many documents of each task; None: all.
    num_fewshot:   examples before each question; None: as the task has it. As everywhere in
                   lm-eval, a task that says 0 itself has none.

    Raises ``ValueError`` where a task is unknown or cannot be loaded.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    loaded = _manager(tasks, include_path).load(list(tasks))
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (own != 0 and num_fewshot is not None):  # a task's 0 means never
            task.set_config("num_fewshot", num_fewshot or 0)
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    # Not simple_evaluate, which seeds this process's generators and describes the machine.
    found = evaluator.evaluate(
        model, loaded, limit=limit, bootstrap_iters=BOOTSTRAPS, log_samples=False
    )
    assert found is not None  # it is for other ranks alone
    return list(_rows(found))


def _manager(tasks: Sequence[str], include_path: str | Path | None) -> TaskManager:
    """One that knows the tasks. Lm-eval's own, thousands of files, are listed only if need be."""
    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ValueError(f"there is no folder {include_path} with tasks")
        manager = TaskManager(include_defaults=False, include_path=str(include_path))
        if set(tasks) <= set(manager.all_tasks):
            return manager
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise ValueError(
            f"lm-eval knows no task {', '.join(unknown)}; it has {len(manager.all_tasks):,}, "
            "listed by `lm-eval ls tasks`; tasks of your own: --include-path DIR"
        )
    return manager


def _rows(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, comma, kept = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = values.get(f"{metric}_stderr,{kept}")
            yield {
                "task": task,
                "metric": metric,
                "filter": kept,
                "value": float(value),
                "stderr": float(error) if isinstance(error, (int, float)) else None,
                "higher_is_better": found["higher_is_better"].get(task, {}).get(metric),
                "num_fewshot": found["n-shot"].get(task),
                "samples": found["n-samples"].get(task, {}).get("effective"),
                "version": str(found["versions"].get(task)),
            }
