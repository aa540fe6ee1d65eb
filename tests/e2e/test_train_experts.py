"""A mixture of experts through training, a stop, its model folder and generation."""

from pathlib import Path

import pytest
import torch

from dualflow import LLM, RequestParams
from dualflow.checkpoint import load_model
from dualflow.data.config import DataConfig
from dualflow.spec import AuxConfig, ModelConfig, MoEConfig
from dualflow.train import RunConfig, ScheduleConfig, TrainConfig, train

MOE = MoEConfig(
    num_experts=4, experts_per_token=1, expert_size=16, shared_size=16, scores="sigmoid",
    selection_bias=True, balance_weight=0.01, z_weight=1e-3,
)  # fmt: skip
MODEL = ModelConfig(
    variant="dual", vocab_size=259, hidden_size=16, num_layers=2, num_heads=2,
    intermediate_size=32, max_position=32, moe=MOE, aux=AuxConfig(experts_per_token=2),
)  # fmt: skip


def run_config(name: str, source: Path, steps: int = 6) -> RunConfig:
    return RunConfig(
        name=name,
        model=MODEL,
        data=DataConfig(source=str(source), tokenizer="bytes", sequence_length=16),
        schedule=ScheduleConfig(warmup_steps=1),
        train=TrainConfig(
            steps=steps,
            batch_size=4,
            micro_batch_size=2,
            checkpoint_every=3,
            log_every=1,
            threads=1,
        ),
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return path


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, source: Path) -> None:
    whole = train(run_config("whole", source), tmp_path, progress="none")
    assert whole["val_loss_p"] is not None
    split = run_config("split", source)
    train(split, tmp_path, progress="none")
    (tmp_path / "split" / "result.json").unlink()
    (tmp_path / "split" / "checkpoints" / "latest").write_text("step-00000003\n")
    train(split, tmp_path, resume=True, progress="none")
    ours, theirs = (
        load_model(tmp_path / name / "model").state_dict() for name in ("split", "whole")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    biases = [tensor for name, tensor in ours.items() if name.endswith("selection_bias.weight")]
    assert len(biases) == 2 and all(bias.any() and bias.dtype == torch.float32 for bias in biases)


def test_it_is_told_and_generates(tmp_path: Path, source: Path) -> None:
    train(run_config("run", source), tmp_path, progress="none")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"expert_load_primary_1_max"' in lines and '"expert_load_auxiliary_0_min"' in lines
    with LLM(tmp_path / "run", weights="bfloat16") as llm:
        (output,) = llm.generate("the quick", RequestParams(temperature=0.0, max_tokens=5))
    assert len(output.outputs[0].token_ids) == 5


def test_a_selection_bias_stays_float32_in_a_bfloat16_model(tmp_path: Path, source: Path) -> None:
    train(run_config("run", source), tmp_path, progress="none")
    stored = load_model(tmp_path / "run")
    half = load_model(tmp_path / "run", dtype=torch.bfloat16)
    for name, tensor in half.state_dict().items():
        if name.endswith("selection_bias.weight"):
            assert torch.equal(tensor, stored.state_dict()[name])
        else:
            assert tensor.dtype == torch.bfloat16, name
    moved = stored.to(torch.bfloat16).to(torch.float32)
    for name, tensor in moved.state_dict().items():
        if name.endswith("selection_bias.weight"):
            assert tensor.dtype == torch.float32 and torch.equal(tensor, half.state_dict()[name])
