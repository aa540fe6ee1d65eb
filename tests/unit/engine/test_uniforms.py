"""Random numbers by output position."""

import torch

from dualflow.engine.request import SEED_END
from dualflow.engine.uniforms import Uniforms


def naive_stream(seed: int, count: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return [float(torch.rand((), dtype=torch.float64, generator=generator)) for _ in range(count)]


def test_positions_read_the_naive_generators_numbers():
    uniforms = Uniforms(7)
    assert [uniforms[i] for i in range(100)] == naive_stream(7, 100)


def test_the_order_of_reading_changes_nothing():
    uniforms = Uniforms(3)
    expected = naive_stream(3, 21)
    assert [uniforms[i] for i in (20, 0, 5, 20, 19)] == [expected[i] for i in (20, 0, 5, 20, 19)]


def test_named_streams_are_others_and_reproducible():
    token, draft, accept = Uniforms(3), Uniforms(3, "draft"), Uniforms(3, "accept")
    first = [[stream[i] for i in range(4)] for stream in (token, draft, accept)]
    assert len({number for numbers in first for number in numbers}) == 12
    assert Uniforms(3, "draft")[2] == draft[2]


def test_seeds_above_the_largest_start_again():
    assert Uniforms(SEED_END + 5)[0] == Uniforms(5)[0]
    assert Uniforms(SEED_END - 1)[0] == naive_stream(SEED_END - 1, 1)[0]
