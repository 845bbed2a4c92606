"""A call of the contract as dense attention over one sequence after another, for libraries that know no page pool.

Nothing of attention itself is done here: the live keys of a sequence are gathered from its pages, the mask is stated in numbers,
and rows that see no key, about which libraries differ, are answered as the contract says and not sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from oracle.contract import Answer, Call

NO_LIMIT = 2**30  # a window bound that no sequence reaches and that int32 sums survive


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """One sequence: row i sits at position `pos + i` and sees keys from `left` before it to `right` after it, both included.

    Shapes: q (rows, q_heads, head_dim), k (keys, kv_heads, head_dim), v (keys, kv_heads, head_dim_v), contiguous.  The last row
    sits at the last key, and every row sees at least one key.
    """

    call: Call
    q: Tensor
    k: Tensor
    v: Tensor
    left: int  # NO_LIMIT where the window has no limit
    right: int

    @property
    def pos(self) -> int:
        """The position of the first row, counted from the first key given."""
        return self.k.shape[0] - self.q.shape[0]

    @property
    def causal(self) -> bool:
        """A row sees all keys up to its own position, and no others."""
        return self.right == 0 and self.left >= self.k.shape[0] - 1

    @property
    def full(self) -> bool:
        """Every row sees all keys."""
        return self.k.shape[0] - 1 <= min(self.left, self.pos + self.right)

    def mask(self) -> Tensor:
        """Which key each row sees: (rows, keys), bool."""
        rows, keys = self.q.shape[0], self.k.shape[0]
        key, row = (torch.arange(n, dtype=torch.int32, device=self.q.device) for n in (keys, rows))
        ahead = key - (row[:, None] + self.pos)
        return (ahead >= -self.left) & (ahead <= self.right)

    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as (1, heads, length, dim), contiguous."""
        q, k, v = (x.transpose(0, 1).contiguous()[None] for x in (self.q, self.k, self.v))
        return q, k, v


# Answers one sequence: out (rows, q_heads, head_dim_v), and where it is wanted the natural LSE (rows, q_heads), else None.
Attend = Callable[[Dense], tuple[Tensor, Tensor | None]]


def by_sequence(call: Call, attend: Attend, *, return_lse: bool = False, whole: bool = False) -> Answer:
    """The answers of `attend` to every live sequence of `call`, written to its `out` where there is one.

    It is given the keys that some row sees, or with `whole` all of them, for a library that has windows of its own.  What no
    row sees, and rows that see no key, are not given.
    """
    out = call.q.new_empty(*call.q.shape[:2], call.v_cache.shape[3]) if call.out is None else call.out
    lse = call.q.new_empty(call.q.shape[:2], dtype=torch.float32) if return_lse else None
    offsets = call.cu_seqlens_q[: call.live_seqs + 1].tolist()
    left, right = (NO_LIMIT if limit < 0 else min(limit, NO_LIMIT) for limit in call.window_size)
    if call.causal:
        right = 0
    for seq, kv_len in enumerate(call.seqused_k[: call.live_seqs].tolist()):
        begin, end = offsets[seq], offsets[seq + 1]
        first = end if kv_len == 0 else min(end, max(begin, end - kv_len - right))
        out[begin:first] = 0
        if lse is not None:
            lse[begin:first] = -inf if call.sinks is None else call.sinks
        if first == end:
            continue
        lowest = 0 if whole else max(0, kv_len - (end - first) - left)
        k, v = (gather(cache, call.page_table[seq], lowest, kv_len) for cache in (call.k_cache, call.v_cache))
        answer, row_lse = attend(Dense(call=call, q=call.q[first:end].contiguous(), k=k, v=v, left=left, right=right))
        out[first:end] = answer
        if lse is not None and row_lse is not None:
            lse[first:end] = row_lse
    return out if lse is None else (out, lse)


def gather(cache: Tensor, pages: Tensor, start: int, stop: int) -> Tensor:
    """Tokens start..stop-1 of the sequence that lies in `pages`, contiguous: (stop - start, kv_heads, dim)."""
    size = cache.shape[1]
    first = start // size
    return cache[pages[first : -(-stop // size)].long()].flatten(0, 1)[start - first * size : stop - first * size].contiguous()
