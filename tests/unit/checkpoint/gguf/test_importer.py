"""GGUF files into models: what is read, and what is refused by name."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualflow.spec import ModelConfig, RopeScaling
from dualflow.testing.tensors import tiny_model

gguf: Any = pytest.importorskip("gguf")

from dualflow.checkpoint.gguf.importer import import_gguf  # noqa: E402
from dualflow.checkpoint.gguf.rope import llama3_divisors  # noqa: E402
from dualflow.checkpoint.gguf.tensors import permute, unpermute  # noqa: E402
from dualflow.testing.gguf import (  # noqa: E402
    VOCAB_SIZE,
    gguf_metadata,
    gguf_tensors,
    write_gguf,
    write_tiny_gguf,
)

CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
    intermediate_size=64, max_position=64, tie_embeddings=True, norm_eps=1e-5,
)  # fmt: skip
STATE = tiny_model(CONFIG, dtype=torch.float32).state_dict()


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(ValueError) as caught:
        import_gguf(path)
    assert all(part in str(caught.value) for part in (str(path), *parts)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_float32_files_are_read_bit_for_bit_with_shortest_numbers(tmp_path):
    read = import_gguf(write_tiny_gguf(tmp_path / "a.gguf", CONFIG, STATE))
    assert read.model.config == CONFIG  # norm_eps is 1e-5, not its nearest 32-bit number
    assert not read.model.training
    for name, tensor in read.model.state_dict().items():
        assert torch.equal(tensor, STATE[name]), name


@pytest.mark.parametrize(
    ("matrix_format", "error", "dtype"),
    [("F16", 1e-3, torch.float32), ("BF16", 8e-3, torch.bfloat16), ("Q8_0", 8e-3, torch.float32),
     ("Q4_0", 0.15, torch.float32), ("Q4_1", 0.15, torch.float32),
     ("Q5_0", 0.08, torch.float32), ("Q5_1", 0.08, torch.float32)],
)  # fmt: skip
def test_each_format_is_dequantised_where_it_belongs(tmp_path, matrix_format, error, dtype):
    path = write_tiny_gguf(tmp_path / "a.gguf", CONFIG, STATE, matrix_format)
    for name, tensor in import_gguf(path).model.state_dict().items():
        assert tensor.dtype == dtype
        wanted = STATE[name].to(dtype).float()
        limit = error * float(wanted.abs().max())
        assert float((tensor.float() - wanted).abs().max()) <= limit, name


def test_the_dtype_asked_for_is_that_of_every_weight(tmp_path):
    path = write_tiny_gguf(tmp_path / "a.gguf", CONFIG, STATE)
    read = import_gguf(path, torch.bfloat16)
    assert {tensor.dtype for tensor in read.model.state_dict().values()} == {torch.bfloat16}


def test_unused_ids_at_the_end_are_padding(tmp_path):
    config = dataclasses.replace(CONFIG, vocab_size=VOCAB_SIZE + 5)
    state = tiny_model(config, dtype=torch.float32).state_dict()
    read = import_gguf(write_tiny_gguf(tmp_path / "a.gguf", config, state)).model.config
    assert (read.vocab_size, read.num_real_tokens) == (VOCAB_SIZE + 5, VOCAB_SIZE)


def test_progress_ends_at_the_total(tmp_path):
    seen: list[tuple[int, int]] = []
    path = write_tiny_gguf(tmp_path / "a.gguf", CONFIG, STATE)
    import_gguf(path, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 20) for done in range(21)]


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_unpermute_undoes_llama_cpps_order(heads):
    rows = np.arange(8 * 6 * 3, dtype=np.float32).reshape(48, 3)
    permuted = rows.reshape(heads, 2, -1, 3).swapaxes(1, 2).reshape(48, 3)
    assert np.array_equal(unpermute(np.ascontiguousarray(permuted), heads), rows)
    assert np.array_equal(permute(rows, heads), permuted)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "original_context_length is missing; yarn"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
        ({"llama.rope.scaling.yarn_beta_fast": 16.0}, "rope.scaling.yarn_beta_fast = 16.0"),
        ({"llama.rope.freq_base_swa": 5.0}, "llama.rope.freq_base_swa = 5.0"),
        ({"llama.attn_logit_softcapping": 5.0}, "llama.attn_logit_softcapping = 5.0"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window = 64"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale = 0.5"),
        ({"qwen2.block_count": 2}, "qwen2.block_count = 2"),
        ({"tokenizer.ggml.precompiled_charsmap": "x"}, "tokenizer.ggml.precompiled_charsmap"),
        ({"split.count": 2}, "says it is one of 2 parts"),
        ({"general.type": "adapter"}, "general.type is 'adapter'"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 2**31 - 1}, "llama.block_count is 2,147,483,647, the file has 20"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"llama.attention.head_count": 3}, "rope.dimension_count is 8, the head size 10"),
        ({"llama.attention.head_count_kv": [2, 2]}, "llama.attention.head_count_kv is [2, 2]"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is 4, the head size 8"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is None"),
        ({"llama.vocab_size": 9}, "llama.vocab_size is 9, token_embd.weight has 267 rows"),
        ({"llama.feed_forward_length": 65}, "blk.0.ffn_down.weight [32, 64], expected [32, 65]"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(tmp_path, changes, found):
    refused(write_tiny_gguf(tmp_path / "a.gguf", CONFIG, STATE, changes=changes), found)


def test_sizes_that_no_model_could_have_are_refused(tmp_path):
    huge = {"llama.embedding_length": 2**31 - 2, "llama.attention.head_count": 2**30,
            "llama.attention.key_length": 2**31 - 2, "llama.attention.value_length": 2**31 - 2,
            "llama.rope.dimension_count": 2**31 - 2}  # fmt: skip
    refused(write_tiny_gguf(tmp_path / "a.gguf", CONFIG, STATE, changes=huge), "cannot be built")


def test_values_that_change_nothing_are_allowed(tmp_path):
    changes = {
        "llama.rope.scaling.type": "none",
        "llama.expert_count": 0,
        "general.license": "x",
        "quantize.imatrix.file": "y",
        "tokenizer.ggml.fim_pre_token_id": 0,
        "llama.tensor_data_layout": "Meta AI original pth",
        "llama.rope.scaling.finetuned": True,
    }
    import_gguf(write_tiny_gguf(tmp_path / "a.gguf", CONFIG, STATE, changes=changes))


def test_other_architectures_are_named(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", {}, gguf_tensors(CONFIG, STATE), architecture="foo")
    refused(
        path,
        "general.architecture is 'foo'",
        "supported: 'llama', 'qwen2', 'qwen3', 'gemma', 'gemma2', 'gemma3', 'gpt2', 'olmo2'",
    )


def test_missing_and_unknown_tensors_are_named(tmp_path):
    tensors = gguf_tensors(CONFIG, STATE)
    del tensors["blk.1.attn_k.weight"]
    tensors["blk.0.attn_q_norm.weight"] = np.ones(8, np.float32)
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(CONFIG), tensors)
    refused(path, "missing blk.1.attn_k.weight", "not supported blk.0.attn_q_norm.weight")


def with_rope_freqs(tmp_path: Path, factors: list[float], **changes: Any) -> Path:
    tensors = gguf_tensors(CONFIG, STATE)
    tensors["rope_freqs.weight"] = np.array(factors, np.float32)
    return write_gguf(tmp_path / "a.gguf", {**gguf_metadata(CONFIG), **changes}, tensors)


def test_rotary_factors_are_those_of_a_llama3_scaling_or_refused(tmp_path):
    wanted = RopeScaling(kind="llama3", factor=8.0, original_max_position=64)
    factors = llama3_divisors(wanted, CONFIG.head_size, CONFIG.rope_theta).tolist()
    assert import_gguf(with_rope_freqs(tmp_path, factors)).model.config.rope_scaling == wanted
    assert import_gguf(with_rope_freqs(tmp_path, [1.0] * 4)).model.config.rope_scaling is None
    refused(with_rope_freqs(tmp_path, [1.0, 2.0, 2.5, 3.0]), "rope_freqs.weight", "not those of")
    refused(with_rope_freqs(tmp_path, [1.0] * 3), "rope_freqs.weight has the shape [3]")
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    refused(with_rope_freqs(tmp_path, factors, **linear), "both rope_freqs.weight and")


def test_a_scaling_factor_alone_is_linear_as_in_llama_cpp(tmp_path):
    changes = {"llama.rope.scaling.factor": 2.0}
    read = import_gguf(write_tiny_gguf(tmp_path / "a.gguf", CONFIG, STATE, changes=changes))
    assert read.model.config.rope_scaling == RopeScaling(kind="linear", factor=2.0)


def test_values_that_are_not_finite_are_refused(tmp_path):
    tensors = gguf_tensors(CONFIG, STATE)
    tensors["output_norm.weight"] = np.full(32, np.inf, np.float32)
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(CONFIG), tensors)
    refused(path, "output_norm.weight", "not finite")


def test_values_too_large_for_the_dtype_are_refused(tmp_path):
    tensors = gguf_tensors(CONFIG, STATE)
    tensors["output_norm.weight"] = np.full(32, 1e5, np.float32)
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(CONFIG), tensors)
    with pytest.raises(ValueError, match="too large for torch.float16"):
        import_gguf(path, torch.float16)
