"""Faults of the result that read what they must not: slots past the plan, rows of q past the plan, masked keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oracle.contract import Call
from oracle.mutants.addressing import wrapped
from oracle.mutants.mutant import After, Result, Run
from oracle.references.plan import RowPlan, head_scales

# What lies past the plan


def slots(call: Call, cache: Tensor, seq: int, start: int, stop: int) -> Tensor:
    """Slots start..stop-1 of a sequence, past its keys too: (stop - start, kv_heads, dim) float32, ids wrapped to the pool."""
    size = cache.shape[1]
    index = torch.arange(start, min(stop, call.page_table.shape[1] * size))
    pages = wrapped(call.page_table[seq], call)[index // size]
    return cache[pages, index % size].float()


def tail_times_zero(name: str, block: int = 0) -> After:
    """0 x what lies past the last key, up to the end of its block (0: of its page), is added to rows that end in that block.

    Of the K cache it stands for an additive mask: the score is lost, and with it the LSE.
    """

    def after(run: Run, plan: RowPlan, out: Tensor, lse: Tensor) -> Result:
        call, cache = run.call, getattr(run.call, name)
        out, lse = out.clone(), lse.clone()
        group = call.q.shape[1] // cache.shape[2]
        size = block or cache.shape[1]
        for seq in sorted(set(plan.seq.tolist())):
            keys = int(call.seqused_k[seq])
            rows = (plan.seq == seq) & (plan.hi > plan.lo) & (plan.hi > (keys - 1) // size * size)
            if keys % size and bool(rows.any()):
                poison = (slots(call, cache, seq, keys, -(-keys // size) * size) * 0).sum(0).repeat_interleave(group, 0)
                if name == "k_cache":
                    poison = poison.sum(-1, keepdim=True)
                    lse[rows] += poison[..., 0]
                out[rows] += poison.to(out.dtype)
        return out, lse

    return after


def tail_leaks(weight: float) -> After:
    """The first slot past the last key enters with a small weight, where it is finite."""

    def after(run: Run, plan: RowPlan, out: Tensor, lse: Tensor) -> Result:
        out, call = out.float(), run.call
        group = call.q.shape[1] // call.v_cache.shape[2]
        for seq in sorted(set(plan.seq.tolist())):
            keys = int(call.seqused_k[seq])
            if keys % call.v_cache.shape[1]:
                found = slots(call, call.v_cache, seq, keys, keys + 1)[0].repeat_interleave(group, 0)
                out[plan.seq == seq] += weight * torch.where(found.isfinite(), found, 0.0).clamp(-1e4, 1e4)
        return out.to(run.call.q.dtype), lse

    return after


def tail_raises_maximum(run: Run, plan: RowPlan, out: Tensor, lse: Tensor) -> Result:
    """The slot past the last key joins the running maximum, NaN left aside: where it is far above, every weight underflows."""
    call = run.call
    kv_heads = call.k_cache.shape[2]
    scale = head_scales(call.q_scale, call.live_seqs, kv_heads) * head_scales(call.k_scale, call.live_seqs, kv_heads)
    scale = (scale * call.softmax_scale).float()
    out, lse = out.clone(), lse.clone()
    for i, (row, seq) in enumerate(zip(plan.row.tolist(), plan.seq.tolist(), strict=True)):
        keys = int(call.seqused_k[seq])
        if keys % call.k_cache.shape[1]:
            k = slots(call, call.k_cache, seq, keys, keys + 1)[0]
            q = call.q[row].float().view(kv_heads, -1, call.q.shape[2])
            score = ((q * k[:, None]).sum(-1) * scale[seq][:, None]).flatten()
            out[i][score > lse[i] + 110] = math.nan
    return out, lse


def q_tail_times_zero(tile: int) -> After:
    """0 x the rows of q past the plan is added to the live rows of the last tile."""

    def after(run: Run, plan: RowPlan, out: Tensor, lse: Tensor) -> Result:
        live = len(run.plan)
        poison = (run.call.q[live : -(-live // tile) * tile].float() * 0).sum()
        last = plan.row >= live // tile * tile
        return torch.where(last[:, None, None], out + poison, out).to(out.dtype), torch.where(last[:, None], lse + poison, lse)

    return after


def slot_zero_times_zero(run: Run, plan: RowPlan, out: Tensor, lse: Tensor) -> Result:
    """Masked lanes gather slot 0 of page 0, whoever owns it: 0 x its V is added."""
    call = run.call
    group = call.q.shape[1] // call.v_cache.shape[2]
    return out + (call.v_cache[0, 0].float() * 0).repeat_interleave(group, 0).to(out.dtype), lse


# Masked keys that keep a weight


def masked_keys_weigh(score: Callable[[Call], float]) -> After:
    """Keys of the sequence that the row must not see take part with the score of a sentinel."""

    def after(run: Run, plan: RowPlan, out: Tensor, lse: Tensor) -> Result:
        call, out = run.call, out.float()
        group = call.q.shape[1] // call.v_cache.shape[2]
        scale = head_scales(call.v_scale, call.live_seqs, call.v_cache.shape[2]).float()
        for i, (seq, hi) in enumerate(zip(plan.seq.tolist(), plan.hi.tolist(), strict=True)):
            keys = int(call.seqused_k[seq])
            if keys > hi:
                values = (slots(call, call.v_cache, seq, hi, keys).mean(0) * scale[seq][:, None]).repeat_interleave(group, 0)
                extra = torch.tensor(score(call) + math.log(keys - hi))
                total = torch.logaddexp(lse[i], extra)
                share = (extra - total).exp()[:, None]
                out[i] = out[i] * (1 - share) + values * share
                lse = torch.where((torch.arange(len(lse)) == i)[:, None], total, lse)
        return out.to(call.q.dtype), lse

    return after


def mean_value(run: Run, plan: RowPlan, out: Tensor, lse: Tensor) -> Result:
    """The plain mean of the sequence's values, as exp(-inf - -inf) taken for 1 gives; 0 where it has none."""
    call, out = run.call, out.clone()
    group = call.q.shape[1] // call.v_cache.shape[2]
    for i, seq in enumerate(plan.seq.tolist()):
        keys = int(call.seqused_k[seq])
        if keys:
            out[i] = slots(call, call.v_cache, seq, 0, keys).mean(0).repeat_interleave(group, 0).to(out.dtype)
    return out, lse


def constant_values(run: Run, plan: RowPlan, out: Tensor, lse: Tensor) -> Result:
    """NaN where all of a token's values are equal, as a quantisation by their spread gives."""
    constant = (out.amax(-1) == out.amin(-1)) & (out.amax(-1) != 0)
    return out.masked_fill(constant[..., None], math.nan), lse
