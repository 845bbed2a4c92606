"""Reading a call's plan: which keys each query row sees, and where they lie in the page pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.contract import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """For each of R query rows, the half-open range of keys that it sees.  All (R,) int64 on the CPU."""

    row: Tensor  # index into the packed queries
    seq: Tensor  # sequence that the row belongs to
    pos: Tensor  # position of the query in its sequence; negative where q_len > kv_len
    lo: Tensor  # first visible key
    hi: Tensor  # one past the last visible key; hi == lo where the row sees nothing

    def __len__(self) -> int:
        return self.row.shape[0]

    def take(self, index: Tensor) -> RowPlan:
        """The rows at `index` (int64 or bool), in that order."""
        return RowPlan(row=self.row[index], seq=self.seq[index], pos=self.pos[index], lo=self.lo[index], hi=self.hi[index])


def live_rows(call: Call) -> Tensor:
    """Packed indices of all query rows that the plan declares live, (R,) int64."""
    return torch.arange(int(call.cu_seqlens_q[call.live_seqs]), dtype=torch.int64)


def row_plan(call: Call, rows: Tensor) -> RowPlan:
    """The plan of the packed query rows `rows` (R,) int64.

    Query i of a sequence sits at position `seqused_k - q_len + i`, causal or not (bottom-right alignment).  It sees keys up
    to there when causal, and keys from `pos - left` to `pos + right` under a window, both included.
    """
    cu = call.cu_seqlens_q[: call.live_seqs + 1].cpu().long()
    kv_len = call.seqused_k[: call.live_seqs].cpu().long()
    rows = rows.cpu().long()
    seq = torch.searchsorted(cu, rows, right=True) - 1
    q_len = cu[1:] - cu[:-1]
    pos = kv_len[seq] - q_len[seq] + rows - cu[seq]
    lo, hi = visible(pos, kv_len[seq], causal=call.causal, window=call.window_size)
    return RowPlan(row=rows, seq=seq, pos=pos, lo=lo, hi=hi)


def visible(pos: Tensor, kv_len: Tensor, *, causal: bool, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The keys [lo, hi) that queries at `pos` see in sequences of `kv_len` keys; int64 of the same shape, hi >= lo >= 0."""
    lo, hi = torch.zeros_like(pos), kv_len.clone()
    left, right = window
    if causal:
        hi = torch.minimum(hi, pos + 1)
    if right >= 0:
        hi = torch.minimum(hi, pos + right + 1)
    if left >= 0:
        lo = torch.maximum(lo, pos - left)
    return lo, torch.maximum(hi, lo)


def tokens(call: Call, cache: Tensor, seq: int, start: int, stop: int) -> Tensor:
    """Tokens start..stop-1 of sequence `seq`, gathered from the page pool: (stop - start, kv_heads, dim), dtype of the cache."""
    page_size = cache.shape[1]
    index = torch.arange(start, stop, device=cache.device)
    pages = call.page_table[seq].to(cache.device).long()[index // page_size]
    return cache[pages, index % page_size]


def head_scales(scale: Tensor | float | None, seqs: int, kv_heads: int) -> Tensor:
    """A dequantisation scale of the contract as (seqs, kv_heads) float64 on the CPU; ones where there is none."""
    if scale is None:
        return torch.ones(seqs, kv_heads, dtype=torch.float64)
    values = torch.as_tensor(scale, dtype=torch.float64).cpu()
    if values.dim() == 2:
        values = values[:seqs]
    return values.expand(seqs, kv_heads)
