"""Which rows run the tile loop together: many short Python loops become a few long tensor operations.

The schedule shows only in the time that the emulator takes: a row meets the same tiles of keys in any company.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.references.plan import RowPlan

_PADDING = 1.5  # padded work over wanted work that a batch may cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """G blocks of up to R rows.  The rows of a block share a sequence, a split and a range of tiles.  int64, on the CPU."""

    seq: Tensor  # (G,)
    split: Tensor  # (G,)
    first: Tensor  # (G,) first tile; tile t holds the keys from t * tile on
    tiles: int  # of the longest block
    row: Tensor  # (G, R) index into the plan
    lo: Tensor  # (G, R) first key of the row in this split
    hi: Tensor  # (G, R) one past the last; 0 where padded
    live: Tensor  # (G, R) bool, False where padded


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a batch may take, in elements of the largest tensors alive at once."""

    per_row: int  # for each row and tile
    per_block: int  # for each block and tile
    limit: int
    rows: int  # most rows in a block

    def of(self, blocks: int, rows: int, tiles: int) -> int:
        """Elements of `blocks` blocks of `rows` rows and `tiles` tiles."""
        return blocks * tiles * (rows * self.per_row + self.per_block)


def batches(plan: RowPlan, kv_len: Tensor, *, tile: int, splits: int, cost: Cost) -> Iterator[Batch]:
    """Batches that cover every key of every row of the plan once.  kv_len (sequences,) int64.

    A split is a range of `ceil(kv_len / splits)` keys of the sequence, rounded up to whole tiles.
    """
    length = (-(-kv_len // (splits * tile)) * tile)[plan.seq]
    split = torch.arange(splits)[:, None].expand(splits, len(plan))
    lo, hi = torch.maximum(plan.lo, split * length), torch.minimum(plan.hi, (split + 1) * length)
    split, row = torch.nonzero(hi > lo, as_tuple=True)
    if len(row) == 0:
        return
    lo, hi = lo[split, row], hi[split, row]
    first, end = lo // tile, -(-hi // tile)

    block = _blocks(plan.seq[row] * splits + split, first, end, cost.rows)
    order = torch.argsort(block, stable=True)
    split, row, lo, hi, first, end, block = (x[order] for x in (split, row, lo, hi, first, end, block))
    rows = torch.bincount(block)
    start = rows.cumsum(0) - rows
    first = torch.zeros_like(rows).scatter_reduce(0, block, first, "amin", include_self=False)
    tiles = torch.zeros_like(rows).scatter_reduce(0, block, end, "amax", include_self=False) - first

    for members in _packed(rows.tolist(), tiles.tolist(), cost):
        member = torch.tensor(members)
        lane = torch.arange(int(rows[member].max()))
        live = lane < rows[member, None]
        at = torch.where(live, start[member, None] + lane, start[member, None])
        yield Batch(
            seq=plan.seq[row[start[member]]],
            split=split[start[member]],
            first=first[member],
            tiles=int(tiles[member].max()),
            row=row[at],
            lo=lo[at],
            hi=torch.where(live, hi[at], 0),
            live=live,
        )


def _blocks(owner: Tensor, first: Tensor, end: Tensor, rows: int) -> Tensor:
    """The block of each row: of one owner, at most `rows` rows, and no range of tiles above twice the row's own."""
    octave = torch.floor(2 * torch.log2((end - first).double()))
    step = (torch.exp2(octave / 2) / 2).long().clamp(min=1)
    # fewer than 2^24 tiles, and so fewer than 2^6 half octaves
    key = (((owner << 6) + octave.long()) << 24) + end // step
    _, group, size = torch.unique(key, return_inverse=True, return_counts=True)
    order = torch.argsort(group, stable=True)
    rank = torch.empty_like(group)
    rank[order] = torch.arange(len(group)) - (size.cumsum(0) - size)[group[order]]
    block: Tensor = torch.unique((group << 32) + rank // rows, return_inverse=True)[1]
    return block


def _packed(rows: list[int], tiles: list[int], cost: Cost) -> Iterator[list[int]]:
    """Blocks by the batch: of similar shape, within the limit unless a single block exceeds it."""
    members: list[int] = []
    widest = longest = wanted = 0
    for block in sorted(range(len(rows)), key=lambda b: (rows[b].bit_length(), tiles[b]), reverse=True):
        own = cost.of(1, rows[block], tiles[block])
        padded = cost.of(len(members) + 1, max(widest, rows[block]), max(longest, tiles[block]))
        if members and (padded > cost.limit or padded > _PADDING * (wanted + own)):
            yield members
            members, widest, longest, wanted = [], 0, 0, 0
        members.append(block)
        widest, longest, wanted = max(widest, rows[block]), max(longest, tiles[block]), wanted + own
    yield members
