"""Where a row of a case lies: its sequence and position, and which edges of tiles, pages, windows and splits it is on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from oracle.cases import Case
from oracle.material import offsets, visible_keys

TILES = (16, 32, 64, 128)  # rows or keys of one tile
SPLITS = 4  # a kernel that splits the keys among blocks most often makes so many parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A live query row of a case."""

    row: int  # packed
    sequence: int
    query: int  # in its sequence
    q_len: int
    kv_len: int
    position: int  # kv_len - q_len + query; negative where there are more queries than keys
    first: int  # the keys that it sees, first to last - 1, in its sequence
    last: int

    @property
    def keys(self) -> int:
        """Keys that the row sees."""
        return self.last - self.first


def place(case: Case, row: int) -> Place:
    """Where the packed query row lies."""
    starts = offsets(case.q_lens)
    sequence = int(torch.searchsorted(starts, row, right=True)) - 1
    query, q_len, kv_len = row - int(starts[sequence]), case.q_lens[sequence], case.kv_lens[sequence]
    visible, start = visible_keys(case), int(offsets(case.kv_lens)[sequence])
    first, last = int(visible.lo[row]) - start, int(visible.hi[row]) - start
    return Place(
        row=row,
        sequence=sequence,
        query=query,
        q_len=q_len,
        kv_len=kv_len,
        position=kv_len - q_len + query,
        first=first,
        last=max(first, last),
    )


def edges(case: Case, at: Place) -> tuple[str, ...]:
    """The edges that the row lies on or beside, in words, the rarest kind first; () where it lies on none."""
    return (*_keys(at), *_window(case, at), *_page(case, at), *_splits(at), *_tiles(at))


def _keys(at: Place) -> Iterator[str]:
    if at.keys == 0:
        yield f"sees no key{' (more queries than keys)' if at.position < 0 else ''}"
        return
    if at.keys == 1:
        yield f"sees one key, key {at.first}"
    if at.last == at.kv_len:
        yield f"sees the last key, key {at.kv_len - 1}"
    if at.last == at.position + 1 < at.kv_len:
        yield f"the diagonal: the keys after {at.position} are hidden from it"


def _window(case: Case, at: Place) -> Iterator[str]:
    left, right = case.family.window
    if left >= 0 and at.keys and at.position - left in (at.first, at.first - 1):
        hidden = f"; {at.first} keys before it are hidden" if at.first else "; it reaches exactly the first key"
        yield f"the window's left edge is key {at.first}{hidden if at.position - left >= 0 else ', one before the first'}"
    if right >= 0 and at.keys and at.position + right == at.last - 1:
        yield f"the window's right edge is key {at.last - 1}"


def _page(case: Case, at: Place) -> Iterator[str]:
    size = case.page_size
    if not at.keys:
        return
    if at.first and at.first % size in (0, size - 1):
        yield f"its first key is the {'first' if at.first % size == 0 else 'last'} of page {at.first // size}"
    page, slot = divmod(at.last - 1, size)
    if slot == size - 1:
        yield f"its keys end with page {page}" + (", the last page, which is full" if at.last == at.kv_len else "")
    elif slot == 0 and page > 0:
        yield f"one key reaches into page {page}"


def _splits(at: Place) -> Iterator[str]:
    if at.kv_len < SPLITS:
        return
    for part in range(1, SPLITS):
        cut = -(-at.kv_len * part // SPLITS)
        if at.last in (cut, cut + 1):
            yield f"its keys end {'at' if at.last == cut else 'one past'} {part}/{SPLITS} of the sequence's"


def _tiles(at: Place) -> Iterator[str]:
    """Edges of query tiles, counted from the sequence's first row, and of key tiles, counted from its first key."""
    if at.q_len > 1:
        first = [tile for tile in TILES if at.query and at.query % tile == 0]
        last = [tile for tile in TILES if at.query % tile == tile - 1]
        if first:
            yield f"the first row of a query tile of {_either(first)}"
        if last:
            yield f"the last row of a query tile of {_either(last)}"
    for word, remainder in (("fill whole", 0), ("reach one into the next", 1), ("lack one of filling whole", -1)):
        met = [tile for tile in TILES if at.last >= tile - 1 and (at.last - remainder) % tile == 0 and at.last - remainder]
        if met:
            yield f"its keys {word} tiles of {_either(met)}"


def _either(numbers: list[int]) -> str:
    return " and ".join([", ".join(map(str, numbers[:-1])), str(numbers[-1])]) if len(numbers) > 1 else str(numbers[0])
