"""The tile loop of an emulated kernel: scores, online softmax and P.V of one batch of rows.

The leading axes of a batch, kv heads and its G blocks, are one axis B of matrices; their M rows are the query rows of a block
times the query heads of a kv head.  What a kernel keeps in registers is float32; the operands of matrix products are float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.contract import Call
from oracle.references.arithmetic import Arithmetic
from oracle.references.operands import Keys, Queries, keys
from oracle.references.operations import accumulate, exp2, round_p, tanh, tree_sum
from oracle.references.plan import head_scales
from oracle.references.rounding import FORMAT_NAMES, round_to
from oracle.references.schedule import Batch

_LOG2E = math.log2(math.e)


def output_dtype(call: Call) -> torch.dtype:
    """The dtype of q, bf16 for 8-bit q."""
    return torch.bfloat16 if call.q.dtype.itemsize == 1 else call.q.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """What the raw scores are multiplied by, for each sequence and kv head: (sequences, kv_heads), float32."""

    exponent: Tensor  # scores, after the softcap, to log2 units
    inner: Tensor | None  # raw scores to the argument of the softcap's tanh; None without a softcap


def coefficients(call: Call, arithmetic: Arithmetic) -> Coefficients:
    """The coefficients of a call, its dequantisation scales included."""
    kv_heads = call.k_cache.shape[2]
    scale = head_scales(call.q_scale, call.live_seqs, kv_heads) * head_scales(call.k_scale, call.live_seqs, kv_heads)
    scale = (scale * (call.softmax_scale * arithmetic.planted.scale_factor)).to(call.q.device)
    if call.softcap > 0 and not arithmetic.planted.omit_softcap:
        return Coefficients(exponent=torch.full_like(scale, _LOG2E).float(), inner=(scale / call.softcap).float())
    return Coefficients(exponent=(scale * _LOG2E).float(), inner=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """From rows and query heads to matrices, and back."""

    blocks: int  # G
    rows: int  # R
    kv_heads: int
    group: int

    def spread(self, x: Tensor) -> Tensor:
        """(G, R, ...), the same for all heads, as (B, M, ...)."""
        x = x[None, :, :, None].expand(self.kv_heads, -1, -1, self.group, *x.shape[2:])
        return x.reshape(self.kv_heads * self.blocks, self.rows * self.group, *x.shape[4:])

    def stacked(self, x: Tensor) -> Tensor:
        """(G, R, q_heads, ...) as (B, M, ...)."""
        x = x.reshape(self.blocks, self.rows, self.kv_heads, self.group, *x.shape[3:]).movedim(2, 0)
        return x.reshape(self.kv_heads * self.blocks, self.rows * self.group, *x.shape[4:])

    def unstacked(self, x: Tensor) -> Tensor:
        """(B, M, ...) as (G, R, q_heads, ...)."""
        return self.by_head(x).movedim(0, 2).flatten(2, 3)

    def by_head(self, x: Tensor) -> Tensor:
        """(B, M, ...) as a view (kv_heads, G, R, group, ...)."""
        return x.view(self.kv_heads, self.blocks, self.rows, self.group, *x.shape[2:])


def tile_loop(
    call: Call, arithmetic: Arithmetic, batch: Batch, q: Queries, means: Tensor | None, factors: Coefficients, step: int
) -> tuple[Tensor, Tensor]:
    """Output (G, R, q_heads, head_dim_v) and natural-log LSE (G, R, q_heads) of the batch's rows, float32; padding is NaN.

    `step` is how many tiles are in hand at once.
    """
    device, kv_heads, tile = call.q.device, call.k_cache.shape[2], arithmetic.tile
    layout = _Layout(blocks=batch.row.shape[0], rows=batch.row.shape[1], kv_heads=kv_heads, group=call.q.shape[1] // kv_heads)
    row = batch.row.to(device)
    q = Queries(
        values=layout.stacked(q.values[row]),
        step=None if q.step is None else layout.stacked(q.step[row]),
        offset=None if q.offset is None else layout.stacked(q.offset[row]),
    )
    seq = batch.seq.to(device)
    c = factors.exponent[seq].T.reshape(-1, 1, 1)
    inner = None if factors.inner is None else factors.inner[seq].T.reshape(-1, 1, 1)

    m = torch.full(q.values.shape[:2], -math.inf, device=device)
    total = torch.zeros_like(m)
    out = torch.zeros(*m.shape, call.v_cache.shape[-1], device=device)
    for start in range(0, batch.tiles, step):
        number = torch.arange(start, min(start + step, batch.tiles))
        number = batch.first[:, None] + (batch.tiles - 1 - number if arithmetic.reverse else number)  # (G, T)
        index = (number[..., None] * tile + torch.arange(tile)).flatten(1)  # (G, N)
        kv = keys(call, arithmetic, batch.seq, index, means)
        hidden = (index[:, None] < batch.lo[..., None]) | (index[:, None] >= batch.hi[..., None])  # (G, R, N)
        s = _scores(call, arithmetic, q, kv, inner)
        layout.by_head(s).masked_fill_(hidden.to(device)[None, :, :, None], -math.inf)
        s = s.view(*m.shape, -1, tile)  # (B, M, T, tile)
        before, m_tile = m, _running_max(m, s.amax(-1), c, arithmetic.lazy)
        p, alpha = _softmax(arithmetic, s, before, m_tile, c)
        m = m_tile[..., -1]
        rounded = round_p(p, _p_format(call, arithmetic), arithmetic.p_scale)
        sums = tree_sum(rounded if arithmetic.row_sum == "after" else p)
        visited = layout.spread(number[:, None] - (batch.lo // tile)[..., None]).to(device)  # tiles since the row's first
        alpha_out, weights = _planted(arithmetic, visited, alpha, rounded.double())
        by_tile = (alpha.unbind(-1), sums.unbind(-1), alpha_out.unbind(-1), weights.unbind(2), kv.v.chunk(number.shape[1], 1))
        for alpha_t, sum_t, alpha_out_t, weights_t, v_t in zip(*by_tile, strict=True):
            total = total * alpha_t + sum_t
            if arithmetic.row_sum_format == "bf16":
                total = round_to(total, "bf16")
            out = accumulate(out * alpha_out_t[..., None], weights_t, v_t, arithmetic.pv_accumulator, arithmetic)
    lse = m * c[..., 0] * c.new_tensor(math.log(2)) + total.double().log().float()
    return layout.unstacked(out / total[..., None]), layout.unstacked(lse)


def _scores(call: Call, arithmetic: Arithmetic, q: Queries, kv: Keys, inner: Tensor | None) -> Tensor:
    """q . k (B, M, N), float32: raw where there is no softcap, else scaled and capped."""
    s = torch.zeros(*q.values.shape[:2], kv.k.shape[1], device=q.values.device)
    s = accumulate(s, q.values, kv.k.transpose(1, 2), arithmetic.qk_accumulator, arithmetic)
    if q.step is not None and kv.step is not None:
        s = s * (q.step[..., None] * kv.step[:, None]).float()
    if q.offset is not None:
        s = s + q.offset[..., None].float()
    if inner is not None:
        s = (call.softcap * tanh(s * inner, arithmetic.tanh).double()).float()
    return s


def _running_max(m: Tensor, maxima: Tensor, c: Tensor, lazy: float) -> Tensor:
    """What is subtracted from the scores at each tile (B, M, T), given what was before (B, M) and the tiles' maxima."""
    if lazy == 0:
        return torch.maximum(maxima.cummax(-1).values, m[..., None])
    running = []
    for t in range(maxima.shape[-1]):
        higher = torch.maximum(m, maxima[..., t])
        keep = torch.isfinite(m) & ((higher - m) * c[..., 0] <= lazy)
        m = torch.where(keep, m, higher)
        running.append(m)
    return torch.stack(running, -1)


def _softmax(arithmetic: Arithmetic, s: Tensor, before: Tensor, m: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """P (B, M, T, tile), unnormalised, and the factors (B, M, T) that rescale what came before each tile.

    Shapes: scores s (B, M, T, tile), their running maximum m (B, M, T) and what it was before (B, M), c (B, 1, 1).  All float32.
    """
    nothing = torch.isinf(m)  # no key seen yet: P is 0 and there is nothing to rescale
    change = torch.cat((before[..., None], m[..., :-1]), -1) - m
    # FlashAttention-4 too takes the hardware's exp2 here: an error would be shared by all keys before the tile
    alpha = exp2(change * c, "exact").masked_fill(nothing, 1.0)
    m = m.masked_fill(nothing, 0.0)[..., None]
    c = c[..., None]
    if arithmetic.subtract_first:
        return exp2((s - m) * c, arithmetic.exp2), alpha
    fused = s.double().mul_(c).sub_(m * c).float()  # rounded once, as a fused multiply-add
    return exp2(fused, arithmetic.exp2), alpha


def _p_format(call: Call, arithmetic: Arithmetic) -> str:
    return FORMAT_NAMES[output_dtype(call)] if arithmetic.p_format == "input" else arithmetic.p_format


def _planted(arithmetic: Arithmetic, visited: Tensor, alpha: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of O, and the P of P.V, under the planted faults at a tile of each row."""
    planted = arithmetic.planted
    if planted.unscaled_tile is not None:
        alpha = alpha.masked_fill(visited == planted.unscaled_tile, 1.0)
    if planted.skipped_tile is not None:
        weights = weights.masked_fill((visited == planted.skipped_tile)[..., None], 0.0)
    return alpha, weights
