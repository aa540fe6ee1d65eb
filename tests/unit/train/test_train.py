"""Whole runs in this process: what a run leaves behind, and what its settings change."""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor

from dualflow.checkpoint import load_model, load_tensors
from dualflow.config import override
from dualflow.data import BatchLoader
from dualflow.model import build_model
from dualflow.train import RunConfig, loop, train
from dualflow.train.compilation import find_cpp_compiler
from dualflow.train.config import read_run_config
from dualflow.train.run_folder import read_metrics
from dualflow.train.step import NonFiniteError

TinyRun = Callable[..., RunConfig]


def weights(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        if path.name != "trainer.safetensors"
        for name, tensor in load_tensors(path).items()
    }


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == kind]


def curve(folder: Path) -> list[tuple[float, float, float]]:
    return [(r["loss"], r["grad_norm"], r["lr"]) for r in records(folder, "train")]


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("variant", ["standard", "dual", "phd2", "two_softmax"])
def test_a_run_leaves_config_metrics_checkpoints_model_and_result(
    tmp_path: Path, tiny_run: TinyRun, variant: str
) -> None:
    config = tiny_run("run", variant)
    result = train(config, tmp_path, progress="none")
    folder = tmp_path / "run"
    assert read_run_config(folder / "config.json") == config
    assert json.loads((folder / "result.json").read_text()) == result

    steps = records(folder, "train")
    assert [r["step"] for r in steps] == list(range(1, 13))
    assert [r["tokens"] for r in steps] == [64 * step for step in range(1, 13)]
    assert set(steps[0]) == {
        "kind", "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second",
    }  # fmt: skip
    checks = records(folder, "validation")
    assert [r["step"] for r in checks] == [5, 10, 12]
    assert set(checks[0]) == {"kind", "step", "tokens", "loss", "loss_p", "loss_q"}
    has_flows = variant in ("dual", "two_softmax")
    assert (checks[-1]["loss_p"] is not None) == (checks[-1]["loss_q"] is not None) == has_flows

    assert result["val_loss"] == checks[-1]["loss"] < checks[0]["loss"]
    assert (result["name"], result["variant"], result["seed"]) == ("run", variant, 0)
    assert (result["tokens"], result["steps"]) == (768, 12)
    assert result["params"] == result["params_primary"] + result["params_aux"]
    model = load_model(folder)
    assert result["params"] == sum(p.numel() for p in model.parameters())
    for column in ("prefill", "decode", "train"):
        assert result[f"{column}_flops_per_token"] > 0
    assert result["kv_bytes_per_token"] > 0
    assert result["train_seconds"] > 0
    assert json.loads((folder / "model/metrics.json").read_text())["val_loss"] == result["val_loss"]

    assert (folder / "checkpoints/latest").read_text().strip() == "step-00000012"
    assert_same_weights(folder / "checkpoints/step-00000012", folder / "model")
    assert set(weights(folder / "model")) <= set(build_model(config.model).state_dict())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_equal_runs_are_equal_bit_for_bit(tmp_path: Path, tiny_run: TinyRun) -> None:
    for name in ("a", "b"):
        train(tiny_run(name), tmp_path, progress="none")
    assert curve(tmp_path / "a") == curve(tmp_path / "b")
    assert_same_weights(tmp_path / "a/model", tmp_path / "b/model")


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the process "die" (an error nobody handles) before it takes step ``step + 1``."""
    taken = loop._step

    def dying(run):
        if run.progress.step == step:
            raise RuntimeError("killed")
        return taken(run)

    monkeypatch.setattr(loop, "_step", dying)


@pytest.mark.parametrize(
    ("killed", "settings"),
    [
        (7, {}),
        (5, {"micro_batch_size": 1}),
        (11, {"precision": "bf16"}),
        (3, {}),  # before the first checkpoint
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(
    tmp_path: Path,
    tiny_run: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
    killed: int,
    settings: dict[str, Any],
) -> None:
    train(tiny_run("straight", train=settings), tmp_path, progress="none")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        stop_after(patch, killed)
        train(tiny_run("resumed", train=settings), tmp_path, progress="none")
    torch.manual_seed(99)
    train(tiny_run("resumed", train=settings), tmp_path, resume=True, progress="none")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert curve(resumed) == curve(straight)
    assert records(resumed, "validation") == records(straight, "validation")
    assert_same_weights(resumed / "model", straight / "model")
    first, second = (
        load_tensors(run / "checkpoints/step-00000012/trainer.safetensors")
        for run in (straight, resumed)
    )
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert all(t.dtype == torch.float32 for n, t in second.items() if n.startswith("optimizer/"))


def test_samples_are_neither_replayed_nor_skipped_over_epochs(
    tmp_path: Path, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text has some 600 windows: 25 steps of 64 go over it more than twice."""
    seen: list[tuple[int, ...]] = []
    given = BatchLoader.__next__

    def spy(self: BatchLoader):
        batch = given(self)
        if self.shuffle:
            seen.append(batch.sample_ids)
        return batch

    monkeypatch.setattr(BatchLoader, "__next__", spy)
    settings = {"steps": 25, "batch_size": 64, "checkpoint_every": 5, "eval_every": 50}
    train(tiny_run("straight", train=settings), tmp_path, progress="none")
    straight = seen.copy()
    seen.clear()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        stop_after(patch, 12)
        train(tiny_run("resumed", train=settings), tmp_path, progress="none")
    del seen[10:]  # steps 11 and 12 were lost with the process
    train(tiny_run("resumed", train=settings), tmp_path, resume=True, progress="none")
    assert seen == straight
    flat = [sample for batch in straight for sample in batch]
    windows = max(flat) + 1
    assert len(flat) > 2 * windows
    assert sorted(flat[:windows]) == sorted(flat[windows : 2 * windows]) == list(range(windows))
    assert flat[:windows] != flat[windows : 2 * windows]


def test_a_finished_run_resumes_to_its_result(tmp_path: Path, tiny_run: TinyRun) -> None:
    first = train(tiny_run(), tmp_path, progress="none", resume="auto")
    assert train(tiny_run(), tmp_path, progress="none", resume="auto") == first
    with pytest.raises(ValueError, match="finished run"):
        train(tiny_run(), tmp_path, progress="none")
    changed = tiny_run(train={"steps": 3, "checkpoint_every": 2})
    assert train(changed, tmp_path, progress="none", overwrite=True)["steps"] == 3


def test_a_run_is_resumed_as_it_was_begun(
    tmp_path: Path, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        stop_after(patch, 6)
        train(tiny_run(), tmp_path, progress="none")
    with pytest.raises(ValueError, match="unfinished run"):
        train(tiny_run(), tmp_path, progress="none")
    changed = override(tiny_run(), ["optimizer.lr=1.0"])
    with pytest.raises(ValueError, match=r"optimizer\.lr"):
        train(changed, tmp_path, resume=True, progress="none")
    assert train(tiny_run(), tmp_path, resume=True, progress="none")["steps"] == 12


def test_the_first_step_already_moves_every_weight(tmp_path: Path, tiny_run: TinyRun) -> None:
    config = tiny_run(train={"steps": 1}, schedule={"warmup_steps": 100})
    train(config, tmp_path, progress="none")
    fresh = build_model(config.model).state_dict()
    for name, tensor in weights(tmp_path / "tiny/model").items():
        assert not torch.equal(tensor, fresh[name]), name


def test_micro_batches_and_checkpointed_activations_change_rounding_alone(
    tmp_path: Path, tiny_run: TinyRun
) -> None:
    settings = {
        "whole": {},
        "split": {"micro_batch_size": 1},
        "recomputed": {"activation_checkpointing": True},
    }
    for name, changes in settings.items():
        train(tiny_run(name, train=changes | {"steps": 4}), tmp_path, progress="none")
    whole = curve(tmp_path / "whole")
    for name in ("split", "recomputed"):
        assert curve(tmp_path / name)[0][:2] == pytest.approx(whole[0][:2], rel=1e-5)
        # Muon's bfloat16 iterations blow up what rounding leaves different, step by step.
        for found, expected in zip(curve(tmp_path / name), whole, strict=True):
            assert found[0] == pytest.approx(expected[0], rel=1e-3)


def test_bf16_keeps_small_updates_in_float32_weights(tmp_path: Path, tiny_run: TinyRun) -> None:
    optimizer = {"lr": 1e-5, "muon_lr": 1e-5, "weight_decay": 0.0}
    for precision in ("fp32", "bf16"):
        settings = {"steps": 50, "precision": precision, "eval_every": 50}
        train(tiny_run(precision, optimizer=optimizer, train=settings), tmp_path, progress="none")
    fresh = build_model(tiny_run().model).state_dict()
    for name, tensor in weights(tmp_path / "bf16/model").items():
        assert tensor.dtype == torch.float32
        if "embed" not in name:  # rows of bytes the text does not have stay
            assert (tensor != fresh[name]).float().mean() > 0.95, name
    exact, rounded = curve(tmp_path / "fp32"), curve(tmp_path / "bf16")
    assert rounded[-1][0] == pytest.approx(exact[-1][0], rel=0.01)


@pytest.mark.parametrize(
    "backend",
    ["eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_a_compiled_run_has_the_same_names_and_losses_and_resumes_into_an_eager_one(
    tmp_path: Path, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    if backend == "inductor" and find_cpp_compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    # Three sequences at a time: neither the batches nor the validation split divide by that.
    settings = {"steps": 8, "micro_batch_size": 3, "eval_batches": None}
    train(tiny_run("eager", train=settings), tmp_path, progress="none")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        stop_after(patch, 6)
        torch._dynamo.utils.counters.clear()
        train(tiny_run("compiled", train=settings | {"compile": "on"}), tmp_path, progress="none")
    # One for three sequences, validation included, and one for the fourth.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    train(tiny_run("compiled", train=settings), tmp_path, resume=True, progress="none")
    eager, compiled = tmp_path / "eager", tmp_path / "compiled"
    expected = weights(eager / "model")
    for folder in ("checkpoints/step-00000004", "model"):
        assert weights(compiled / folder).keys() == expected.keys()
    for kind in ("train", "validation"):
        pairs = zip(records(compiled, kind), records(eager, kind), strict=True)
        assert all(a["loss"] == pytest.approx(b["loss"], rel=1e-4) for a, b in pairs)


def test_a_diverged_run_names_the_step_and_keeps_its_last_checkpoint(
    tmp_path: Path, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = loop._step

    def spoil(run):
        if run.progress.step == 6:
            with torch.no_grad():
                run.model.model.norm.weight.fill_(float("nan"))
        return taken(run)

    monkeypatch.setattr(loop, "_step", spoil)
    with pytest.raises(NonFiniteError, match="step 7: the loss is nan.*checkpoint of step 4 is"):
        train(tiny_run(), tmp_path, progress="none")
    kept = weights(tmp_path / "tiny/checkpoints/step-00000004")
    assert all(bool(tensor.isfinite().all()) for tensor in kept.values())
    assert not (tmp_path / "tiny/result.json").exists()


def test_data_read_once_ends_the_run_early_with_a_whole_schedule(
    tmp_path: Path, tiny_run: TinyRun
) -> None:
    config = tiny_run(data={"on_end": "stop"}, train={"steps": 500, "batch_size": 64})
    result = train(config, tmp_path, progress="none")
    assert result["steps"] < 12
    rates = [rate for _, _, rate in curve(tmp_path / "tiny")]
    assert len(rates) == result["steps"]
    assert rates[-1] == pytest.approx(config.optimizer.lr * config.schedule.min_lr_ratio)


def test_without_a_validation_split_the_losses_are_null(tmp_path: Path, tiny_run: TinyRun) -> None:
    result = train(tiny_run(data={"validation_fraction": 0.0}), tmp_path, progress="none")
    assert result["val_loss"] is None
    assert records(tmp_path / "tiny", "validation") == []


def test_a_vocabulary_larger_than_the_model_is_one_line_before_anything_is_written(
    tmp_path: Path, tiny_run: TinyRun
) -> None:
    with pytest.raises(ValueError, match="259 ids, but the model has room for 100"):
        train(tiny_run(model={"vocab_size": 100}), tmp_path, progress="none")
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_one_line(
    tmp_path: Path, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="sees no CUDA device"):
        train(tiny_run(train={"device": "cuda"}), tmp_path, progress="none")


def test_plain_progress_lists_groups_and_says_how_it_runs(
    tmp_path: Path, tiny_run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_run(schedule={"warmup_steps": 50})
    train(config, tmp_path, progress="plain")
    shown = capsys.readouterr().err
    assert "hidden: muon" in shown
    assert "eager (train.compile is off); 12 steps, 768 tokens" in shown
    assert "warm-up shortened from 50 to 7 steps" in shown
    assert "step 12/12: validation loss" in shown


def test_a_tied_head_stays_one_tensor_over_training_and_resuming(
    tmp_path: Path, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied = {"model": {"tie_embeddings": True}}
    train(tiny_run("straight", **tied), tmp_path, progress="none")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        stop_after(patch, 6)
        train(tiny_run("resumed", **tied), tmp_path, progress="none")
    train(tiny_run("resumed", **tied), tmp_path, resume=True, progress="none")
    assert curve(tmp_path / "resumed") == curve(tmp_path / "straight")
    assert_same_weights(tmp_path / "resumed/model", tmp_path / "straight/model")
    model = load_model(tmp_path / "resumed")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in weights(tmp_path / "resumed/model")


def test_a_finished_run_of_another_configuration_is_not_taken_for_this_one(
    tmp_path: Path, tiny_run: TinyRun
) -> None:
    config = tiny_run()
    train(config, tmp_path, progress="none")
    again = train(config, tmp_path, resume="auto", progress="none")
    assert again["steps"] == config.train.steps
    longer = dataclasses.replace(
        config, train=dataclasses.replace(config.train, steps=config.train.steps + 1)
    )
    with pytest.raises(ValueError, match=r"another configuration: train\.steps"):
        train(longer, tmp_path, resume="auto", progress="none")


def test_a_missing_log_sink_is_told_before_a_run_folder_is_made(
    tmp_path: Path, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"dualflow\[wandb\]"):
        train(tiny_run(train={"wandb_project": "x"}), tmp_path, progress="none")
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob("*/config.json"))
