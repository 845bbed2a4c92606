"""Which query rows are judged: the edges by name, and random rows for the unknown (docs/numerics.md, section 3.5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracle.cases import Case
from oracle.material import visible_keys
from oracle.streams import Stream

TILES = (16, 32, 64, 128)  # query rows a tile may hold; edges of all of them are listed
KEY_TILES = (32, 64, 128)


def rows_needed(share: float, confidence: float) -> int:
    """Random rows that meet a fault on `share` of all rows with the given probability: ln(1 - confidence) / ln(1 - share)."""
    return math.ceil(math.log1p(-confidence) / math.log1p(-share))


def sample_rows(case: Case, at_least: int) -> Tensor:
    """Packed indices of the rows to judge, ascending (R,) int64: every edge, then random rows up to `at_least`.

    All rows where the case has no more than that.
    """
    total = case.total_q
    if total <= at_least:
        return torch.arange(total)
    visible = visible_keys(case)
    length = visible.hi - visible.lo
    chosen = []
    start = 0
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        chosen.append(start + torch.tensor(_edges(case, q_len, kv_len), dtype=torch.int64))
        start += q_len
    few = torch.tensor(sorted({1, 2, *(t + d for t in KEY_TILES for d in (-1, 0, 1))}))
    for count in few.tolist():
        chosen.append((length == count).nonzero().flatten()[:1])
    listed = torch.zeros(total, dtype=torch.bool)
    listed[torch.cat(chosen)] = True
    others = (~listed).nonzero().flatten()
    wanted = max(0, at_least - int(listed.sum()))
    listed[others[Stream(case.seed, "rows").permutation(len(others))[:wanted]]] = True
    return listed.nonzero().flatten()


def _edges(case: Case, q_len: int, kv_len: int) -> list[int]:
    """Rows of one sequence, by index in it, that lie on some edge."""
    rows = {0, 1, q_len - 2, q_len - 1}
    for tile in TILES:
        for tokens in {tile, max(1, tile // case.family.group)}:
            middle = q_len // tokens // 2 * tokens
            last = (q_len - 1) // tokens * tokens
            rows |= {tokens - 1, tokens, middle - 1, middle, last - 1, last}
    left = case.family.window[0]
    if left >= 0:  # the window's left edge on, before and after a page edge and a key tile's edge
        first = kv_len - q_len
        for step in {case.page_size, *KEY_TILES}:
            edge = -(-(max(first - left, 0) + 1) // step) * step
            rows |= {edge + left - first + d for d in (-1, 0, 1)}
    return sorted(r for r in rows if 0 <= r < q_len)
