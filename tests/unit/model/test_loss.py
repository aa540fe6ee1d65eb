"""The training loss of whole batches, and how the variants are initialised."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from dualflow.model import CausalLM, build_model
from dualflow.model.flows import is_aux
from dualflow.ops import mixture
from dualflow.spec import AuxConfig, ModelConfig, ReadoutConfig, parameter_counts
from dualflow.testing import tiny_config
from dualflow.testing.steps import EVERY_KIND, whole_sequence
from dualflow.testing.tensors import random_tokens, tiny_model


def batch(config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens, targets = (
        torch.randint(0, config.num_real_tokens, (3, 12), generator=generator) for _ in range(2)
    )
    targets[0, :5] = -100
    return tokens, targets


def gradients(model: CausalLM) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", EVERY_KIND)
def test_loss_is_the_readout_summed_over_counted_targets(name: str) -> None:
    model = tiny_model(EVERY_KIND[name])
    tokens, targets = batch(model.config)
    sums = model.loss(tokens, targets)
    expected = {"r": 0.0, "p": 0.0, "q": 0.0}
    for row, wanted in zip(tokens, targets, strict=True):
        out = whole_sequence(model, row)
        assert out.aux_FAD is not None
        read = model.read(out.primary_TD, out.aux_FAD)
        for part, (position, target) in itertools.product(expected, enumerate(wanted.tolist())):
            log_probs = getattr(read, part)
            if target >= 0 and log_probs is not None:
                expected[part] -= log_probs[position, target].item()
    assert sums.count == 31
    assert sums.r.item() == pytest.approx(expected["r"], abs=1e-9)
    for part in ("p", "q"):
        value = getattr(sums, part)
        if value is not None:
            assert value.item() == pytest.approx(expected[part], abs=1e-9)


def test_primary_loss_weight_adds_the_primarys_own_loss() -> None:
    config = tiny_config("dual", readout=ReadoutConfig(primary_loss_weight=0.3))
    sums = tiny_model(config).loss(*batch(config))
    assert sums.p is not None
    assert sums.total.item() == pytest.approx(sums.r.item() + 0.3 * sums.p.item())


@pytest.mark.parametrize("name", EVERY_KIND)
def test_row_chunks_change_neither_value_nor_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(EVERY_KIND[name])
    tokens, targets = batch(model.config)
    whole = model.loss(tokens, targets)
    whole.total.backward()
    expected = gradients(model)
    model.zero_grad()
    monkeypatch.setattr(mixture, "LOGITS_PER_CHUNK", 5 * model.config.vocab_size)
    chunked = model.loss(tokens, targets)
    chunked.total.backward()
    assert chunked.r.item() == pytest.approx(whole.r.item(), abs=1e-9)
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-9)


def test_chunked_loss_saves_no_full_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("dual")
    model = build_model(config)
    tokens, targets = batch(config)
    monkeypatch.setattr(mixture, "LOGITS_PER_CHUNK", 4 * config.vocab_size)
    saved: list[torch.Size] = []

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        model.loss(tokens, targets)
    parameters = {p.shape for p in model.parameters()}
    logits = [s for s in saved if s and s[-1] == config.vocab_size and s not in parameters]
    assert saved and not logits


@pytest.mark.parametrize("name", ["dual", "dual, two flows", "phd2"])
def test_activation_checkpointing_changes_nothing(name: str) -> None:
    model = tiny_model(EVERY_KIND[name]).train()
    tokens, targets = batch(model.config)
    model.loss(tokens, targets).total.backward()
    expected = gradients(model)
    model.zero_grad()
    model.set_activation_checkpointing(True)
    model.loss(tokens, targets).total.backward()
    for key, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[key])


@pytest.mark.parametrize("name", [name for name, c in EVERY_KIND.items() if c.position == "rotary"])
def test_document_mask_gives_each_document_its_own_attention(name: str) -> None:
    """Two documents in one row equal two rows (rotary positions are relative, so the offset does
    not matter).
    """
    config = EVERY_KIND[name]
    model = tiny_model(config)
    tokens = random_tokens(config, 12)
    targets = random_tokens(config, 12, seed=1)
    ids = torch.tensor([[0] * 5 + [1] * 7])
    together = model.loss(tokens[None], targets[None], ids).r
    apart = (
        model.loss(tokens[None, :5], targets[None, :5]).r
        + model.loss(tokens[None, 5:], targets[None, 5:]).r
    )
    assert together.item() == pytest.approx(apart.item(), abs=1e-9)


@pytest.mark.parametrize("name", EVERY_KIND)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model = tiny_model(EVERY_KIND[name])
    model.loss(*batch(model.config)).total.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not missing


@pytest.mark.parametrize("name", EVERY_KIND)
def test_parameter_counts_follow_the_formula(name: str) -> None:
    model = build_model(EVERY_KIND[name])
    owners = {"primary": 0, "aux": 0}
    for key, parameter in model.named_parameters():
        owners["aux" if is_aux(key) else "primary"] += parameter.numel()
    assert dataclasses.asdict(parameter_counts(EVERY_KIND[name])) == owners


def test_variants_start_from_the_same_shared_values() -> None:
    reference = dict(build_model(tiny_config("standard"), seed=5).named_parameters())
    for variant in ("dual", "phd2", "two_softmax"):
        parameters = dict(build_model(tiny_config(variant), seed=5).named_parameters())
        for key, value in reference.items():
            assert torch.equal(parameters[key], value), f"{variant}: {key}"
    assert not torch.equal(
        reference["lm_head.weight"],
        dict(build_model(tiny_config("standard"), seed=6).named_parameters())["lm_head.weight"],
    )


def test_flows_start_apart_from_each_other_and_from_the_primary() -> None:
    model: Any = build_model(tiny_config("dual", aux=AuxConfig(num_flows=2)))
    first, second = (flow.embed_tokens.weight for flow in model.model.aux)
    assert not torch.equal(first, second)
    assert not torch.equal(first, model.model.embed_tokens.weight)
    assert not model.model.layers[0].aux[0].query_coupling.any()


@pytest.mark.parametrize("name", [name for name in EVERY_KIND if name.startswith("dual")])
def test_a_frozen_primary_gives_the_auxiliary_the_same_loss_and_gradients(name: str) -> None:
    config = EVERY_KIND[name]
    whole, frozen = tiny_model(config), tiny_model(config)
    frozen.freeze_primary()
    assert frozen.primary_frozen and not whole.primary_frozen
    tokens, targets = batch(config)
    losses = [model.loss(tokens, targets) for model in (whole, frozen)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0.0, atol=1e-9)
    if config.readout.kind == "primary_only":
        assert not losses[1].total.requires_grad
        return
    for loss in losses:
        loss.total.backward()
    expected = {key: grad for key, grad in gradients(whole).items() if is_aux(key)}
    torch.testing.assert_close(gradients(frozen), expected, rtol=0.0, atol=1e-9)


def test_a_frozen_primary_keeps_no_activations_but_what_the_auxiliary_reads() -> None:
    """Nothing that a backward pass would need is saved while the primary's rows run."""
    model = tiny_model(tiny_config("dual"))
    model.freeze_primary()
    tokens, targets = batch(model.config)
    saved: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        with torch.no_grad():
            model.loss(tokens, targets)
        assert not saved
        model.loss(tokens, targets)
    # Both flows' rows in one matrix would be saved as twice the tokens.
    assert saved and not any(shape[:1] == (2 * tokens.numel(),) for shape in saved)


def test_a_model_without_auxiliary_flows_cannot_freeze_the_rest() -> None:
    with pytest.raises(ValueError, match="no auxiliary flow .* `dualflow retrofit`"):
        tiny_model(tiny_config()).freeze_primary()
