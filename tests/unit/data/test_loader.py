from typing import Any

import numpy as np
import pytest
import torch

from dualflow.data import BatchLoader, ShardSet
from dualflow.data.order import epoch_order


def shards(*documents, vocab_size=100, **settings: Any):
    return ShardSet.from_documents(documents, vocab_size=vocab_size, eos_id=0, **settings)


def stream(length, **settings):
    return shards(list(range(1, length + 1)), vocab_size=length + 1, **settings)


def test_windows_follow_each_other_and_every_token_but_the_first_is_a_target_once():
    batches = list(BatchLoader(stream(9), 4, 1, seed=0, shuffle=False))
    assert [b.tokens_BS.tolist() for b in batches] == [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]
    assert [b.targets_BS.tolist() for b in batches] == [[[2, 3, 4, 5]], [[6, 7, 8, 9]]]
    assert batches[0].tokens_BS.dtype == batches[0].targets_BS.dtype == torch.int64
    assert batches[0].document_ids_BS is None


def test_a_last_window_that_is_not_full_is_filled_with_what_does_not_count():
    last = list(BatchLoader(stream(7), 4, 1, seed=0, shuffle=False))[-1]
    assert last.tokens_BS.tolist() == [[5, 6, 7, 0]]
    assert last.targets_BS.tolist() == [[6, 7, -100, -100]]


def test_documents_are_told_apart_and_no_target_crosses_where_masked():
    data = shards([5, 6, 0], [7, 0], [8, 9, 0])
    (batch,) = BatchLoader(data, 8, 1, seed=0, shuffle=False, document_mask=True)
    assert batch.tokens_BS.tolist() == [[5, 6, 0, 7, 0, 8, 9, 0]]
    assert batch.targets_BS.tolist() == [[6, 0, -100, 0, -100, 9, 0, -100]]
    assert batch.document_ids_BS is not None
    assert batch.document_ids_BS.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    (plain,) = BatchLoader(data, 8, 1, seed=0, shuffle=False)
    assert plain.targets_BS.tolist() == [[6, 0, 7, 0, 8, 9, 0, -100]]
    assert plain.document_ids_BS is None


def test_document_ids_restart_in_every_window_and_filling_is_no_part_of_a_document():
    data = shards([5, 6, 7, 8, 0], [9, 0], document_mask=True)
    first, second = BatchLoader(data, 4, 1, seed=0, shuffle=False)
    assert first.document_ids_BS is not None
    assert first.document_ids_BS.tolist() == [[0, 0, 0, 0]]
    assert second.document_ids_BS is not None
    assert second.tokens_BS.tolist() == [[0, 9, 0, 0]]
    assert second.document_ids_BS.tolist() == [[0, 1, 1, 2]]
    assert second.targets_BS.tolist() == [[-100, 0, -100, -100]]


def test_tokens_that_do_not_count_are_no_targets():
    data = shards([1, 2, 3, 4, 5], counted=[[False, False, True, True, False]])
    (batch,) = BatchLoader(data, 4, 1, seed=0, shuffle=False)
    assert batch.targets_BS.tolist() == [[-100, 3, 4, -100]]


def test_in_order_ends_after_one_pass_with_the_last_batch_filled_up():
    batches = list(BatchLoader(stream(21), 4, 4, seed=0, shuffle=False))
    assert [b.sample_ids for b in batches] == [(0, 1, 2, 3), (4, -1, -1, -1)]
    assert (batches[-1].targets_BS[1:] == -100).all()
    assert batches[-1].tokens_BS.shape == (4, 4)


def test_shuffled_goes_on_and_the_last_batch_of_an_epoch_takes_from_the_next():
    loader = BatchLoader(stream(21), 4, 3, seed=0)
    samples = [s for _ in range(10) for s in next(loader).sample_ids]
    assert [sorted(samples[e * 5 : e * 5 + 5]) for e in range(6)] == [[0, 1, 2, 3, 4]] * 6
    assert loader.epoch == 6


def test_told_to_stop_it_ends_after_one_pass_and_says_so():
    loader = BatchLoader(stream(21), 4, 3, seed=0, on_end="stop")
    samples = [s for batch in loader for s in batch.sample_ids]
    assert sorted(samples) == [-1, 0, 1, 2, 3, 4]
    assert next(loader, None) is None
    assert "all 5 windows of 4 tokens were read once, in 2 batches of 3" in loader.end_message
    assert "on_end = 'repeat'" in loader.end_message


def test_a_batch_larger_than_the_data_holds_several_epochs():
    loader = BatchLoader(stream(9), 4, 7, seed=3)
    samples = [s for _ in range(4) for s in next(loader).sample_ids]
    assert [sorted(samples[i : i + 2]) for i in range(0, 28, 2)] == [[0, 1]] * 14


def test_position_is_all_there_is_to_resume():
    straight = BatchLoader(stream(101), 4, 3, seed=1)
    batches = [next(straight) for _ in range(30)]
    first = BatchLoader(stream(101), 4, 3, seed=1)
    for _ in range(17):
        next(first)
    resumed = BatchLoader(stream(101), 4, 3, seed=1)
    resumed.load_state_dict(first.state_dict())
    for expected in batches[17:]:
        batch = next(resumed)
        assert batch.sample_ids == expected.sample_ids
        assert torch.equal(batch.tokens_BS, expected.tokens_BS)
    assert resumed.state_dict() == straight.state_dict()


@pytest.mark.parametrize(
    ("data", "settings", "complaint"),
    [
        (stream(102), {}, "the tokens are not those the saved run was reading"),
        (
            stream(101),
            {"seed": 2},
            r"seed is not that the saved run was reading \(saved 1, found 2\)",
        ),
        (stream(101), {"batch_size": 4}, "batch_size is not that"),
        (stream(101), {"sequence_length": 5}, "sequence_length is not that"),
        (stream(101), {"shuffle": False}, "shuffle is not that"),
        (stream(101), {"document_mask": True}, "document_mask is not that"),
    ],
)
def test_resuming_on_other_data_or_another_order_is_refused(data, settings, complaint):
    state = BatchLoader(stream(101), 4, 3, seed=1).state_dict()
    other = BatchLoader(data, **{"sequence_length": 4, "batch_size": 3, "seed": 1} | settings)
    with pytest.raises(ValueError, match=complaint):
        other.load_state_dict(state)


@pytest.mark.parametrize("position", [-1, 1.0, None, True])
def test_a_position_that_is_none_is_refused(position):
    loader = BatchLoader(stream(101), 4, 3, seed=1)
    with pytest.raises(ValueError, match="the saved position is"):
        loader.load_state_dict(loader.state_dict() | {"position": position})


def test_ranks_slice_the_global_batch_and_may_change_in_number_on_resume():
    whole = BatchLoader(stream(101), 4, 6, seed=1)
    parts = [BatchLoader(stream(101), 4, 6, seed=1, rank=rank, world_size=3) for rank in range(3)]
    for _ in range(7):
        together = torch.cat([next(part).tokens_BS for part in parts])
        assert torch.equal(together, next(whole).tokens_BS)
    whole.load_state_dict(parts[2].state_dict())
    assert next(whole).sample_ids[:2] == next(parts[0]).sample_ids


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"batch_size": 0}, "batch_size is 0; expected at least 1"),
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"world_size": 2}, "batch_size 3 is not a multiple of world_size 2"),
        ({"world_size": 3, "rank": 3}, r"rank is 3; expected 0 \.\. 2"),
    ],
)
def test_sizes_that_do_not_fit_are_named(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        BatchLoader(stream(99), **{"sequence_length": 4, "batch_size": 3, "seed": 0} | settings)


@pytest.mark.parametrize("length", [0, 1])
def test_data_without_a_target_is_named(length):
    with pytest.raises(
        ValueError, match=f"tokens in memory: found {length} tokens; expected at least 2"
    ):
        BatchLoader(stream(length), 4, 1, seed=0)


def test_the_order_is_pinned():
    # A saved run must meet the same order under every version: these numbers never change.
    assert epoch_order(8, seed=0, epoch=0).tolist() == [1, 3, 6, 5, 0, 7, 4, 2]
    assert epoch_order(8, seed=1337, epoch=2).tolist() == [3, 0, 2, 5, 6, 7, 1, 4]


def test_orders_differ_by_seed_and_epoch_and_are_even():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    firsts = np.bincount([epoch_order(10, seed, 0)[0] for seed in range(2000)], minlength=10)
    assert firsts.min() > 140
    assert firsts.max() < 260
