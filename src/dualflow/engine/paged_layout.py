"""Where the rows of one step and their keys lie in a paged cache: index tensors that all layers
share.

Rows of several sequences attend together where they are alike: a *group* is some sequences with the
same number of rows and about as many pages, so that a decode batch is one attention call whatever
its size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dualflow.ops.attention import EVERYTHING

MANY_ROWS = 16
"""Primary rows from which on a sequence attends on its own (a chunk of a prompt)."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The rows of one sequence that attend in a step.

    pages:    pages of all positions up to its last row's.
    primary:  rows of the step, in the order of their positions from ``start`` on.
    aux:      auxiliary rows, with the position each is pinned to; likewise rows of the step.
    """

    pages: Sequence[int]
    start: int
    primary: range
    aux: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """B sequences that attend in one call.

    rows_BR:       their rows of the step, at ``positions_BR``.
    pages_BP:      their pages, padded with the first of them.
    num_keys:      keys from the first on that any row may see.
    mask_BRS:      True where a row may look; None: every row sees every key.
    causal:        row i sees keys 0..i: there is no mask to read.
    own_BC:        auxiliary rows (counted from the first one) whose private keys stand behind the
                   cached ones, and ``sees_own_BRC`` which row sees which. None: the group has none.
    """

    rows_BR: Tensor
    positions_BR: Tensor
    pages_BP: Tensor
    num_keys: int
    mask_BRS: Tensor | None
    causal: bool = False
    own_BC: Tensor | None = None
    sees_own_BRC: Tensor | None = None

    def mask_with_own(self, mask_BRS: Tensor | None) -> Tensor:
        """``mask_BRS`` over the cached keys and the private ones behind them."""
        assert mask_BRS is not None and self.sees_own_BRC is not None
        return torch.cat([mask_BRS, self.sees_own_BRC], dim=-1)


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of a step.

    pages_T, offsets_T:  where the keys of the written primary rows go; ``written_T`` names those
                         rows, None: all of them.
    begun_P:             pages whose first place is written. They are cleared before: what another
                         sequence left there stays behind a mask, but zero times NaN is NaN.
    groups:              cover every row once; ``order_R`` brings their rows, one group after the
                         other, back into the step's order. None: they are in it.
    """

    pages_T: Tensor
    offsets_T: Tensor
    written_T: Tensor | None
    begun_P: Tensor | None
    groups: Sequence[Group]
    order_R: Tensor | None


def make_layout(
    lanes: Sequence[Lanes], write_from: Sequence[int], page_size: int, num_primary: int,
    device: torch.device, own_keys: bool = False,
) -> Layout:  # fmt: skip
    """The places of a step of ``num_primary`` primary rows and the auxiliary rows behind them.

    write_from: for every sequence, the first position whose keys are written.
    own_keys:   auxiliary rows bring a key and value of their own (PHD-2).
    """
    pages, offsets, written = [], [], []
    for lane, first in zip(lanes, write_from, strict=True):
        for position, row in enumerate(lane.primary, lane.start):
            if position >= first:
                pages.append(lane.pages[position // page_size])
                offsets.append(position % page_size)
                written.append(row)
    groups, order = [], []
    for members in _alike(lanes, page_size):
        group, rows = _group(members, page_size, num_primary, device, own_keys)
        groups.append(group)
        order += rows
    order_R = None
    if any(row != index for index, row in enumerate(order)):
        order_R = torch.tensor(order, device=device).argsort()
    everything = len(written) == num_primary
    begun = [page for page, offset in zip(pages, offsets, strict=True) if offset == 0]
    return Layout(
        torch.tensor(pages, dtype=torch.long, device=device),
        torch.tensor(offsets, dtype=torch.long, device=device),
        None if everything else torch.tensor(written, dtype=torch.long, device=device),
        torch.tensor(begun, device=device) if begun else None,
        groups,
        order_R,
    )


def _alike(lanes: Sequence[Lanes], page_size: int) -> list[list[Lanes]]:
    """Lanes that may attend together. A chunk is alone, and its auxiliary rows apart from it."""
    groups: dict[object, list[Lanes]] = {}
    for lane in lanes:
        if len(lane.primary) >= MANY_ROWS:
            key = object()
            groups[key] = [Lanes(lane.pages, lane.start, lane.primary)]
            if not lane.aux:
                continue
            lane = Lanes(lane.pages, lane.start, range(0), lane.aux)
        rows = len(lane.primary) + len(lane.aux)
        if rows:
            pages = _last(lane) // page_size + 1
            groups.setdefault((rows, pages.bit_length()), []).append(lane)
    return list(groups.values())


def _last(lane: Lanes) -> int:
    """The last position that a row of ``lane`` has."""
    ends = [position for _, position in lane.aux]
    if lane.primary:
        ends.append(lane.start + len(lane.primary) - 1)
    return max(ends)


def _group(
    members: list[Lanes], page_size: int, num_primary: int, device: torch.device, own_keys: bool
) -> tuple[Group, list[int]]:
    num_keys = max(map(_last, members)) + 1
    num_pages = -(-num_keys // page_size)
    table, rows, positions = [], [], []
    for lane in members:
        pages = list(lane.pages[:num_pages])
        table.append(pages + pages[:1] * (num_pages - len(pages)))
        rows.append([*lane.primary, *(row for row, _ in lane.aux)])
        steps = range(lane.start, lane.start + len(lane.primary))
        positions.append([*steps, *(position for _, position in lane.aux)])
    flat = [row for lane_rows in rows for row in lane_rows]
    group = Group(
        torch.tensor(rows, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(table, dtype=torch.long, device=device),
        num_keys,
        None,
    )
    alone = len(members) == 1
    has_own = own_keys and any(lane.aux for lane in members)
    if alone and not members[0].aux and members[0].start == 0:
        return replace(group, causal=True), flat
    if alone and not has_own and min(positions[0]) == num_keys - 1:
        return group, flat
    keys = torch.arange(num_keys, device=device)
    group = replace(group, mask_BRS=EVERYTHING.within(group.positions_BR[..., None], keys))
    return (_with_own(group, num_primary) if has_own else group), flat


def _with_own(group: Group, num_primary: int) -> Group:
    """``group`` with a private key behind the cached ones for each of its auxiliary rows."""
    # Rows of a group are alike in number, not in kind: a primary row's column is nobody's.
    is_aux_BR = group.rows_BR >= num_primary
    own_BC = (group.rows_BR - num_primary).clamp_min(0)
    eye_RC = torch.eye(own_BC.shape[1], dtype=torch.bool, device=own_BC.device)
    return replace(group, own_BC=own_BC, sees_own_BRC=eye_RC & is_aux_BR[:, None, :])
