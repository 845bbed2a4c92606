"""What enters the matrix products of an emulated kernel: rows of q, and tiles of k and v read through the page table.

All values are float64 tensors.  Quantised operands are whole multiples of a step: the values and the steps are kept apart,
as a kernel keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.contract import Call
from oracle.formats import FORMATS
from oracle.references.arithmetic import Arithmetic
from oracle.references.plan import RowPlan, tokens
from oracle.references.rounding import round_to

_CHUNK = 4096  # tokens read at once where a whole sequence is read
_DISTANCE = 80  # keys from the end of the prefix back to the faulty page: five pages of 16, within most windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """The query rows of a plan."""

    values: Tensor  # (R, q_heads, head_dim)
    step: Tensor | None  # (R, q_heads), float32 values, where q is quantised
    offset: Tensor | None  # (R, q_heads), float32 values: q . mean key, where that is taken off k


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """G blocks of N keys each, kv heads first."""

    k: Tensor  # (kv_heads * G, N, head_dim)
    v: Tensor  # (kv_heads * G, N, head_dim_v)
    step: Tensor | None  # (kv_heads * G, N), float32 values, where k is quantised


def quantise(x: Tensor, peak: Tensor, format_name: str) -> tuple[Tensor, Tensor]:
    """`x` in steps of `peak / largest`, to nearest, and the steps, rounded to float32; `peak` broadcasts against `x`."""
    largest = 127.0 if format_name == "int8" else FORMATS[format_name].largest
    step = round_to(torch.where(peak > 0, peak, 1.0) / largest, "fp32")
    ratio = round_to(x / step, "fp32")
    return (ratio.round().clamp(-largest, largest) if format_name == "int8" else round_to(ratio, format_name)), step


def mean_keys(call: Call, plan: RowPlan) -> Tensor:
    """The mean key of each sequence, over all its live keys: (sequences, kv_heads, head_dim), float32 values.

    Sequences that the plan has no row of are 0.
    """
    means = torch.zeros(call.live_seqs, *call.k_cache.shape[2:], dtype=torch.float64, device=call.k_cache.device)
    for seq in torch.unique(plan.seq[plan.hi > plan.lo]).tolist():
        keys = int(call.seqused_k[seq])
        for start in range(0, keys, _CHUNK):
            means[seq] += tokens(call, call.k_cache, seq, start, min(start + _CHUNK, keys)).double().sum(0)
        means[seq] /= keys
    return round_to(means, "fp32")


def queries(call: Call, plan: RowPlan, arithmetic: Arithmetic, means: Tensor | None) -> Queries:
    """The rows of q, quantised with their whole blocks: rows of a block that the plan leaves out count too."""
    rows = plan.row.to(call.q.device)
    values, step, offset = call.q[rows].double(), None, None
    if means is not None:
        group = call.q.shape[1] // call.k_cache.shape[2]
        own = means[plan.seq.to(means.device)].repeat_interleave(group, 1)
        offset = round_to((values * own).sum(-1), "fp32")
    if arithmetic.qk_format is not None:
        cu = call.cu_seqlens_q[: call.live_seqs + 1].cpu().long()
        every = torch.arange(int(cu[-1]))
        seq = torch.searchsorted(cu, every, right=True) - 1
        block = torch.unique((seq << 32) + (every - cu[seq]) // arithmetic.qk_block, return_inverse=True)[1].to(call.q.device)
        heights = call.q[: len(every)].double().abs().amax(-1)
        peaks = heights.new_zeros(len(every), heights.shape[1])
        peaks.scatter_reduce_(0, block[:, None].expand_as(heights), heights, "amax")
        values, steps = quantise(values, peaks[block[rows]][..., None], arithmetic.qk_format)
        step = steps[..., 0]
    return Queries(values=values, step=step, offset=offset)


def keys(call: Call, arithmetic: Arithmetic, seq: Tensor, index: Tensor, means: Tensor | None) -> Keys:
    """The keys `index` (G, N) int64 of the sequences `seq` (G,); whole tiles.  Those past the end repeat the last one."""
    kv_len = call.seqused_k.cpu().long()[seq, None]
    index = torch.minimum(index, kv_len - 1)
    k_index, v_index, lost = _page_fault(call, arithmetic, seq, index, kv_len)
    k, v = _gather(call, call.k_cache, seq, k_index), _gather(call, call.v_cache, seq, v_index)
    if lost is not None:
        v = v.masked_fill(lost.to(v.device)[None, ..., None], 0.0)
    if means is not None:
        k = round_to(k - means[seq.to(means.device)].transpose(0, 1)[:, :, None], "fp32")
    step = None
    if arithmetic.qk_format is not None:
        k, steps = _quantise_blocks(k, arithmetic.qk_block, arithmetic.qk_format)
        step = steps.flatten(0, 1)
    if arithmetic.v_format is not None:
        # a product of a value and its step is exact in float64, so the step may as well be multiplied in here
        v, steps = _quantise_blocks(v, arithmetic.tile, arithmetic.v_format)
        v = v * steps[..., None]
    return Keys(k=k.flatten(0, 1), v=v.flatten(0, 1), step=step)


def _quantise_blocks(x: Tensor, block: int, format_name: str) -> tuple[Tensor, Tensor]:
    """`x` (kv_heads, G, N, dim) quantised by blocks of `block` tokens: the values, and the steps (kv_heads, G, N)."""
    peaks = x.abs().amax(-1).view(*x.shape[:2], -1, block).amax(-1).repeat_interleave(block, 2)
    values, steps = quantise(x, peaks[..., None], format_name)
    return values, steps[..., 0]


def _gather(call: Call, cache: Tensor, seq: Tensor, index: Tensor) -> Tensor:
    """Tokens `index` (G, N) of the sequences `seq` (G,): (kv_heads, G, N, dim) float64."""
    page_size = cache.shape[1]
    pages = call.page_table.cpu().long()[seq[:, None], index // page_size].to(cache.device)
    found = cache[pages, (index % page_size).to(cache.device)]  # (G, N, kv_heads, dim)
    return found.permute(2, 0, 1, 3).to(torch.float64, memory_format=torch.contiguous_format)


def _page_fault(
    call: Call, arithmetic: Arithmetic, seq: Tensor, index: Tensor, kv_len: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Where K and V of the keys `index` (G, N) are read from under the planted page fault, and the keys whose V is lost.

    Nothing happens where the fault cannot: rows of a page of one, the neighbour of the only page.
    """
    fault = arithmetic.planted.page_fault
    if fault is None:
        return index, index, None
    page_size = call.k_cache.shape[1]
    cu = call.cu_seqlens_q.cpu().long()
    prefix = kv_len - (cu[seq + 1] - cu[seq])[:, None]
    left = call.window_size[0]
    distance = _DISTANCE if left < 0 else min(_DISTANCE, left // 2 + 1)
    key = torch.where(prefix >= distance, prefix - distance, kv_len // 2)
    start = key // page_size * page_size
    size = torch.minimum(kv_len - start, torch.tensor(page_size))
    place = index - start
    within = (place >= 0) & (place < size)
    if fault == "v-zero":
        return index, index, within
    if fault == "v-rolled":
        return index, torch.where(within, start + (place - 1) % size, index), None
    if fault == "k-rows-swapped":
        pair = (key - start) // 2 * 2  # the rows of the page that change places: this one and the next
        swapped = torch.where((place - pair == 0) | (place - pair == 1), start + 2 * pair + 1 - place, index)
        return torch.where(pair + 1 < size, swapped, index), index, None
    neighbour = torch.where(start >= page_size, -page_size, torch.where(start + 2 * page_size <= kv_len, page_size, 0))
    stale = torch.where(within, index + neighbour, index)
    return stale, stale, None
