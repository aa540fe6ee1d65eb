import dataclasses

import pytest
import torch
from torch import nn

from dualflow.model import build_model, quantise_model
from dualflow.testing.configs import FAMILIES, FLOWS, family_config, flow_config, tiny_config
from dualflow.train.config import OptimizerConfig
from dualflow.train.optimizers import Optimizers, ParameterGroup, assign_groups, check_cover

MUON = OptimizerConfig()
ADAMW = OptimizerConfig(kind="adamw")

CONFIGS = {
    **{f"family {name}": family_config(name, "dual") for name in FAMILIES},
    **{f"flow {name}": flow_config(name) for name in FLOWS},
    "standard": tiny_config("standard"),
    "phd2": tiny_config("phd2"),
    "two_softmax": tiny_config("two_softmax"),
}


def groups_of(model: nn.Module, config: OptimizerConfig = MUON) -> dict[str, ParameterGroup]:
    return {group.name: group for group in assign_groups(model, config)}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("optimizer", [MUON, ADAMW], ids=["muon", "adamw"])
def test_every_parameter_is_in_exactly_one_group_by_the_rule(config, optimizer) -> None:
    model = build_model(config, device="meta")
    parameters = dict(model.named_parameters())
    groups = assign_groups(model, optimizer)
    names = [name for group in groups for name in group.parameters]
    assert sorted(names) == sorted(parameters)
    for group in groups:
        for name in group.parameters:
            parameter = parameters[name]
            embedding = "embed_" in name
            if parameter.ndim < 2 or embedding:
                assert group.weight_decay == 0.0
                assert group.optimizer == "adamw"
            else:
                assert group.weight_decay == optimizer.weight_decay
            hidden = ".layers." in name and name.endswith("_proj.weight")
            assert (group.optimizer == "muon") == (hidden and optimizer.kind == "muon")


def test_embeddings_vectors_and_adapters_can_have_rates_of_their_own() -> None:
    model = build_model(flow_config("lora"), device="meta")
    model.freeze_primary()
    rates = OptimizerConfig(kind="adamw", lr=0.1, embedding_lr=0.2, vector_lr=0.3)
    groups = groups_of(model, rates)
    assert {name: group.lr for name, group in groups.items()} == {
        "embeddings": 0.2,
        "vectors": 0.3,
        "matrices": 0.1,
    }
    assert all(".aux." in name for group in groups.values() for name in group.parameters)
    assert groups_of(model, OptimizerConfig(lr=0.1))["vectors"].lr == 0.1


def test_shared_and_owned_matrices_go_to_muon_adapters_and_heads_to_adamw() -> None:
    owned = groups_of(build_model(flow_config("owns_everything"), device="meta"))
    assert "model.layers.0.self_attn.q_proj.weight" in owned["hidden"].parameters
    assert "model.layers.1.aux.0.q_proj.weight" in owned["hidden"].parameters
    assert "lm_head.weight" in owned["matrices"].parameters
    assert "model.aux.0.lm_head.weight" in owned["matrices"].parameters
    lora = groups_of(build_model(flow_config("lora"), device="meta"))
    adapters = [name for name in lora["matrices"].parameters if "lora_" in name]
    assert adapters
    assert not any("lora_" in name for name in lora["hidden"].parameters)


def test_a_tied_head_is_in_the_groups_once_as_an_embedding() -> None:
    groups = groups_of(build_model(tiny_config(tie_embeddings=True), device="meta"))
    assert groups["embeddings"].parameters == ("model.embed_tokens.weight",)
    assert "matrices" not in groups


def test_frozen_parameters_are_in_no_group_and_do_not_move() -> None:
    model = build_model(tiny_config("dual"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".aux." in name)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizers = Optimizers(model, MUON)
    assert all(".aux." in name for group in optimizers.groups for name in group.parameters)
    tokens = torch.arange(32).view(2, 16)
    model.loss(tokens, tokens, None).total.backward()
    optimizers.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all(".aux." in name for name in moved)


def test_a_wholly_frozen_model_is_refused() -> None:
    model = build_model(tiny_config())
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        Optimizers(model, MUON)


def test_a_parameter_in_two_groups_or_none_is_an_error_that_names_it() -> None:
    group = ParameterGroup("a", "adamw", 1e-3, 0.0, ("x", "y"))
    trainable = {"x": 0, "y": 0, "z": 0}
    with pytest.raises(ValueError, match="in no optimizer group.*: z"):
        check_cover([group], trainable)
    with pytest.raises(ValueError, match="more than one optimizer group: x"):
        check_cover([group, dataclasses.replace(group, parameters=("x", "z"))], trainable)
    with pytest.raises(ValueError, match="holds w, which is frozen"):
        check_cover([dataclasses.replace(group, parameters=("w",))], trainable)


def test_muon_takes_the_steps_of_torchs_on_the_same_matrices() -> None:
    config = OptimizerConfig(muon_lr=0.1, weight_decay=0.2, muon_lr_adjust="match_rms_adamw")
    model, twin = build_model(tiny_config()), build_model(tiny_config())
    optimizers = Optimizers(model, config)
    hidden = [dict(twin.named_parameters())[n] for n in optimizers.groups[0].parameters]
    oracle = torch.optim.Muon(
        hidden, lr=0.05, weight_decay=0.2, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    tokens = torch.arange(32).view(2, 16)
    for each in (model, twin):
        each.loss(tokens, tokens, None).total.backward()
    optimizers.set_factor(0.5)
    optimizers.step()
    oracle.step()
    for name, expected in zip(optimizers.groups[0].parameters, hidden, strict=True):
        assert torch.equal(optimizers.parameters[name], expected)


def test_the_factor_scales_every_groups_own_peak() -> None:
    model = build_model(tiny_config())
    optimizers = Optimizers(model, OptimizerConfig(lr=1e-2, muon_lr=0.5, embedding_lr=0.1))
    peaks = {group.name: group.lr for group in optimizers.groups}
    assert peaks == {"hidden": 0.5, "embeddings": 0.1, "vectors": 1e-2, "matrices": 1e-2}
    optimizers.set_factor(0.5)
    assert optimizers.learning_rate == pytest.approx(5e-3)
    rates = [g["lr"] for o in optimizers._optimizers.values() for g in o.param_groups]
    assert sorted(rates) == pytest.approx([5e-3, 5e-3, 0.05, 0.25])


def steps(model: nn.Module, optimizers: Optimizers, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    for _ in range(count):
        tokens = torch.randint(0, 53, (2, 16), generator=generator)
        optimizers.zero_grad()
        model.loss(tokens, tokens, None).total.backward()  # type: ignore[operator]
        optimizers.step()


@pytest.mark.parametrize("config", [MUON, ADAMW], ids=["muon", "adamw"])
def test_state_tensors_continue_bit_for_bit(config: OptimizerConfig) -> None:
    model = build_model(tiny_config("dual"))
    optimizers = Optimizers(model, config)
    steps(model, optimizers, 3)
    twin = build_model(tiny_config("dual"), seed=9)
    twin.load_state_dict(model.state_dict())
    other = Optimizers(twin, config)
    saved = {name: tensor.clone() for name, tensor in optimizers.state_tensors().items()}
    other.load_state_tensors(saved)
    assert all(tensor.dtype == torch.float32 for tensor in other.state_tensors().values())
    steps(model, optimizers, 2)
    steps(twin, other, 2)
    for (name, a), (_, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    again = other.state_tensors()
    assert all(torch.equal(t, again[name]) for name, t in optimizers.state_tensors().items())


def test_state_of_another_model_or_optimizer_is_refused() -> None:
    model = build_model(tiny_config())
    optimizers = Optimizers(model, MUON)
    steps(model, optimizers, 1)
    state = optimizers.state_tensors()
    with pytest.raises(ValueError, match="does not train that way: muon/"):
        Optimizers(build_model(tiny_config()), ADAMW).load_state_tensors(state)
    wider = build_model(tiny_config(hidden_size=48, head_dim=4))
    with pytest.raises(ValueError, match="has shape"):
        Optimizers(wider, MUON).load_state_tensors(state)


def test_a_quantised_model_is_not_trained() -> None:
    model = quantise_model(build_model(tiny_config("dual")), "int4")
    with pytest.raises(ValueError, match="int4 weights cannot be trained; train the float model"):
        Optimizers(model, MUON)
    with pytest.raises(ValueError, match="int4 weights cannot be trained"):
        assign_groups(torch.nn.ModuleList([model]), ADAMW)


def test_the_table_lists_every_parameter_and_its_groups_settings() -> None:
    table = Optimizers(build_model(tiny_config("dual")), MUON).table()
    assert "hidden: muon, peak lr 0.02, weight decay 0.1" in table
    assert "model.layers.{0,1}.self_attn.q_proj.weight [32, 32]" in table
    assert "model.layers.{0,1}.aux.0.query_coupling [32]" in table
    assert "model.aux.0.embed_tokens.weight [53, 32]" in table
