"""Whatever the sizes: each window once per epoch, ranks disjoint and complete, resuming exact."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dualflow.data import BatchLoader, ShardSet

SHARDS = {
    windows: ShardSet.from_documents(
        [np.arange(windows * 2 + 1).tolist()], vocab_size=windows * 2 + 1, eos_id=0
    )
    for windows in range(1, 60)
}

windows = st.integers(1, 59)
seeds = st.integers(-(2**63), 2**64)


@st.composite
def worlds(draw):
    """(batch size, world size) that fit."""
    share, world = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    return share * world, world


def samples(loader: BatchLoader, batches: int) -> list[int]:
    return [sample for _ in range(batches) for sample in next(loader).sample_ids]


@given(
    windows=windows, world=worlds(), seed=seeds, steps=st.integers(0, 40), stop=st.integers(0, 40)
)
def test_a_run_resumed_anywhere_reads_what_the_straight_run_reads(
    windows, world, seed, steps, stop
):
    batch_size, world_size = world
    straight = BatchLoader(SHARDS[windows], 2, batch_size, seed)
    expected = [next(straight).sample_ids for _ in range(stop + steps)][stop:]
    interrupted = BatchLoader(SHARDS[windows], 2, batch_size, seed)
    samples(interrupted, stop)
    resumed = [
        BatchLoader(SHARDS[windows], 2, batch_size, seed, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for loader in resumed:
        loader.load_state_dict(interrupted.state_dict())
    for batch in expected:
        assert tuple(s for loader in resumed for s in next(loader).sample_ids) == batch


@given(windows=windows, batch_size=st.integers(1, 40), seed=seeds, epochs=st.integers(1, 6))
def test_each_window_is_read_once_per_epoch(windows, batch_size, seed, epochs):
    loader = BatchLoader(SHARDS[windows], 2, batch_size, seed)
    read = samples(loader, -(-windows * epochs // batch_size))
    for epoch in range(epochs):
        assert sorted(read[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


@given(windows=windows, world=worlds(), seed=seeds, shuffle=st.booleans())
def test_a_single_pass_is_complete_over_the_ranks_and_as_long_on_each(
    windows, world, seed, shuffle
):
    batch_size, world_size = world
    per_rank = [
        [
            batch.sample_ids
            for batch in BatchLoader(
                SHARDS[windows], 2, batch_size, seed, rank, world_size, shuffle, on_end="stop"
            )
        ]
        for rank in range(world_size)
    ]
    assert {len(batches) for batches in per_rank} == {-(-windows // batch_size)}
    read = [s for batches in per_rank for batch in batches for s in batch if s >= 0]
    assert sorted(read) == list(range(windows))


@given(windows=st.integers(25, 59), seed=seeds)
def test_every_epoch_and_every_seed_has_an_order_of_its_own(windows, seed):
    loader = BatchLoader(SHARDS[windows], 2, windows, seed)
    other = BatchLoader(SHARDS[windows], 2, windows, seed + 1)
    orders = [next(loader).sample_ids for _ in range(4)] + [
        next(other).sample_ids for _ in range(4)
    ]
    assert len(set(orders)) == 8


@given(windows=windows, batch_size=st.integers(1, 9), position=st.integers(0, 200), seed=seeds)
def test_a_batch_is_a_function_of_its_position(windows, batch_size, position, seed):
    loader = BatchLoader(SHARDS[windows], 2, batch_size, seed)
    samples(loader, 5)
    fresh = BatchLoader(SHARDS[windows], 2, batch_size, seed)
    assert loader.batch_at(position).sample_ids == fresh.batch_at(position).sample_ids


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=12)


@given(
    lengths=lengths,
    sequence_length=st.integers(1, 20),
    batch_size=st.integers(1, 5),
    mask=st.booleans(),
)
def test_every_target_counts_once_per_pass_and_none_from_another_document(
    lengths, sequence_length, batch_size, mask
):
    first = np.cumsum([0, *lengths])
    documents = [list(range(a + 1, b + 1)) for a, b in pairwise(first)]
    shards = ShardSet.from_documents(documents, vocab_size=int(first[-1]) + 1, eos_id=0)
    if shards.num_tokens < 2:
        return
    loader = BatchLoader(shards, sequence_length, batch_size, 0, shuffle=False, document_mask=mask)
    pairs = [
        (token, target)
        for batch in loader
        for token, target in zip(
            batch.tokens_BS.flatten().tolist(), batch.targets_BS.flatten().tolist(), strict=True
        )
        if target != -100
    ]
    starts = set((first + 1).tolist()) if mask else set()
    expected = [(t - 1, t) for t in range(2, shards.num_tokens + 1) if t not in starts]
    assert pairs == expected
