"""PHD-2 against one plain transformer over originals and copies, told apart by the attention
mask alone.
"""

from typing import Any

import torch

from dualflow.ops.rope import rotary_table, rotate
from dualflow.testing import tiny_config
from dualflow.testing.steps import whole_sequence
from dualflow.testing.tensors import random_tokens, tiny_model


def brute_force(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Final states of 2S rows: S originals, then S copies. Copy t sees originals 0..t and
    itself.
    """
    size, config = len(tokens), model.config
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    nothing, itself = torch.zeros_like(causal), torch.eye(size, dtype=torch.bool)
    mask = torch.cat([torch.cat([causal, nothing], 1), torch.cat([causal, itself], 1)])
    h = model.model.embed_tokens(tokens.repeat(2))
    table = rotary_table(
        torch.arange(size, dtype=torch.float64).repeat(2), config.head_size, config.rope_theta
    )
    groups = config.num_heads // config.kv_heads
    for layer in model.model.layers:
        attn, n = layer.self_attn, layer.input_layernorm(h)
        q, k, v = (
            w(n).unflatten(-1, (-1, config.head_size))
            for w in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        q, k = rotate(q, table), rotate(k, table)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("inh,jnh->nij", q, k) / config.head_size**0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        h = h + attn.o_proj(torch.einsum("nij,jnh->inh", weights, v).flatten(1))
        m, mlp = layer.post_attention_layernorm(h), layer.mlp
        h = h + mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(m)) * mlp.up_proj(m))
    return model.model.norm(h)


@torch.no_grad()
def test_phd2_equals_the_masked_transformer() -> None:
    model = tiny_model(tiny_config("phd2"))
    tokens = random_tokens(model.config, 23)
    want = brute_force(model, tokens)
    out = whole_sequence(model, tokens)
    assert out.aux_FAD is not None
    torch.testing.assert_close(
        torch.cat([out.primary_TD, out.aux_FAD[0]]), want, rtol=0.0, atol=1e-9
    )
