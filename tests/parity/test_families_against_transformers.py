"""Every family of Hugging Face checkpoints: a tiny random transformers model is saved, imported,
compared position by position past the length its rotation was first made for, exported, and loaded
by transformers again.

8 query heads on 2 kv heads show a wrong order of rows; biases and gains are large and random.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch

from dualflow.model import BatchKV, CausalLM

transformers: Any = pytest.importorskip("transformers")

from dualflow.checkpoint.export import export_huggingface  # noqa: E402
from dualflow.checkpoint.huggingface import import_huggingface  # noqa: E402

LENGTH = 80
SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
SHORT = {"sliding_window": 7}
WINDOWS = {"use_sliding_window": True, "max_window_layers": 1, **SHORT}
WIDE = {"head_dim": 16}


class Case(NamedTuple):
    family: str
    changes: dict[str, Any]
    name: str


CASES = [
    Case("Llama", {}, "llama"),
    Case("Llama", {"tie_word_embeddings": True}, "llama-tied"),
    Case("Llama", {"attention_bias": True, "mlp_bias": True}, "llama-biases"),
    Case("Llama", {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 48},
         "llama-6-1"),
    Case("Llama", {"num_attention_heads": 4, "num_key_value_heads": 4}, "llama-4-4"),
    Case("Llama", {"rope_parameters": LLAMA3}, "llama-llama3"),
    Case("Llama", {"rope_parameters": LINEAR}, "llama-linear"),
    Case("Llama", {"rope_parameters": YARN}, "llama-yarn"),
    Case("Llama", {**WIDE, "rope_parameters": {**YARN, "truncate": False, "beta_fast": 8.0}},
         "llama-yarn-not-truncated"),
    Case("Llama", {"rope_parameters": {**YARN, "attention_factor": 1.3}}, "llama-yarn-factor"),
    Case("Llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
         "llama-yarn-mscale"),
    Case("Llama", {"hidden_act": "gelu_pytorch_tanh"}, "llama-geglu"),
    Case("Mistral", {**WIDE, "sliding_window": None}, "mistral"),
    Case("Mistral", SHORT, "mistral-window"),
    Case("Qwen2", {}, "qwen2"),
    Case("Qwen2", {**WINDOWS, "tie_word_embeddings": True}, "qwen2-windows-tied"),
    Case("Qwen2", {"rope_parameters": YARN}, "qwen2-yarn"),
    Case("Qwen3", WIDE, "qwen3"),
    Case("Qwen3", {**WIDE, **WINDOWS, "attention_bias": True}, "qwen3-windows-biases"),
    Case("Gemma", WIDE, "gemma"),
    Case("Gemma", {**WIDE, "tie_word_embeddings": False, "attention_bias": True}, "gemma-untied"),
    Case("Gemma2", {**WIDE, **SHORT, "query_pre_attn_scalar": 24,
                    "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}, "gemma2"),
    Case("Gemma2", {**WIDE, **SHORT, "query_pre_attn_scalar": 16, "attn_logit_softcapping": None,
                    "final_logit_softcapping": None}, "gemma2-without-caps"),
    Case("Gemma3Text", {**WIDE, **SHORT, "sliding_window_pattern": 3}, "gemma3"),
    Case("Gemma3Text", {
        **WIDE, **SHORT, "query_pre_attn_scalar": 30, "final_logit_softcapping": 3.0,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 123.0},
        },
    }, "gemma3-scaled"),
    Case("Olmo2", {}, "olmo2"),
    Case("Olmo2", {"attention_bias": True, "rope_parameters": LLAMA3}, "olmo2-biases-llama3"),
    Case("GPT2", {}, "gpt2"),
    Case("GPT2", {"tie_word_embeddings": False, "n_inner": 96}, "gpt2-untied"),
]  # fmt: skip


def build(case: Case) -> Any:
    """transformers' model of a case, with large random values."""
    config_class = getattr(transformers, f"{case.family}Config")
    if case.family == "GPT2":
        sizes = {"vocab_size": 101, "n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 128,
                 "bos_token_id": None, "eos_token_id": None}  # fmt: skip
    else:
        sizes = SIZES
    config = config_class(**(sizes | case.changes), attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model)
    return model.eval()


def randomise(model: Any) -> None:
    middle = 0 if "Gemma" in type(model).__name__ else 1  # of gains, which Gemma adds 1 to
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 0.12)
            else:
                parameter.copy_(noise if name.endswith("bias") else middle + 0.4 * noise)


@torch.no_grad()
def our_logits(model: CausalLM, tokens_T: torch.Tensor) -> torch.Tensor:
    kv = [BatchKV(1, len(tokens_T))] * model.config.num_layers
    return model.logits(model.step(tokens_T, torch.arange(len(tokens_T)), kv).primary_TD)


@torch.no_grad()
def cached_logits(model: CausalLM, tokens_T: torch.Tensor, prompt: int) -> torch.Tensor:
    """The same through a cache: the prompt at once, then token by token."""
    cache, length = model.new_cache(len(tokens_T)), len(tokens_T)
    rows = []
    for begin, end in [(0, prompt), *((at, at + 1) for at in range(prompt, length))]:
        out = model.step(tokens_T[begin:end], torch.arange(begin, end), cache.writers())
        rows.append(model.logits(out.primary_TD))
    return torch.cat(rows)


@torch.no_grad()
def their_logits(model: Any, tokens_T: torch.Tensor) -> torch.Tensor:
    return model(tokens_T[None]).logits[0]


def load(folder: Path) -> Any:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True, local_files_only=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_import_and_export_agree_with_transformers(tmp_path: Path, case: Case) -> None:
    theirs = build(case)
    theirs.save_pretrained(tmp_path / "source")
    imported = import_huggingface(tmp_path / "source")
    tokens = torch.randint(101, (LENGTH,), generator=torch.Generator().manual_seed(1))
    expected = their_logits(theirs, tokens)
    assert expected.std() > 0.1
    ours = our_logits(imported.model, tokens)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    cached = cached_logits(imported.model, tokens, 60)
    torch.testing.assert_close(cached, expected, rtol=0, atol=1e-5)

    export_huggingface(imported.model, tmp_path / "target", primary_config=imported.primary_config)
    source, target = (
        safetensors.torch.load_file(tmp_path / place / "model.safetensors")
        for place in ("source", "target")
    )
    assert source.keys() == target.keys()
    assert all(torch.equal(source[name], target[name]) for name in source)
    configs = [json.loads((tmp_path / p / "config.json").read_text()) for p in ("source", "target")]
    assert configs[0] == configs[1]
    assert torch.equal(their_logits(load(tmp_path / "target"), tokens), expected)


@pytest.mark.parametrize("name", [
    "llama-biases", "llama-llama3", "llama-yarn-mscale", "mistral-window", "qwen2-windows-tied",
    "qwen3-windows-biases", "gemma-untied", "gemma2", "gemma3-scaled", "olmo2", "gpt2-untied",
])  # fmt: skip
def test_a_config_made_here_says_what_the_model_is(tmp_path: Path, name: str) -> None:
    theirs = build(next(case for case in CASES if case.name == name))
    theirs.save_pretrained(tmp_path / "source")
    model = import_huggingface(tmp_path / "source").model
    export_huggingface(model, tmp_path / "made")
    made = load(tmp_path / "made")
    assert type(made) is type(theirs)
    tokens = torch.randint(101, (LENGTH,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(their_logits(made, tokens), their_logits(theirs, tokens))
    assert import_huggingface(tmp_path / "made").model.config == model.config
