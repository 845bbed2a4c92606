"""An emulator of kernels' arithmetic: a correct flash kernel with its knobs, and the body that planted faults are made from.

A kernel like any other: paged, tiled, one pass over the keys with an online softmax.  The knobs are those of
`oracle.references.arithmetic`, the rounding that of `oracle.references.operations`.

A row has the same bits alone, among any other rows, and on any machine: matrix products of 8 and 16-bit operands are exact
before they are rounded.  Where float64 itself rounds (float32 operands, exp2, tanh, log) another order of adding or another
library would show with a probability of about 2^-29 a number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.contract import Answer, Call, DeclaredKernel, Record, contract_kernel
from oracle.references.arithmetic import Arithmetic, precision_of
from oracle.references.operands import mean_keys, queries
from oracle.references.plan import RowPlan, head_scales, live_rows, row_plan
from oracle.references.schedule import Cost, batches
from oracle.references.tiles import coefficients, output_dtype, tile_loop

_LIMIT = 1 << 19  # elements of a batch's largest tensors, 4 MiB each: what stays in the cache and in malloc's free lists
_ROWS = 256  # most rows of a matrix product


def emulate(call: Call, arithmetic: Arithmetic, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The output and the LSE of the packed query rows `rows` (R,) int64, by default of all live rows.

    Shapes: out (R, q_heads, head_dim_v) in the dtype of q, bf16 for 8-bit q; lse (R, q_heads) float32, natural log.
    """
    planted = arithmetic.planted
    plan = _shifted(call, row_plan(call, live_rows(call) if rows is None else rows), arithmetic)
    kv_heads = call.k_cache.shape[2]
    group = call.q.shape[1] // kv_heads
    out, lse = _merged(call, arithmetic, plan, *_partials(call, arithmetic, plan))
    if call.v_scale is not None:
        scale = head_scales(call.v_scale, call.live_seqs, kv_heads)[plan.seq].repeat_interleave(group, 1)
        out = out * scale[..., None].to(out.device, torch.float32)
    if planted.nan_lane:
        masked_lane = (plan.hi > plan.lo) & (plan.hi % arithmetic.tile != 0)
        out[masked_lane.to(out.device), :group, 0] = math.nan
    if planted.zero_output:
        out = torch.zeros_like(out)
    out = out.to(output_dtype(call))
    if planted.wrong_head and kv_heads > 1:
        out[:, -1:], lse[:, -1:] = emulate(_last_head_on_first_keys(call), arithmetic, plan.row)
    return out, lse


def _shifted(call: Call, plan: RowPlan, arithmetic: Arithmetic) -> RowPlan:
    """The plan, but for the planted shifts of its masks."""
    planted = arithmetic.planted
    if planted.mask is not None:
        plan = planted.mask(call, plan)
    lo, hi = plan.lo, plan.hi
    if call.causal and planted.diagonal_shift:
        kv_len = call.seqused_k.cpu().long()[plan.seq]
        hi = torch.maximum(torch.minimum(plan.pos + 1 + planted.diagonal_shift, kv_len), lo)
    if call.window_size[0] >= 0 and planted.window_shift:
        lo = torch.minimum((plan.pos - call.window_size[0] - planted.window_shift).clamp(min=0), hi)
    if planted.drop_last_key:
        hi = torch.where(hi - lo > 1, hi - 1, hi)
    return replace(plan, lo=lo, hi=hi)


def _partials(call: Call, arithmetic: Arithmetic, plan: RowPlan) -> tuple[Tensor, Tensor]:
    """Each split's output (splits, R, q_heads, head_dim_v) and LSE (splits, R, q_heads), float32; 0 and -inf where the split
    has no key of the row."""
    kv_heads, q_heads, dims = call.k_cache.shape[2], call.q.shape[1], call.k_cache.shape[3] + call.v_cache.shape[3]
    out = torch.zeros(arithmetic.splits, len(plan), q_heads, call.v_cache.shape[3], device=call.q.device)
    lse = torch.full(out.shape[:3], -math.inf, device=call.q.device)
    cost = Cost(
        per_row=q_heads * arithmetic.tile,
        per_block=kv_heads * arithmetic.tile * dims,
        limit=_LIMIT,
        rows=max(1, _ROWS * kv_heads // q_heads),
    )
    means = mean_keys(call, plan) if arithmetic.smooth_k else None
    q, factors = queries(call, plan, arithmetic, means), coefficients(call, arithmetic)
    kv_len = call.seqused_k[: call.live_seqs].cpu().long()
    for batch in batches(plan, kv_len, tile=arithmetic.tile, splits=arithmetic.splits, cost=cost):
        step = max(1, _LIMIT // cost.of(batch.row.shape[0], batch.row.shape[1], 1))
        own = tile_loop(call, arithmetic, batch, q, means, factors, step)
        split = batch.split[:, None].expand_as(batch.row)[batch.live].to(out.device)
        row, live = batch.row[batch.live].to(out.device), batch.live.to(out.device)
        out[split, row], lse[split, row] = own[0][live], own[1][live]
    return out, lse


def _merged(call: Call, arithmetic: Arithmetic, plan: RowPlan, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Output (R, q_heads, head_dim_v) and LSE (R, q_heads) of all splits and the sink together, float32.

    A sink is one more split: its output is 0 and its LSE the sink.
    """
    if len(lse) == 1 and call.sinks is None:
        return out[0], lse[0]
    every = lse
    if call.sinks is not None:
        every = torch.cat((lse, call.sinks.to(lse).expand_as(lse[:1])))
    highest = every.amax(0).clamp(min=torch.finfo(torch.float32).min)  # finite where a row has neither key nor sink
    weights = (every - highest).double().exp().float()
    total = weights.sum(0)
    if arithmetic.planted.mean_merge:
        merged = out.sum(0) / torch.isfinite(lse).sum(0).clamp(min=1)[..., None]
    else:
        merged = (out * weights[: len(out), ..., None]).sum(0) / total[..., None]
    empty = (plan.hi <= plan.lo).to(out.device)
    return merged.masked_fill(empty[:, None, None], 0.0), highest + total.double().log().float()


def _last_head_on_first_keys(call: Call) -> Call:
    """The call of the last query head alone, which reads kv head 0."""

    def head(scale: Tensor | float | None, which: slice) -> Tensor | float | None:
        return scale[..., which] if isinstance(scale, Tensor) and scale.dim() else scale

    return replace(
        call,
        q=call.q[:, -1:],
        k_cache=call.k_cache[:, :, :1],
        v_cache=call.v_cache[:, :, :1],
        sinks=None if call.sinks is None else call.sinks[-1:],
        q_scale=head(call.q_scale, slice(-1, None)),
        k_scale=head(call.k_scale, slice(1)),
        v_scale=head(call.v_scale, slice(1)),
        out=None,
    )


@dataclass(frozen=True, slots=True)
class Emulated:
    """Attention in emulated arithmetic."""

    arithmetic: Arithmetic

    def __call__(self, call: Call, return_lse: bool) -> Answer:
        """The contract's result; rows past the plan are left as they are in `out`, and are 0 where there is no `out`."""
        live_out, live_lse = emulate(call, self.arithmetic)
        out, rows = call.out, call.q.shape[:2]
        if out is None:
            out = torch.zeros(*rows, call.v_cache.shape[-1], dtype=live_out.dtype, device=call.q.device)
        out[: len(live_out)] = live_out
        if not return_lse:
            return out
        lse = torch.zeros(rows, dtype=torch.float32, device=call.q.device)
        lse[: len(live_lse)] = live_lse
        return out, lse


def as_kernel(arithmetic: Arithmetic, name: str, record: Record | None = None) -> DeclaredKernel:
    """The arithmetic as a kernel; without a record, of everything that the emulator can do and of the precision it keeps."""
    return contract_kernel(record or record_of(arithmetic), name=name)(Emulated(arithmetic))


def record_of(arithmetic: Arithmetic) -> Record:
    """Everything that the emulator can do, at the precision of the arithmetic; tensor cores take no float32."""
    tensor_core = {"rz16", "aligned", "fp22"} & {arithmetic.qk_accumulator, arithmetic.pv_accumulator}
    return Record(
        dtypes=("bf16", "fp16") if tensor_core else ("bf16", "fp16", "fp32"),
        cache_dtypes=("e4m3",),
        head_dims=(40, 64, 80, 96, 128, 256, 512),
        uneven_head_dims=((192, 128), (128, 64), (64, 128), (576, 512)),
        page_sizes=(1, 8, 16, 32, 64, 128, 256),
        precision=precision_of(arithmetic),
    )
