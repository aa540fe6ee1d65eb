"""Mixtures of experts in Hugging Face folders: what config.json means, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from dualflow.checkpoint.export import export_huggingface
from dualflow.checkpoint.families import FAMILIES, express, find_family
from dualflow.checkpoint.huggingface import import_huggingface
from dualflow.spec import ModelConfig, MoEConfig, standard_twin
from dualflow.testing.configs import MIXTURES, mixture_config
from dualflow.testing.tensors import same, tiny_model
from tests.unit.checkpoint.huggingface_folders import change_config, change_tensors, read_tensors

QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 8192,
    "max_window_layers": 21, "model_type": "qwen2_moe", "moe_intermediate_size": 1408,
    "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.39.0.dev0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
    "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
    "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
OLMOE = {
    "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "clip_qkv": None, "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 1024, "max_position_embeddings": 4096,
    "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
    "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
    "use_cache": True, "vocab_size": 50304,
}  # fmt: skip

PUBLISHED: dict[str, tuple[dict[str, Any], ModelConfig]] = {
    "qwen2_moe": (QWEN2_MOE, ModelConfig(
        vocab_size=151936, hidden_size=2048, num_layers=24, num_heads=16, num_kv_heads=16,
        intermediate_size=5632, max_position=8192, rope_theta=1e6, attention_bias=True,
        moe=MoEConfig(
            num_experts=60, experts_per_token=4, expert_size=1408, shared_size=5632,
            shared_gate=True, normalise=False,
        ),
    )),
    "qwen3_moe": (QWEN3_MOE, ModelConfig(
        vocab_size=151936, hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4,
        head_dim=128, intermediate_size=6144, max_position=40960, rope_theta=1e6, qk_norm=True,
        moe=MoEConfig(num_experts=128, experts_per_token=8, expert_size=768),
    )),
    "mixtral": (MIXTRAL, ModelConfig(
        vocab_size=32000, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8,
        intermediate_size=14336, max_position=32768, norm_eps=1e-5, rope_theta=1e6,
        moe=MoEConfig(num_experts=8, experts_per_token=2, expert_size=14336),
    )),
    "olmoe": (OLMOE, ModelConfig(
        vocab_size=50304, hidden_size=2048, num_layers=16, num_heads=16, num_kv_heads=16,
        intermediate_size=1024, max_position=4096, norm_eps=1e-5, qk_norm=True,
        qk_norm_span="row",
        moe=MoEConfig(num_experts=64, experts_per_token=8, expert_size=1024, normalise=False),
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_understood_and_written_again(name: str) -> None:
    table, expected = PUBLISHED[name]
    assert find_family(table).read(table) == expected
    family, written = express(expected)
    assert family is FAMILIES[name]
    assert family.read(written) == expected


def test_windows_without_a_list_of_layers_are_in_every_second_of_the_first() -> None:
    changes = {"use_sliding_window": True, "max_window_layers": 5}
    table = {key: value for key, value in QWEN2_MOE.items() if key != "sliding_window"}
    config = FAMILIES["qwen2_moe"].read(table | changes)
    assert (config.sliding_window, config.sliding_layers) == (4096, (0, 2, 4))


def test_dense_layers_come_from_both_keys() -> None:
    def dense(**changes: Any) -> tuple[int, ...]:
        moe = FAMILIES["qwen3_moe"].read({**QWEN3_MOE, "num_hidden_layers": 6, **changes}).moe
        assert moe is not None
        return moe.dense_layers

    assert dense(mlp_only_layers=None) == ()
    assert dense(mlp_only_layers=[4, 1, 1, 77, -1]) == (1, 4)
    assert dense(decoder_sparse_step=2) == (0, 2, 4)
    assert dense(decoder_sparse_step=3, mlp_only_layers=[2]) == (0, 1, 2, 3, 4)


def test_both_names_of_the_number_of_experts_mean_the_same() -> None:
    table = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}
    expected = PUBLISHED["qwen3_moe"][1]
    assert FAMILIES["qwen3_moe"].read({**table, "num_local_experts": 128}) == expected
    assert FAMILIES["qwen3_moe"].read({**QWEN3_MOE, "num_local_experts": 128}) == expected


@pytest.mark.parametrize(
    ("base", "changes", "found"),
    [
        (QWEN3_MOE, {"num_local_experts": 64},
         "num_experts = 128 and num_local_experts = 64 are both given"),
        (QWEN3_MOE, {"num_experts": 0}, "num_experts = 0; expected a whole number from 1 up"),
        (QWEN3_MOE, {"num_experts": "128"}, "num_experts = '128'"),
        (QWEN3_MOE, {"num_experts_per_tok": 0}, "num_experts_per_tok = 0"),
        (QWEN3_MOE, {"num_experts_per_tok": 129}, "num_experts_per_tok = 129, but there are 128"),
        (QWEN3_MOE, {"moe_intermediate_size": None}, "moe_intermediate_size = None"),
        (QWEN3_MOE, {"norm_topk_prob": 1}, "norm_topk_prob = 1; expected true or false"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        (QWEN3_MOE, {"mlp_only_layers": 3}, "mlp_only_layers = 3; expected a list of layers"),
        (QWEN3_MOE, {"mlp_only_layers": ["0"]}, "mlp_only_layers = ['0']"),
        (QWEN3_MOE, {"use_sliding_window": True, "sliding_window": 9},
         "max_window_layers = 48 is not supported where use_sliding_window is true"),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 8},
         "shared_expert_intermediate_size = 8 is not known"),
        (QWEN3_MOE, {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not known"),
        (QWEN2_MOE, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0"),
        (QWEN2_MOE, {"num_local_experts": 60}, "num_local_experts = 60 is not known"),
        (QWEN2_MOE, {"layer_types": ["sliding_attention"] * 24}, "layer 0 has a sliding window"),
        (MIXTRAL, {"norm_topk_prob": False}, "norm_topk_prob = False is not known"),
        (MIXTRAL, {"mlp_only_layers": [0]}, "mlp_only_layers = [0] is not known"),
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        (OLMOE, {"sliding_window": 4096}, "sliding_window = 4096 is not known"),
        (OLMOE, {"head_dim": 64}, "head_dim = 64 is not known"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named_with_its_value(base, changes, found) -> None:
    table = base | changes
    with pytest.raises(ValueError) as caught:
        find_family(table).read(table)
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)


def test_latent_attention_is_refused_by_name() -> None:
    table = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    with pytest.raises(ValueError, match=r"model_type 'deepseek_v3' and .*latent attention \(MLA"):
        find_family(table)


@pytest.mark.parametrize(
    ("mixture", "changes", "found"),
    [
        ("mixtral", {"scores": "sigmoid"}, "mixtral: moe.scores is 'sigmoid', in mixtral 'softma"),
        ("mixtral", {"scaling": 2.5}, "moe.scaling is 2.5, in mixtral 1.0"),
        ("mixtral", {"selection_bias": True}, "moe.selection_bias is True, in mixtral False"),
        ("mixtral", {"num_groups": 2}, "moe.num_groups is 2, in mixtral 1"),
        ("mixtral", {"normalise": False}, "moe.normalise is False, in mixtral True"),
        ("mixtral", {"dense_layers": (0,)}, "qk_norm is False, in qwen3_moe True"),
        ("qwen2_moe", {"shared_gate": False}, "moe.shared_gate is False, in qwen2_moe True"),
        ("qwen3_moe", {"shared_size": 8}, "moe.shared_size is 8, in qwen3_moe 0"),
    ],
)
def test_switches_that_no_family_of_mixtures_has_are_named(
    mixture: str, changes: dict[str, Any], found: str
) -> None:
    moe = dataclasses.replace(MIXTURES[mixture]["moe"], **changes)
    with pytest.raises(ValueError) as caught:
        express(mixture_config(mixture, moe=moe))
    assert found in str(caught.value)


def test_what_only_training_goes_by_does_not_matter() -> None:
    config = mixture_config("mixtral")
    assert config.moe is not None
    moe = dataclasses.replace(
        config.moe, balance_weight=0.1, z_weight=0.1, bias_rate=0.5, num_groups=2,
        groups_per_token=2,
    )  # fmt: skip
    assert express(dataclasses.replace(config, moe=moe))[0] is FAMILIES["mixtral"]


def written(folder: Path, mixture: str) -> ModelConfig:
    model = tiny_model(mixture_config(mixture, "dual"), dtype=torch.float32)
    export_huggingface(model, folder)
    return model.config


@pytest.mark.parametrize("mixture", PUBLISHED)
def test_a_dual_model_leaves_its_auxiliary_behind(tmp_path: Path, mixture: str) -> None:
    model = tiny_model(mixture_config(mixture, "dual"), dtype=torch.float32)
    export_huggingface(model, tmp_path)
    imported = import_huggingface(tmp_path).model
    assert dataclasses.replace(imported.config, intermediate_size=1) == dataclasses.replace(
        standard_twin(model.config), intermediate_size=1
    )
    state = model.state_dict()
    assert all(same(state[name], tensor) for name, tensor in imported.state_dict().items())


def test_every_expert_must_be_there_once(tmp_path: Path) -> None:
    written(tmp_path, "qwen2_moe")
    first, last = (f"model.layers.1.mlp.experts.{at}.up_proj.weight" for at in (0, 6))
    change_tensors(tmp_path, lambda tensors: tensors.update({last: tensors.pop(first)}))
    with pytest.raises(ValueError, match=f"missing {first}; unexpected {last}"):
        import_huggingface(tmp_path)


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    written(tmp_path, "mixtral")
    name = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    change_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name].t().contiguous()}))
    with pytest.raises(ValueError, match=rf"{name} \[12, 32\], expected \[32, 12\]"):
        import_huggingface(tmp_path)


def test_experts_in_two_formats_need_one_to_be_named(tmp_path: Path) -> None:
    written(tmp_path, "olmoe")
    name = "model.layers.1.mlp.experts.5.gate_proj.weight"
    change_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    with pytest.raises(ValueError, match=rf"{name} BF16; experts are kept in one format"):
        import_huggingface(tmp_path)
    stored = read_tensors(tmp_path)[name].float()
    experts = import_huggingface(tmp_path, torch.float32).model.state_dict()
    assert same(experts["model.layers.1.moe.experts.gate_proj"][5], stored)


def test_a_config_that_lies_about_its_experts_costs_nothing(tmp_path: Path) -> None:
    written(tmp_path, "mixtral")
    change_config(tmp_path, num_local_experts=10**6)
    with pytest.raises(ValueError, match="2,000,000 experts in all layers, the files 41 tensors"):
        import_huggingface(tmp_path)
