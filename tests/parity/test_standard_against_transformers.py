"""The standard variant against transformers' Llama, Qwen3 and GPT-2 with tiny random weights (8
heads, 2 kv heads).
"""

from typing import Any

import pytest
import torch

from dualflow.model import BatchKV, CausalLM, build_model
from dualflow.spec import ModelConfig

transformers: Any = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "num_layers": 3,
    "num_heads": 8,
    "intermediate_size": 96,
}
HF_SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


def randomise(model: torch.nn.Module) -> None:
    """Large random values everywhere, biases and gains included."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1)
            )


@torch.no_grad()
def our_logits(model: CausalLM, tokens_BS: torch.Tensor) -> torch.Tensor:
    batch, length = tokens_BS.shape
    kv = [BatchKV(batch, length)] * model.config.num_layers
    out = model.step(tokens_BS.flatten(), torch.arange(length).repeat(batch), kv)
    return model.lm_head(out.primary_TD).view(batch, length, -1)


def compare(ours: CausalLM, theirs: Any, state: dict[str, torch.Tensor]) -> None:
    ours.load_state_dict(state)
    tokens = torch.randint(0, 101, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(our_logits(ours, tokens), expected, rtol=1e-5, atol=1e-4)


def test_llama_with_biases() -> None:
    config = transformers.LlamaConfig(
        **HF_SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    randomise(theirs)
    ours = build_model(
        ModelConfig(
            **SIZES, num_kv_heads=2, attention_bias=True, attention_output_bias=True, mlp_bias=True
        )
    )
    compare(ours, theirs, theirs.state_dict())


def test_qwen3_with_qk_norm() -> None:
    config = transformers.Qwen3Config(**HF_SIZES, head_dim=16, tie_word_embeddings=True)
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    randomise(theirs)
    ours = build_model(
        ModelConfig(**SIZES, num_kv_heads=2, head_dim=16, qk_norm=True, tie_embeddings=True)
    )
    compare(ours, theirs, theirs.state_dict())


GPT2_NAMES = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}


def from_gpt2(theirs: Any, layers: int) -> dict[str, torch.Tensor]:
    """GPT-2's tensors under our names; its matrices are stored transposed, q, k and v in one."""
    source = theirs.transformer.state_dict()
    state = {
        "model.embed_tokens.weight": source["wte.weight"], "lm_head.weight": source["wte.weight"],
        "model.embed_positions.weight": source["wpe.weight"],
    }  # fmt: skip
    for part in ("weight", "bias"):
        state[f"model.norm.{part}"] = source[f"ln_f.{part}"]
        for i in range(layers):
            old, new = f"h.{i}.", f"model.layers.{i}."
            for name, ours in GPT2_NAMES.items():
                state[f"{new}{ours}.{part}"] = source[f"{old}{name}.{part}"].t()
            thirds = source[f"{old}attn.c_attn.{part}"].t().chunk(3)
            for letter, third in zip("qkv", thirds, strict=True):
                state[f"{new}self_attn.{letter}_proj.{part}"] = third
    return state


def test_gpt2() -> None:
    config = transformers.GPT2Config(
        vocab_size=101,
        n_embd=64,
        n_layer=3,
        n_head=8,
        n_inner=96,
        n_positions=64,
        layer_norm_epsilon=1e-5,
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    randomise(theirs)
    ours = build_model(
        ModelConfig(
            **SIZES,
            max_position=64,
            norm="layernorm",
            norm_eps=1e-5,
            position="learned",
            mlp="gelu",
            mlp_bias=True,
            attention_bias=True,
            attention_output_bias=True,
            tie_embeddings=True,
        )
    )
    compare(ours, theirs, from_gpt2(theirs, 3))
