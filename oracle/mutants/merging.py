"""Faults of splitting the keys: bodies that compute ranges of the keys apart, in fp32, and merge them wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from oracle.contract import Call
from oracle.mutants.mutant import Body, Result
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import emulate
from oracle.references.plan import RowPlan
from oracle.references.tiles import output_dtype

Partials = tuple[Tensor, Tensor]  # out (splits, R, q_heads, head_dim_v) and lse (splits, R, q_heads), float32


class Ranges(Protocol):
    """The keys [lo, hi) of split `part` of sequences of `kv_len` keys, (R,) int64 each."""

    def __call__(self, kv_len: Tensor, part: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """How the keys are split: `parts` ranges of whole blocks of `block` keys."""

    parts: int = 3
    block: int = 16

    def of(self, kv_len: Tensor, part: int) -> tuple[Tensor, Tensor]:
        """First key and one past the last of the split, (R,) int64 each."""
        size = -(-kv_len // (self.parts * self.block)) * self.block
        return part * size, torch.minimum((part + 1) * size, kv_len)


def merged_by(rule: Callable[[Partials, Call], Result], splits: Splits = Splits(), ranges: Ranges | None = None) -> Body:
    """Partial results over ranges of the keys, merged by a rule; the sink, if any, is the last partial result."""
    range_of = ranges or splits.of

    def body(call: Call, arithmetic: Arithmetic, rows: Tensor) -> Result:
        parts = [_part(call, arithmetic, rows, partial(range_of, part=i)) for i in range(splits.parts)]
        out, lse = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
        if call.sinks is not None:
            out = torch.cat([out, torch.zeros_like(out[:1])])
            lse = torch.cat([lse, call.sinks.expand_as(lse[:1])])
        merged, total = rule((out, lse), call)
        return merged.to(output_dtype(call)), total

    return body


def _part(call: Call, arithmetic: Arithmetic, rows: Tensor, keys: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Result:
    inner = arithmetic.planted.mask

    def mask(of: Call, plan: RowPlan) -> RowPlan:
        plan = plan if inner is None else inner(of, plan)
        start, end = keys(of.seqused_k.long()[plan.seq])
        lo = torch.maximum(plan.lo, start)
        return replace(plan, lo=lo, hi=torch.maximum(torch.minimum(plan.hi, end), lo))

    own = replace(arithmetic, planted=replace(arithmetic.planted, mask=mask))
    return emulate(replace(call, q=call.q.float(), sinks=None), own, rows)


def by_weights(lse: Tensor, out: Tensor) -> Result:
    """The correct merge: weights exp(lse - max); 0 and -inf where no partial result has a key."""
    top = lse.amax(0).clamp(min=torch.finfo(torch.float32).min)
    weights = (lse - top).exp()
    total = weights.sum(0)
    merged = (out.nan_to_num(0.0) * weights[..., None]).sum(0) / total.clamp(min=1e-30)[..., None]
    return merged, torch.where(total > 0, top + total.log(), -math.inf)


def correct(partials: Partials, call: Call) -> Result:
    """What every rule here should have been."""
    return by_weights(partials[1], partials[0])


def base_mixed(factor: float) -> Callable[[Partials, Call], Result]:
    """LSEs of one base taken for another: weights exp(factor x lse)."""

    def rule(partials: Partials, call: Call) -> Result:
        out, lse = by_weights(partials[1] * factor, partials[0])
        return out, lse / factor

    return rule


def without_guard(partials: Partials, call: Call) -> Result:
    """-inf minus -inf where all partial results are empty."""
    out, lse = partials
    top = lse.amax(0)
    weights = (lse - top).exp()
    return (out * weights[..., None]).sum(0) / weights.sum(0)[..., None], top + weights.sum(0).log()


def nan_from_empty(partials: Partials, call: Call) -> Result:
    """A running merge that starts from an empty partial result: -inf minus -inf, which no later one mends."""
    out, lse = correct(partials, call)
    started_empty = torch.isinf(partials[1][0]) & torch.isfinite(lse)
    return out.masked_fill(started_empty[..., None], math.nan), lse.masked_fill(started_empty, math.nan)


def empty_is_plus_inf(partials: Partials, call: Call) -> Result:
    """An empty partial result with LSE +inf takes all the weight."""
    out, lse = correct(partials, call)
    some_empty = torch.isinf(partials[1]).any(0) & torch.isfinite(lse)
    return out.masked_fill(some_empty[..., None], 0.0), lse.masked_fill(some_empty, math.inf)


def last_part_lost(partials: Partials, call: Call) -> Result:
    """The last range of keys is left out of the merge."""
    out, lse = partials
    last = -2 if call.sinks is not None else -1
    keep = torch.arange(len(lse)) != len(lse) + last
    return by_weights(lse[keep], out[keep])


def equal_weights(partials: Partials, call: Call) -> Result:
    """Partial results averaged by their number of keys' mass only in the LSE."""
    out, lse = partials
    some = torch.isfinite(lse).sum(0).clamp(min=1)
    return out.sum(0) / some[..., None], by_weights(lse, out)[1]


def rounded_parts(dtype: torch.dtype) -> Callable[[Partials, Call], Result]:
    """Partial results kept in 16 bits until they are merged."""
    return lambda partials, call: by_weights(partials[1], partials[0].to(dtype).float())


def rounded_lse(dtype: torch.dtype) -> Callable[[Partials, Call], Result]:
    """The partial results' LSEs kept in 16 bits until they are merged."""
    return lambda partials, call: by_weights(partials[1].to(dtype).float(), partials[0])


def other_rows_weights(partials: Partials, call: Call) -> Result:
    """The weights of the row before, as from an index padded to another length."""
    out, lse = partials
    return by_weights(lse.roll(1, 1), out)[0], by_weights(lse, out)[1]


def sink_in_each(partials: Partials, call: Call) -> Result:
    """The sink joins each range of keys as well as the merge."""
    out, lse = partials
    if call.sinks is None:
        return by_weights(lse, out)
    keys = lse[:-1]
    return by_weights(torch.cat([lse, lse[-1:].where(torch.isfinite(keys).any(0), -math.inf)]), torch.cat([out, out[-1:]]))


def gap(missing: int) -> Ranges:
    """Ranges of Splits() that overlap by -missing keys, or leave so many out between them."""

    def ranges(kv_len: Tensor, part: int) -> tuple[Tensor, Tensor]:
        lo, hi = Splits().of(kv_len, part)
        return (lo + missing if part else lo).clamp(min=0), hi

    return ranges


def chunks_of_longest(size: int) -> Ranges:
    """Two ranges whose border is that of the longest sequence of the batch: shorter ones lose the keys of the second."""

    def ranges(kv_len: Tensor, part: int) -> tuple[Tensor, Tensor]:
        border = -(-kv_len.amax() // (2 * size)) * size if len(kv_len) else torch.tensor(size)
        if part == 0:
            return torch.zeros_like(kv_len), torch.minimum(kv_len, border)
        return border.expand_as(kv_len), torch.where(kv_len > 2 * border - size, kv_len, 0)

    return ranges
