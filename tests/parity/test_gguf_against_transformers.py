"""Imported GGUF files against the transformers model they were written from, position by position.

8 query heads on 2 kv heads show a wrong order of query and key rows; 9 on 3 would hide it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from dualflow.model import BatchKV, CausalLM
from dualflow.spec import ModelConfig

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from dualflow.checkpoint.gguf.importer import import_gguf  # noqa: E402
from dualflow.testing.gguf import VOCAB_SIZE, write_tiny_gguf  # noqa: E402

CONFIG = ModelConfig(
    vocab_size=VOCAB_SIZE, hidden_size=64, num_layers=2, num_heads=8, num_kv_heads=2,
    intermediate_size=96, max_position=128, norm_eps=1e-5, rope_theta=10000.0,
)  # fmt: skip


def llama(config: ModelConfig, **changes: Any) -> Any:
    """transformers' Llama of the same sizes, with large random values everywhere."""
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_size,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
            **changes,
        )
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.1 + (parameter.dim() == 1))
    return theirs


@torch.no_grad()
def logits(model: CausalLM, tokens_T: torch.Tensor) -> torch.Tensor:
    kv = [BatchKV(1, len(tokens_T))] * model.config.num_layers
    return model.lm_head(model.step(tokens_T, torch.arange(len(tokens_T)), kv).primary_TD)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": True},
        {"num_heads": 6, "num_kv_heads": 1, "hidden_size": 48},
        {"num_heads": 4, "num_kv_heads": 4},
        {"head_dim": 12, "rope_theta": 100000.0},
        {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    ],
    ids=lambda changes: ",".join(changes) or "8/2",
)
def test_imported_logits_and_tensors_are_those_of_transformers(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    biases = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    theirs = llama(config, **biases)
    ours = import_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", config, theirs.state_dict())).model
    assert ours.config == config
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    tokens = torch.randint(VOCAB_SIZE, (64,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    torch.testing.assert_close(logits(ours, tokens), expected, rtol=1e-5, atol=1e-5)


def test_a_tied_head_stays_one_tensor_with_the_embedding(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    file = write_tiny_gguf(tmp_path / "tiny.gguf", config, llama(config).state_dict())
    model = import_gguf(file).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
