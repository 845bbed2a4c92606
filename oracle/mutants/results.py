"""Faults of the result: what a kernel makes of its sums.  Each is a patch of the result of the faulty rows, or makes one."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oracle.contract import Call
from oracle.mutants.mutant import After, Result, Run
from oracle.mutants.tails import slots
from oracle.references.plan import RowPlan, head_scales

LN2 = math.log(2.0)


def out_is(rule: Callable[[Tensor], Tensor]) -> After:
    """Another output (R, q_heads, head_dim_v), the same LSE."""
    return lambda run, plan, out, lse: (rule(out), lse)


def lse_is(rule: Callable[[Tensor], Tensor]) -> After:
    """Another LSE (R, q_heads), the same output."""
    return lambda run, plan, out, lse: (out, rule(lse))


def constants(out_value: float, lse_value: float) -> After:
    """One value for the output and one for the LSE."""
    return lambda run, plan, out, lse: (torch.full_like(out, out_value), torch.full_like(lse, lse_value))


def where_lse(
    predicate: Callable[[Tensor, Run], Tensor], out_value: float | None, lse_value: Callable[[Tensor, Run], Tensor] | None = None
) -> After:
    """At the pairs whose LSE the predicate holds of: that output, and that LSE; None keeps what is there."""

    def after(run: Run, plan: RowPlan, out: Tensor, lse: Tensor) -> Result:
        hit = predicate(lse, run)
        if out_value is not None:
            out = out.masked_fill(hit[..., None], out_value)
        return out, lse if lse_value is None else torch.where(hit, lse_value(lse, run), lse)

    return after


def _mass(call: Call, plan: RowPlan, lse: Tensor) -> Tensor:
    """The row sum of each row and head before it is normalised, sum(exp(logit - largest)), (R, q_heads) float32."""
    kv_heads = call.k_cache.shape[2]
    scale = head_scales(call.q_scale, call.live_seqs, kv_heads) * head_scales(call.k_scale, call.live_seqs, kv_heads)
    largest = torch.zeros_like(lse)
    for i, (row, seq, lo, hi) in enumerate(zip(*(x.tolist() for x in (plan.row, plan.seq, plan.lo, plan.hi)), strict=True)):
        q = call.q[row].float().view(kv_heads, -1, call.q.shape[2])
        scores = torch.einsum("hgd,nhd->hgn", q, slots(call, call.k_cache, seq, lo, hi))
        scores = (scores * (scale[seq][:, None, None] * call.softmax_scale).float()).amax(-1)
        largest[i] = (call.softcap * torch.tanh(scores / call.softcap) if call.softcap > 0 else scores).flatten()
    return (lse - largest).exp()


def mass_saturates(limit: float) -> After:
    """A row sum kept in 16 bits, which stops growing at `limit`."""

    def after(run: Run, plan: RowPlan, out: Tensor, lse: Tensor) -> Result:
        factor = (_mass(run.call, plan, lse) / limit).clamp(min=1.0)
        return (out.float() * factor[..., None]).to(out.dtype), lse - factor.log()

    return after


def sums_overflow(limit: float) -> After:
    """An unnormalised sum of 16 bits: inf beyond its largest number."""

    def after(run: Run, plan: RowPlan, out: Tensor, lse: Tensor) -> Result:
        over = out.float().abs() * _mass(run.call, plan, lse)[..., None] > limit
        return out.masked_fill(over, math.inf), lse

    return after


def sink_twice(of: str, parts: int = 2) -> After:
    """The sink joins the denominator once more for each further split, of "both", "out" or "lse"; with parts 0 it never does."""

    def after(run: Run, plan: RowPlan, out: Tensor, lse: Tensor) -> Result:
        if run.call.sinks is None:
            return out, lse
        sinks = run.call.sinks.expand_as(lse)
        if parts == 0:
            total = lse + torch.log1p(-(sinks - lse).exp()).clamp(min=-50.0)
        else:
            total = torch.logaddexp(lse, sinks + math.log(parts - 1))
        factor = (lse - total).exp()[..., None]
        scaled = (out.float() * factor).to(out.dtype)
        return (out if of == "lse" else scaled), (lse if of == "out" else total)

    return after


def first_result(run: Run, plan: RowPlan, out: Tensor, lse: Tensor) -> Result:
    """The rows of the first call of the same shapes, where there are as many."""
    before = run.first_of_shape
    if before is None or len(before.result[0]) <= int(plan.row.max()):
        return out, lse
    return before.result[0][plan.row], before.result[1][plan.row]
