"""What config.json means in each family: files as they are published, and what is refused."""

from typing import Any

import pytest

from dualflow.checkpoint.families import FAMILIES, canonical, express, find_family
from dualflow.spec import PRESETS, ModelConfig, RopeScaling
from dualflow.testing import tiny_config

GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
    "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
    "summary_use_proj": True, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
LLAMA31 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
    "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
    "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": True,
    "transformers_version": "4.42.3", "vocab_size": 49152,
}  # fmt: skip
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "use_cache": True, "use_mrope": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
GEMMA = {
    "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 2, "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu",
    "hidden_activation": None, "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma",
    "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000,
}  # fmt: skip
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
    "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
    "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
    "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": None,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
}  # fmt: skip
OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "olmo2",
    "num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 16,
    "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000,
    "tie_word_embeddings": False, "vocab_size": 100352,
}  # fmt: skip

PUBLISHED: dict[str, tuple[dict[str, Any], ModelConfig]] = {
    "gpt2": (GPT2, ModelConfig(
        vocab_size=50257, hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072,
        max_position=1024, norm="layernorm", norm_eps=1e-5, position="learned", mlp="gelu",
        attention_bias=True, attention_output_bias=True, mlp_bias=True, tie_embeddings=True,
    )),
    "llama 3.1": (LLAMA31, ModelConfig(
        vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8,
        intermediate_size=14336, max_position=131072, norm_eps=1e-5, rope_theta=500000.0,
        rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_position=8192),
    )),
    "smollm2": (SMOLLM2, ModelConfig(
        vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3,
        intermediate_size=1536, max_position=8192, norm_eps=1e-5, rope_theta=100000.0,
        tie_embeddings=True, init_std=0.041666666666666664,
    )),
    "mistral": (MISTRAL, ModelConfig(
        vocab_size=32000, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8,
        intermediate_size=14336, max_position=32768, norm_eps=1e-5, sliding_window=4096,
    )),
    "qwen 2.5": (QWEN25, ModelConfig(
        vocab_size=151936, hidden_size=896, num_layers=24, num_heads=14, num_kv_heads=2,
        intermediate_size=4864, max_position=32768, rope_theta=1e6, attention_bias=True,
        tie_embeddings=True,
    )),
    "qwen 3": (QWEN3, ModelConfig(
        vocab_size=151936, hidden_size=1024, num_layers=28, num_heads=16, num_kv_heads=8,
        head_dim=128, intermediate_size=3072, max_position=40960, rope_theta=1e6, qk_norm=True,
        tie_embeddings=True,
    )),
    "gemma": (GEMMA, ModelConfig(
        vocab_size=256000, hidden_size=2048, num_layers=18, num_heads=8, num_kv_heads=1,
        intermediate_size=16384, max_position=8192, norm_offset=True, mlp="geglu",
        tie_embeddings=True, scale_embeddings=True,
    )),
    "gemma 2": (GEMMA2, ModelConfig(
        vocab_size=256000, hidden_size=2304, num_layers=26, num_heads=8, num_kv_heads=4,
        head_dim=256, intermediate_size=9216, max_position=8192, norm_offset=True,
        norm_placement="both", attention_softcap=50.0, final_softcap=30.0, sliding_window=4096,
        sliding_layers=tuple(range(0, 26, 2)), mlp="geglu", tie_embeddings=True,
        scale_embeddings=True,
    )),
    "gemma 3": (GEMMA3, ModelConfig(
        vocab_size=262144, hidden_size=1152, num_layers=26, num_heads=4, num_kv_heads=1,
        head_dim=256, intermediate_size=6912, max_position=32768, norm_offset=True,
        norm_placement="both", rope_theta=1e6, local_rope_theta=1e4, qk_norm=True,
        sliding_window=512, sliding_layers=tuple(i for i in range(26) if (i + 1) % 6),
        mlp="geglu", tie_embeddings=True, scale_embeddings=True,
    )),
    "olmo 2": (OLMO2, ModelConfig(
        vocab_size=100352, hidden_size=2048, num_layers=16, num_heads=16, num_kv_heads=16,
        intermediate_size=8192, max_position=4096, norm_placement="post", rope_theta=500000.0,
        qk_norm=True, qk_norm_span="row",
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_understood(name: str) -> None:
    table, expected = PUBLISHED[name]
    assert find_family(table).read(table) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_means_the_same_as_what_was_read(name: str) -> None:
    table, config = PUBLISHED[name]
    family, written = express(config)
    assert family is find_family(table)
    assert family.read(written) == config


@pytest.mark.parametrize(
    ("base", "changes", "found"),
    [
        (LLAMA31, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
         "rope_scaling.rope_type = 'dynamic' is not supported"),
        (LLAMA31, {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "'longrope'"),
        (LLAMA31, {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1.0}},
         "rope_scaling.alpha = 1.0 is not supported"),
        (LLAMA31, {"rope_scaling": {"type": "llama3", "factor": 2.0}},
         "lacks high_freq_factor, low_freq_factor"),
        (LLAMA31, {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5"),
        (LLAMA31, {"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor"),
        (LLAMA31, {"rope_scaling": {"rope_type": ["yarn"]}}, "rope_scaling.rope_type = ['yarn']"),
        (LLAMA31, {"rope_parameters": {"rope_theta": 1.0}}, "both given"),
        (LLAMA31, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        (LLAMA31, {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        (LLAMA31, {"hidden_size": "4096"}, "hidden_size: expected an integer"),
        (LLAMA31, {"num_hidden_layers": 0}, "num_layers is 0"),
        (LLAMA31, {"quantization_config": {"quant_method": "awq"}}, "quantization_config = "),
        (LLAMA31, {"auto_map": {"AutoModelForCausalLM": "own.Code"}}, "auto_map = "),
        (LLAMA31, {"residual_multiplier": 0.2}, "residual_multiplier = 0.2 is not known"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True},
         "scale_attn_by_inverse_layer_idx = True is not supported (expected False)"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights = False"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention = True"),
        (GPT2, {"activation_function": "gelu"}, "activation_function = 'gelu'"),
        (GPT2, {"n_embd": None}, "n_embd: expected an integer, found None"),
        (QWEN25, {"use_sliding_window": "false"},
         "use_sliding_window = 'false'; expected true or false"),
        (QWEN25, {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        (QWEN25, {"layer_types": ["chunked_attention"] * 24}, "'chunked_attention'"),
        (QWEN25, {"layer_types": ["sliding_attention"] * 24}, "layer 0 has a sliding window"),
        (MISTRAL, {"layer_types": ["sliding_attention"] * 32}, "layer_types = "),
        (GEMMA2, {"sliding_window": None}, "layer 0 has a sliding window"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        (GEMMA3, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_type"),
        (GEMMA3, {"rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2.0}}},
         "sliding_attention is scaled (linear)"),
        (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named_with_its_value(base, changes, found) -> None:
    table = base | changes
    with pytest.raises(ValueError) as caught:
        find_family(table).read(table)
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ({"architectures": ["FooForCausalLM"], "model_type": "foo"},
         "model_type 'foo' and architecture 'FooForCausalLM', which is not supported"),
        ({"architectures": ["FooForCausalLM"]}, "architecture 'FooForCausalLM'"),
        ({}, "neither model_type nor architectures"),
        ({"architectures": ["LlamaForCausalLM", "FooModel"]}, "['LlamaForCausalLM', 'FooModel']"),
        ({"architectures": "LlamaForCausalLM"}, "expected one"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "model_type 'bert'"),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
         "'gemma3'"),
        ({"model_type": ["llama"]}, "model_type ['llama']"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
         "of model_type 'llama' LlamaForCausalLM is supported"),
    ],
)  # fmt: skip
def test_unknown_architectures_are_named_with_what_is_supported(table, found) -> None:
    with pytest.raises(ValueError) as caught:
        find_family(table)
    assert found in str(caught.value)
    assert "supported" in str(caught.value)


def test_the_class_alone_tells_the_family() -> None:
    assert find_family({"architectures": ["Qwen3ForCausalLM"]}) is FAMILIES["qwen3"]
    assert find_family({"model_type": "gpt2"}) is FAMILIES["gpt2"]
    assert find_family({"architectures": ["GPT2Model"], "model_type": "gpt2"}) is FAMILIES["gpt2"]


def test_both_spellings_of_a_rotation_mean_the_same() -> None:
    old = {k: v for k, v in LLAMA31.items() if k not in ("rope_theta", "rope_scaling")}
    new = old | {"rope_parameters": {**LLAMA31["rope_scaling"], "rope_theta": 500000.0}}
    assert FAMILIES["llama"].read(new) == PUBLISHED["llama 3.1"][1]
    bare = {k: v for k, v in GEMMA3.items() if not k.startswith("rope_")}
    nested = bare | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        }
    }
    flat = bare | {
        "rope_theta": 5e5, "rope_local_base_freq": 5e3,
        "rope_scaling": {"type": "linear", "factor": 8.0},
    }  # fmt: skip
    assert FAMILIES["gemma3_text"].read(nested) == FAMILIES["gemma3_text"].read(flat)
    assert FAMILIES["gemma3_text"].read(bare) == PUBLISHED["gemma 3"][1]


def test_missing_keys_have_the_values_of_the_familys_class() -> None:
    transformers = pytest.importorskip("transformers")
    for model_type, family in FAMILIES.items():
        theirs = transformers.AutoConfig.for_model(model_type).to_dict()
        for key, value in family.defaults.items():
            if key == "sliding_window" and not theirs.get("use_sliding_window", True):
                continue  # taken away by some classes before anybody can look
            # Others are filled in so.
            if value is not None and key in theirs and theirs[key] is not None:
                assert theirs[key] == value, (model_type, key)
        whole = family.read({**theirs, "architectures": []})
        assert canonical(whole) == canonical(family.read({"model_type": model_type}))


@pytest.mark.parametrize("name", ["demo", "llama-120m", "smollm2-135m"])
def test_presets_that_a_family_has_are_written_as_it(name: str) -> None:
    family, table = express(PRESETS[name])
    assert family.model_type == "llama"
    assert family.read(table).hidden_size == PRESETS[name].hidden_size


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (PRESETS["nanogpt-124m"], "qwen3: mlp is 'relu2', in qwen3 'swiglu'"),
        (tiny_config(attention_output_bias=True), "attention_bias is False, in llama True"),
        (tiny_config(attention_softcap=5.0), "attention_softcap is 5.0, in llama None"),
        (tiny_config(attention_bias=True, qk_norm=True), "qk_norm is True, in qwen2 False"),
    ],
)  # fmt: skip
def test_switches_that_no_family_has_are_named(config: ModelConfig, found: str) -> None:
    with pytest.raises(ValueError) as caught:
        express(config)
    assert found in str(caught.value)


def test_auxiliary_flows_do_not_matter_to_what_the_primary_is() -> None:
    assert express(tiny_config("dual"))[1] == express(tiny_config())[1]


def test_heads_that_do_not_divide_the_model_are_written_as_a_family_that_allows_them() -> None:
    config = tiny_config(hidden_size=36, head_dim=4, num_heads=8)
    assert express(config)[0].model_type == "mistral"
