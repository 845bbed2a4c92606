"""Faults of the mask: which keys [lo, hi) each row sees instead of its own.

A mask is a function from a call and the plan of some rows to another plan of them; no row sees keys past its sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.contract import Call
from oracle.mutants.mutant import Mask
from oracle.references.plan import RowPlan, visible


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of a plan with what a mask is computed from; all (R,) int64."""

    plan: RowPlan
    q_len: Tensor
    kv_len: Tensor
    index: Tensor  # of the row among the new tokens of its sequence
    longest: int  # keys of the longest sequence of the batch
    page_size: int
    group: int


def _rows(call: Call, plan: RowPlan) -> Rows:
    cu, keys = call.cu_seqlens_q.long(), call.seqused_k[: call.live_seqs].long()
    q_len = (cu[1:] - cu[:-1])[plan.seq]
    return Rows(
        plan=plan,
        q_len=q_len,
        kv_len=keys[plan.seq],
        index=plan.row - cu[plan.seq],
        longest=int(keys.max()) if len(keys) else 0,
        page_size=call.k_cache.shape[1],
        group=call.q.shape[1] // call.k_cache.shape[2],
    )


def positions(rule: Callable[[Rows], Tensor]) -> Mask:
    """Rows at other positions: causal rule and window follow from those."""

    def mask(call: Call, plan: RowPlan) -> RowPlan:
        r = _rows(call, plan)
        pos = rule(r)
        lo, hi = visible(pos, r.kv_len, causal=call.causal, window=call.window_size)
        return replace(plan, pos=pos, lo=torch.minimum(lo, hi), hi=hi)

    return mask


def first_keys(rule: Callable[[Rows], Tensor]) -> Mask:
    """Rows that see keys from elsewhere on, up to where they should."""

    def mask(call: Call, plan: RowPlan) -> RowPlan:
        return replace(plan, lo=torch.minimum(rule(_rows(call, plan)).clamp(min=0), plan.hi))

    return mask


def window_starts(rule: Callable[[Rows, int], Tensor]) -> Mask:
    """Under a window, rows that see keys from elsewhere on; the rule gets the window's left side."""

    def mask(call: Call, plan: RowPlan) -> RowPlan:
        left = call.window_size[0]
        return plan if left < 0 else first_keys(lambda r: rule(r, left))(call, plan)

    return mask


def last_keys(rule: Callable[[Rows], Tensor]) -> Mask:
    """Rows that see keys up to elsewhere (one past the last), from where they should."""

    def mask(call: Call, plan: RowPlan) -> RowPlan:
        r = _rows(call, plan)
        return replace(plan, hi=torch.maximum(torch.minimum(rule(r), r.kv_len), plan.lo))

    return mask


def causal_ends(rule: Callable[[Rows], Tensor]) -> Mask:
    """Where causal, rows that see keys up to elsewhere (one past the last)."""

    def mask(call: Call, plan: RowPlan) -> RowPlan:
        return last_keys(rule)(call, plan) if call.causal else plan

    return mask


def down_to(size: int) -> Callable[[Rows], Tensor]:
    """The first key moved to the start of its block of `size` keys."""
    return lambda r: r.plan.lo // size * size
