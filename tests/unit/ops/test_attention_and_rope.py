"""Attention and rotation against their slow twins."""

import pytest
import torch

from dualflow.ops import attention, reference, rope


def qkv(rows: int, keys: int, heads: int = 6, kv_heads: int = 2, dim: int = 8):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return draw(rows, heads, dim), draw(keys, kv_heads, dim), draw(keys, kv_heads, dim)


def test_row_attention_equals_the_reference_row_by_row() -> None:
    q, k, v = qkv(rows=5, keys=9)
    positions = torch.tensor([8, 3, 0, 8, 5])
    mask = torch.arange(9) <= positions[:, None]
    got = attention.row_attention(q, k.transpose(0, 1), v.transpose(0, 1), mask)
    for row, position in enumerate(positions.tolist()):
        want = reference.attention(q[row], k[: position + 1], v[: position + 1])
        torch.testing.assert_close(got[row], want)


def test_batch_attention_is_causal() -> None:
    q, k, v = qkv(rows=7, keys=7)
    got = attention.batch_attention(q[None], k[None], v[None], None)[0]
    for row in range(7):
        torch.testing.assert_close(
            got[row], reference.attention(q[row], k[: row + 1], v[: row + 1])
        )


def test_a_private_key_joins_only_its_own_row() -> None:
    q, k, v = qkv(rows=3, keys=6)
    own = (torch.randn(3, 2, 8).double(), torch.randn(3, 2, 8).double())
    k_each, v_each = (x.transpose(0, 1).expand(3, 2, 6, 8) for x in (k, v))
    mask = torch.arange(6) <= torch.tensor([1, 3, 5])[:, None]
    got = attention.row_attention_with_own(q, k_each, v_each, mask, own)
    for row, position in enumerate((1, 3, 5)):
        keys = torch.cat([k[: position + 1], own[0][row : row + 1]])
        values = torch.cat([v[: position + 1], own[1][row : row + 1]])
        torch.testing.assert_close(got[row], reference.attention(q[row], keys, values))


@pytest.mark.parametrize("position", [0, 1, 50, 4097])
def test_rotation_equals_the_reference(position: int) -> None:
    x = torch.randn(1, 2, 16, dtype=torch.float64)
    table = rope.rotary_table(torch.tensor([position], dtype=torch.float64), 16, 10000.0)
    for head in range(2):
        torch.testing.assert_close(
            rope.rotate(x, table)[0, head], reference.rotate(x[0, head], position, 10000.0)
        )


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [1, 4, 9])
def test_a_window_shows_the_last_keys_alone(window: int, softcap: float | None) -> None:
    q, k, v = qkv(rows=9, keys=9)
    scope = attention.Scope(window, softcap)
    steps = torch.arange(9)
    mask = scope.within(steps[:, None], steps)
    got = attention.batch_attention(q[None], k[None], v[None], mask[None, None], softcap)[0]
    rows = attention.row_attention(q, k.transpose(0, 1), v.transpose(0, 1), mask, softcap)
    for row in range(9):
        seen = slice(max(0, row + 1 - window), row + 1)
        want = reference.attention(q[row], k[seen], v[seen], softcap)
        torch.testing.assert_close(got[row], want)
        torch.testing.assert_close(rows[row], want)


def test_capped_scores_are_causal_without_a_mask() -> None:
    q, k, v = qkv(rows=7, keys=7)
    got = attention.batch_attention(q[None], k[None], v[None], None, 0.5)[0]
    for row in range(7):
        want = reference.attention(q[row], k[: row + 1], v[: row + 1], 0.5)
        torch.testing.assert_close(got[row], want)


def test_a_window_as_long_as_the_keys_hides_nothing() -> None:
    assert attention.Scope(8).hides(9)
    assert not attention.Scope(9).hides(9) and not attention.EVERYTHING.hides(9)


@pytest.mark.parametrize("masked", [False, True])
def test_sequences_side_by_side_attend_as_each_does_alone(masked: bool) -> None:
    q = torch.randn(3, 4, 8, 6, dtype=torch.float64)
    k, v = (torch.randn(3, 2, 10, 6, dtype=torch.float64) for _ in range(2))
    mask = torch.arange(10) <= torch.tensor([[0, 3, 9, 9], [5, 5, 5, 5], [1, 2, 3, 4]])[..., None]
    got = attention.group_attention(q, k, v, mask if masked else None)
    for i in range(3):
        alone = attention.row_attention(q[i], k[i], v[i], mask[i] if masked else None)
        torch.testing.assert_close(got[i], alone, rtol=0, atol=1e-12)
