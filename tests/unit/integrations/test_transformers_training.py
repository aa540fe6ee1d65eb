"""Training dual-flow models with transformers' tools: losses, a frozen primary, Trainer, PEFT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualflow.spec import AuxConfig, ModelConfig, ReadoutConfig
from dualflow.testing.configs import family_config, flow_config, tiny_config
from dualflow.testing.tensors import random_tokens, tiny_model

pytest.importorskip("transformers")

import transformers

from dualflow.integrations.transformers import DualFlowForCausalLM, modeling_dualflow
from dualflow.integrations.transformers.backbone_dualflow import is_aux
from dualflow.model.flows import is_aux as is_ours
from dualflow.testing.twins import twin_of

DUAL = family_config("llama_mha_tied", "dual")


def values(model: nn.Module, aux: bool) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: p.detach().clone() for name, p in named if is_aux(name) == aux}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    return [name for name in before if not torch.equal(before[name], after[name])]


def trained(model: Any, folder: Path, **changes: Any) -> Any:
    """The trainer after three steps on random rows."""
    pytest.importorskip("accelerate")
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2, "max_steps": 3, "learning_rate": 1e-2, "save_steps": 3,
        "report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "seed": 0,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(folder), **(options | changes))
    rows = [{"input_ids": ids, "labels": ids} for ids in random_tokens(DUAL, 12, 16)]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])  # type: ignore[arg-type]
    trainer.train()
    return trainer


def test_labels_that_are_not_counted_change_nothing() -> None:
    twin = twin_of(tiny_model(DUAL))
    ids = random_tokens(DUAL, 2, 12)
    labels = ids.clone()
    labels[0, :7] = -100
    labels[1] = -100
    with torch.no_grad():
        out = twin(ids, labels=labels)
        expected = -out.logits[0, 6:-1].gather(-1, ids[0, 7:, None]).mean()
        torch.testing.assert_close(out.loss, expected)
        counted = twin(ids, labels=labels, num_items_in_batch=torch.tensor(50)).loss
        torch.testing.assert_close(counted, expected * 5 / 50)
        shifted = torch.cat([labels[:, 1:], labels.new_full((2, 1), -100)], dim=1)
        torch.testing.assert_close(twin(ids, shift_labels=shifted).loss, expected)
        assert float(twin(ids, labels=torch.full_like(ids, -100)).loss) == 0


@pytest.mark.parametrize("case", ["full", "three_flows", "learned_alpha", "primary_loss"])
def test_loss_in_chunks_is_the_loss_at_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = twin_of(tiny_model(flow_config(case))).train()
    ids = random_tokens(DUAL, 2, 12)
    whole = twin(ids, labels=ids).loss
    whole.backward()
    gradients = {name: p.grad for name, p in twin.named_parameters()}
    twin.zero_grad()
    monkeypatch.setattr(modeling_dualflow, "_LOGITS_PER_CHUNK", 53 * 5)
    largest = 0

    def watch(module: nn.Module, inputs: Any, out: Tensor) -> None:
        nonlocal largest
        largest = max(largest, out.shape[-2])

    twin.lm_head.register_forward_hook(watch)
    parts = twin(ids, labels=ids).loss
    parts.backward()
    assert largest == 5
    torch.testing.assert_close(parts, whole)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=name)


def test_training_computes_no_logits_unless_asked() -> None:
    twin = twin_of(tiny_model(DUAL)).train()
    ids = random_tokens(DUAL, 1, 6)
    assert twin(ids, labels=ids).logits is None
    assert twin(ids, labels=ids, logits_to_keep=0).logits.shape == (1, 6, 53)
    assert twin(ids, labels=ids, logits_to_keep=2).logits.shape == (1, 2, 53)
    assert twin.eval()(ids, labels=ids).logits.shape == (1, 6, 53)


def test_a_frozen_primary_keeps_nothing_for_a_backward_pass() -> None:
    twin = twin_of(tiny_model(DUAL)).train()
    twin.freeze_primary()
    ids = random_tokens(DUAL, 2, 12)
    states = []
    for layer in twin.model.layers:
        layer.register_forward_hook(lambda module, inputs, out: states.append(out))
    twin(ids, labels=ids).loss.backward()
    assert [(h1.requires_grad, h2.requires_grad) for h1, h2 in states] == [(False, True)] * 2
    gradients = {name: p.grad for name, p in twin.named_parameters()}
    assert all((gradient is not None) == is_aux(name) for name, gradient in gradients.items())
    with pytest.raises(ValueError, match="no auxiliary flow"):
        twin_of(tiny_model(tiny_config())).freeze_primary()


def test_both_packages_call_the_same_parameters_auxiliary() -> None:
    readout = ReadoutConfig(kind="learned")
    for config in (flow_config("owns_everything", readout=readout), flow_config("lora"), DUAL):
        for name in tiny_model(config).state_dict():
            assert is_aux(name) == is_ours(name), name


@pytest.mark.parametrize("frozen", [True, False])
def test_the_trainer_trains(frozen: bool, tmp_path: Path) -> None:
    model: Any = twin_of(tiny_model(DUAL, dtype=torch.float32))
    if frozen:
        model.freeze_primary()
    primary, aux = values(model, aux=False), values(model, aux=True)
    trainer = trained(model, tmp_path)
    assert bool(changed(primary, values(model, aux=False))) != frozen
    assert changed(aux, values(model, aux=True)) == list(aux)
    assert trainer.evaluate()["eval_loss"] < 5
    assert trainer.predict(trainer.eval_dataset).predictions.shape == (4, 16, 53)
    loaded: Any = DualFlowForCausalLM.from_pretrained(tmp_path / "checkpoint-3")
    assert changed(dict(model.state_dict()), dict(loaded.state_dict())) == []


def test_accumulated_micro_batches_are_one_batch(tmp_path: Path) -> None:
    ends = []
    for number, (batch, steps) in enumerate([(4, 1), (1, 4)]):
        model: Any = twin_of(tiny_model(DUAL, dtype=torch.float32))
        trained(
            model, tmp_path / str(number), per_device_train_batch_size=batch, max_steps=1,
            gradient_accumulation_steps=steps, optim="sgd", save_strategy="no",
        )  # fmt: skip
        ends.append(model.state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "config", [DUAL, flow_config("lora")], ids=["whole", "with LoRA of its own"]
)
def test_peft_adapts_the_shared_matrices(config: ModelConfig, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base: Any = twin_of(tiny_model(config, dtype=torch.float32))
    ids = random_tokens(config, 1, 6)
    # The primary's matrices by their rooms: a flow's own have none. Its LoRA is trained and saved
    # with the adapter, as PEFT knows by its name what is one.
    lora = peft.LoraConfig(
        r=2, target_modules=r".*self_attn\.(q_proj|v_proj)", task_type="CAUSAL_LM"
    )
    with torch.no_grad():
        before = base(ids).logits
    model = peft.get_peft_model(base, lora)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, before)
    trained(model, tmp_path / "run")
    with torch.no_grad():
        after = model(ids).logits
    assert not torch.allclose(after, before)
    assert model.generate(input_ids=ids, max_new_tokens=4, pad_token_id=0).shape == (1, 10)
    model.save_pretrained(tmp_path / "adapter")
    fresh = twin_of(tiny_model(config, dtype=torch.float32))
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, after)
        merged = again.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, after, rtol=1e-4, atol=1e-5)


def test_a_model_can_be_trained_from_scratch() -> None:
    twin: Any = twin_of(tiny_model(tiny_config("dual", aux=AuxConfig(num_flows=2))))
    torch.manual_seed(0)
    fresh = DualFlowForCausalLM(twin.config).train()
    ids = random_tokens(DUAL, 4, 16)
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = fresh(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5
