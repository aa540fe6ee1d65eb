"""Named standard models."""

from dualflow.spec.checks import require
from dualflow.spec.model import ModelConfig


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=32000, hidden_size=hidden, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, intermediate_size=intermediate,
        max_position=2048, norm_eps=1e-5, rope_theta=10000.0,
    )  # fmt: skip


PRESETS: dict[str, ModelConfig] = {
    "demo": ModelConfig(
        vocab_size=1024, hidden_size=32, num_layers=4, num_heads=2, intermediate_size=96,
        max_position=1024, tie_embeddings=True,
    ),
    # The paper's NanoGPT setting: 12 layers, D 768, head dim 128, vocabulary 50257 padded to 50304;
    # the rest is ours.
    "nanogpt-124m": ModelConfig(
        vocab_size=50304, real_vocab_size=50257, hidden_size=768, num_layers=12, num_heads=6,
        intermediate_size=3072, max_position=1024, qk_norm=True, mlp="relu2", tie_embeddings=True,
    ),
    "llama-120m": _llama(768, 12, 12, 4, 2048),
    "llama-270m": _llama(1024, 16, 16, 4, 2816),
    "llama-500m": _llama(1280, 22, 20, 5, 3456),
    "smollm2-135m": ModelConfig(
        vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3,
        intermediate_size=1536, max_position=8192, norm_eps=1e-5, rope_theta=100000.0,
        tie_embeddings=True,
    ),
}  # fmt: skip
"""Named standard models; ``dataclasses.replace(PRESETS[name], variant="dual")`` gives one an
auxiliary flow.
"""


def preset(name: str) -> ModelConfig:
    """The preset ``name``; raises ``ValueError`` with the known names."""
    require(name in PRESETS, f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]
