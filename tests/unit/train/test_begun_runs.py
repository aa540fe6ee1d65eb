"""Whole runs that begin from a model: what is trained, what stays as it was, and what is kept."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils

from dualflow.checkpoint import load_model, load_tensors
from dualflow.checkpoint.store import read_config, read_primary_config
from dualflow.model.backbone import is_aux
from dualflow.plan.costs import train_flops_per_token
from dualflow.spec import parameter_counts
from dualflow.train import RunConfig, loop, train
from dualflow.train.config import read_run_config
from dualflow.train.initial import load_initial
from dualflow.train.optimizers import Optimizers
from dualflow.train.run_folder import read_metrics
from tests.unit.train.initial_models import PRIMARY_CONFIG, standard_model, write_initial

TinyRun = Callable[..., RunConfig]


def validations(run: Path) -> list[dict[str, Any]]:
    return [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "validation"]


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    taken = loop._step

    def dying(run):
        if run.progress.step == step:
            raise RuntimeError("killed")
        return taken(run)

    monkeypatch.setattr(loop, "_step", dying)


def assert_primary_is_that_of(source: Path, model: Path) -> None:
    assert (source / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"micro_batch_size": 1, "activation_checkpointing": True},
        {"precision": "bf16"},
    ],
)
def test_a_frozen_primary_ends_as_it_began_bit_for_bit(
    tmp_path: Path, source: Path, begin: TinyRun, settings: dict[str, Any]
) -> None:
    result = train(begin(train=settings), tmp_path, progress="none")
    model = tmp_path / "tiny/model"
    assert_primary_is_that_of(source, model)
    before, after = (load_tensors(folder / "aux.safetensors") for folder in (source, model))
    assert before.keys() == after.keys()
    assert all(tensor.dtype == torch.bfloat16 for tensor in after.values())
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved == after.keys()

    checks = validations(tmp_path / "tiny")
    assert [record["step"] for record in checks] == [0, 3, 6]
    assert len({record["loss_p"] for record in checks}) == 1
    assert result["val_loss_initial"] == checks[0]["loss"] > result["val_loss"]
    assert result["val_loss_p_initial"] == result["val_loss_p"]
    config = read_config(source)
    counts = parameter_counts(config)
    assert (result["trainable"], result["params_trainable"]) == ("aux", counts.aux)
    assert result["params"] == counts.total
    assert result["train_flops_per_token"] == train_flops_per_token(config, 16, "aux")


def test_what_goes_along_with_a_model_goes_through_checkpoints_to_the_end(
    tmp_path: Path, source: Path, begin: TinyRun
) -> None:
    train(begin(), tmp_path, progress="none")
    for place in ("checkpoints/step-00000004", "model"):
        folder = tmp_path / "tiny" / place
        for file in (
            "tokenizer.json", "tokenizer_config.json", "generation_config.json",
            "chat_template.jinja",
        ):  # fmt: skip
            assert (folder / file).read_bytes() == (source / file).read_bytes(), file
        assert read_primary_config(folder) == PRIMARY_CONFIG
        assert read_config(folder) == read_config(source)
    assert load_model(tmp_path / "tiny").model.norm.weight.dtype == torch.float32
    saved = load_tensors(tmp_path / "tiny/checkpoints/step-00000004/model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())


def test_nothing_is_spent_on_frozen_tensors(tmp_path: Path, source: Path, begin: TinyRun) -> None:
    config = begin()
    model = load_initial(str(source), config.model, torch.device("cpu"))
    model.freeze_primary()
    optimizers = Optimizers(model, config.optimizer)
    tokens = torch.arange(32).view(2, 16)
    model.loss(tokens, tokens).total.backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, _ in model.named_parameters() if is_aux(name)}
    held = sum(gradient.nbytes for gradient in optimizers.gradients())
    assert held == 4 * parameter_counts(config.model).aux

    train(config, tmp_path, progress="none")
    state = load_tensors(tmp_path / "tiny/checkpoints/step-00000006/trainer.safetensors")
    names = [name for name in state if name.startswith("optimizer/")]
    assert names
    assert all(".aux." in name for name in names)


@pytest.mark.parametrize("killed", [5, 1])
def test_a_killed_run_goes_on_bit_for_bit(
    tmp_path: Path, source: Path, begin: TinyRun, monkeypatch: pytest.MonkeyPatch, killed: int
) -> None:
    straight = train(begin("straight"), tmp_path, progress="none")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        stop_after(patch, killed)
        train(begin("resumed"), tmp_path, progress="none")
    config = begin("resumed")
    kept = (source / "model.safetensors").read_bytes()
    if killed > 1:  # there is a checkpoint: the model to begin from is needed no more
        shutil.rmtree(source)
    resumed = train(config, tmp_path, resume=True, progress="none")
    own = {"name", "train_seconds", "finished"}
    assert {k: v for k, v in resumed.items() if k not in own} == {
        k: v for k, v in straight.items() if k not in own
    }
    assert validations(tmp_path / "resumed") == validations(tmp_path / "straight")
    for file in ("model.safetensors", "aux.safetensors", "tokenizer.json", "config.json"):
        first, second = (tmp_path / run / "model" / file for run in ("resumed", "straight"))
        assert first.read_bytes() == second.read_bytes(), file
    assert (tmp_path / "resumed/model/model.safetensors").read_bytes() == kept


@pytest.mark.parametrize(
    "backend",
    ["eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_a_compiled_loss_trains_the_auxiliary_alone_too(
    tmp_path: Path, source: Path, begin: TinyRun, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    train(begin("eager"), tmp_path, progress="none")
    torch._dynamo.utils.counters.clear()
    train(begin("compiled", train={"compile": "on"}), tmp_path, progress="none")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert_primary_is_that_of(source, tmp_path / "compiled/model")
    pairs = zip(validations(tmp_path / "compiled"), validations(tmp_path / "eager"), strict=True)
    assert all(a["loss"] == pytest.approx(b["loss"], rel=1e-4) for a, b in pairs)
    assert len({record["loss_p"] for record in validations(tmp_path / "compiled")}) == 1


def test_everything_can_be_trained_on_from_a_model_and_keeps_its_formats(
    tmp_path: Path, source: Path, begin: TinyRun
) -> None:
    result = train(begin(train={"trainable": "all"}), tmp_path, progress="none")
    assert result["params_trainable"] == result["params"]
    assert result["val_loss"] < result["val_loss_initial"]
    before, after = (
        load_tensors(folder / "model.safetensors") for folder in (source, tmp_path / "tiny/model")
    )
    assert {n: t.dtype for n, t in after.items()} == {n: t.dtype for n, t in before.items()}
    assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_a_standard_model_is_trained_on(tmp_path: Path, begin: TinyRun) -> None:
    plain = write_initial(tmp_path / "plain", standard_model())
    result = train(begin(folder=plain, train={"trainable": "all"}), tmp_path, progress="none")
    assert result["val_loss"] < result["val_loss_initial"]
    assert result["val_loss_p_initial"] is None


def test_a_run_begins_from_a_run(tmp_path: Path, begin: TinyRun) -> None:
    first = train(begin("first"), tmp_path, progress="none")
    second = train(begin("second", folder=tmp_path / "first"), tmp_path, progress="none")
    # Stored in bfloat16 in between.
    assert second["val_loss_initial"] == pytest.approx(first["val_loss"], abs=1e-2)


def test_a_run_is_not_resumed_with_another_model(
    tmp_path: Path, source: Path, begin: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        stop_after(patch, 3)
        train(begin(), tmp_path, progress="none")
    changed = load_model(source)
    changed.model.embed_tokens.weight.data += 1
    other = write_initial(tmp_path / "other", changed)
    with pytest.raises(ValueError, match="another configuration: initial_digest"):
        train(begin(folder=other), tmp_path, resume=True, progress="none")


def test_a_model_that_changed_before_the_first_checkpoint_is_refused(
    tmp_path: Path, source: Path, begin: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        stop_after(patch, 1)
        train(begin(), tmp_path, progress="none")
    recorded = read_run_config(tmp_path / "tiny/config.json")
    changed = load_model(source)
    changed.model.embed_tokens.weight.data += 1
    write_initial(source, changed)
    with pytest.raises(ValueError, match="is not the model that this run began from"):
        train(recorded, tmp_path, resume=True, progress="none")


def test_a_run_does_not_replace_what_it_begins_from(tmp_path: Path, begin: TinyRun) -> None:
    train(begin(), tmp_path, progress="none")
    again = begin(folder=tmp_path / "tiny")
    with pytest.raises(ValueError, match="lies in the folder of this very run"):
        train(again, tmp_path, overwrite=True, progress="none")
    assert (tmp_path / "tiny/model/model.safetensors").is_file()


def test_a_damaged_record_of_formats_is_told(
    tmp_path: Path, begin: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        stop_after(patch, 5)
        train(begin(), tmp_path, progress="none")
    path = tmp_path / "tiny/checkpoints/step-00000004/trainer.json"
    header = json.loads(path.read_text())
    assert header["stored_as"] == {"main": "BF16", "others": {"model.norm.weight": "F32"}}
    path.write_text(json.dumps(header | {"stored_as": {"main": "F7", "others": {}}}))
    with pytest.raises(ValueError, match="stored_as names 'F7'; expected any of"):
        train(begin(), tmp_path, resume=True, progress="none")
