"""Batches of windows of a token stream, in an order that is a function of (seed, position).

A split's documents are joined into one stream, cut into windows of sequence_length targets each;
the last window is filled up with positions that do not count. So every token but the very first is
a target exactly once per epoch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualflow.data.order import epoch_order
from dualflow.data.shards import ShardSet

IGNORED = -100
"""Target of a position that the loss does not count."""

_STATE_KEYS = ("fingerprint", "seed", "batch_size", "sequence_length", "shuffle", "document_mask")


@dataclass(frozen=True)
class Batch:
    """This rank's share of a global batch; B sequences of S positions, all int64.

    tokens_BS:        token ids.
    targets_BS:       the next token's id, or −100 where the loss does not count it.
    document_ids_BS:  equal where two positions of a sequence belong to one document; None without
                      document masking.
    sample_ids:       each sequence's window, in 0 .. num_windows − 1; −1 marks a sequence that only
                      fills the batch up.
    """

    tokens_BS: Tensor
    targets_BS: Tensor
    document_ids_BS: Tensor | None
    sample_ids: tuple[int, ...]


class BatchLoader(Iterator[Batch]):
    """Batches of ``shards`` for one rank of ``world_size``.

    batch_size:     sequences of the global batch, a multiple of world_size; rank k gets the k-th
                    equal slice of it.
    shuffle:        whether each epoch has an order of its own, permutation(seed, epoch); else
                    windows come in order.
    on_end:         ``repeat``: the last batch of an epoch is filled from the next; ``stop``: it is
                    filled with sequences that do not count (so shapes and ranks stay equal), and
                    the iteration ends. None: repeat where shuffled, stop where in order.
    document_mask:  whether to give document ids and not to count a document's first token; None: as
                    the shards say.

    Iterating goes on where it stands; ``iter(loader)`` does not rewind. Raises ``ValueError`` where
    there is no window, or sizes do not fit together.
    """

    def __init__(
        self,
        shards: ShardSet,
        sequence_length: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        *,
        on_end: Literal["repeat", "stop"] | None = None,
        document_mask: bool | None = None,
    ) -> None:
        for name, value in (
            ("sequence_length", sequence_length),
            ("batch_size", batch_size),
            ("world_size", world_size),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank is {rank}; expected 0 .. {world_size - 1} for world_size {world_size}"
            )
        if batch_size % world_size:
            raise ValueError(
                f"batch_size {batch_size} is not a multiple of world_size {world_size}"
            )
        self.num_windows = shards.num_windows(sequence_length)
        if not self.num_windows:
            raise ValueError(
                f"{shards.name}: found {shards.num_tokens} tokens; expected at least 2 (a token "
                "and its target)"
            )
        self.shards = shards
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.on_end = on_end or ("repeat" if shuffle else "stop")
        self.document_mask = shards.document_mask if document_mask is None else document_mask
        self.position = 0
        self._orders: dict[int, NDArray[np.int64]] = {}

    @property
    def batches_per_epoch(self) -> int:
        """Global batches of a pass; the last may reach into the next epoch, or be filled up."""
        return -(-self.num_windows // self.batch_size)

    @property
    def epoch(self) -> int:
        """Passes completed before the next batch's first sequence."""
        return self.position * self.batch_size // self.num_windows

    @property
    def end_message(self) -> str:
        """For people, when the iteration ended because ``on_end`` is ``stop``."""
        return (
            f"{self.shards.name}: all {self.num_windows} windows of {self.sequence_length} tokens "
            "were read once, in "
            f"{self.batches_per_epoch} batches of {self.batch_size}; set on_end = 'repeat' to go "
            "on in a new order"
        )

    def __next__(self) -> Batch:
        if self.on_end == "stop" and self.position >= self.batches_per_epoch:
            raise StopIteration
        batch = self.batch_at(self.position)
        self.position += 1
        return batch

    def batch_at(self, position: int) -> Batch:
        """This rank's share of global batch ``position``, whatever was read before."""
        share = self.batch_size // self.world_size
        first = position * self.batch_size + self.rank * share
        windows = self._windows(np.arange(first, first + share))
        return self._gather(windows)

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which an equal loader continues, with any world_size."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind the saved position; ``ValueError`` where data or order are others."""
        identity = self._identity()
        for key in _STATE_KEYS:
            if state.get(key) != identity[key]:
                what = "the tokens are not those" if key == "fingerprint" else f"{key} is not that"
                raise ValueError(
                    f"{self.shards.name}: {what} the saved run was reading (saved "
                    f"{state.get(key)}, found {identity[key]}); "
                    "resume with the same data and data settings, or start a new run"
                )
        position = state.get("position")
        if type(position) is not int or position < 0:
            raise ValueError(
                f"the saved position is {position!r}; expected a whole number of batches, 0 or more"
            )
        self.position = position

    def _identity(self) -> dict[str, Any]:
        values = (
            self.shards.fingerprint,
            self.seed,
            self.batch_size,
            self.sequence_length,
            self.shuffle,
            self.document_mask,
        )
        return dict(zip(_STATE_KEYS, values, strict=True))

    def _windows(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The window of each sample of the endless row of epochs; −1 behind a stop."""
        epochs, within = np.divmod(samples, self.num_windows)
        windows = np.full_like(samples, -1)
        for epoch in np.unique(epochs):
            if self.on_end == "stop" and epoch > 0:
                continue
            chosen = epochs == epoch
            windows[chosen] = self._order(int(epoch))[within[chosen]]
        return windows

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if not self.shuffle:
            epoch = 0
        if epoch not in self._orders:
            # A batch reaches into one epoch after another: those before the previous one are done
            # with.
            self._orders = {
                kept: order for kept, order in self._orders.items() if kept == epoch - 1
            }
            order = (
                epoch_order(self.num_windows, self.seed, epoch)
                if self.shuffle
                else np.arange(self.num_windows)
            )
            self._orders[epoch] = order
        return self._orders[epoch]

    def _gather(self, windows_B: NDArray[np.int64]) -> Batch:
        length, shards = self.sequence_length, self.shards
        index_BS = np.maximum(windows_B, 0)[:, None] * length + np.arange(length + 1)
        counts_BS = (index_BS < shards.num_tokens) & (windows_B >= 0)[:, None]
        safe_BS = np.minimum(index_BS, shards.num_tokens - 1)
        stream_BS = np.where(counts_BS, shards.tokens[safe_BS].astype(np.int64), shards.eos_id)
        counts_BS = counts_BS[:, 1:]
        if shards.counted is not None:
            counts_BS &= shards.counted[safe_BS[:, 1:]] != 0
        document_ids = None
        if self.document_mask:
            ids_BS = np.searchsorted(shards.document_ends, index_BS, side="right")
            counts_BS &= ids_BS[:, 1:] == ids_BS[:, :-1]
            document_ids = torch.from_numpy(
                np.ascontiguousarray(ids_BS[:, :-1] - ids_BS[:, :1]).astype(np.int64)
            )
        targets_BS = np.where(counts_BS, stream_BS[:, 1:], IGNORED)
        return Batch(
            tokens_BS=torch.from_numpy(np.ascontiguousarray(stream_BS[:, :-1])),
            targets_BS=torch.from_numpy(targets_BS),
            document_ids_BS=document_ids,
            sample_ids=tuple(windows_B.tolist()),
        )
