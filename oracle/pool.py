"""Laying a case out in memory: the page pool, the plan, and what lies past it.

One case can be laid out in many ways that must give the same bits: other page ids, another hostile fill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from oracle.cases import Case
from oracle.contract import Call
from oracle.material import TORCH_DTYPES, Material
from oracle.streams import Stream

GUARD_ROWS = 2  # canary rows before and after `out`
CANARY = 0x5A  # bf16 1.5e16, fp16 203: finite, nothing an attention kernel writes by chance
GARBAGE_IDS = (-1, 2**31 - 1, -(2**31), 10**7, -(10**7))
LAYERS = 3  # layers that share a page in the layout "layers-in-page"; the middle one is judged


class Fill(StrEnum):
    """What lies past the plan."""

    STALE = "stale"  # real data of other tokens
    NAN = "nan"
    POS_INF = "+inf"
    NEG_INF = "-inf"
    LARGE = "+large"  # the largest finite value of the format
    NEG_LARGE = "-large"

    @property
    def finite(self) -> bool:
        """Whether a kernel that needs finite values past the plan can be given it."""
        return self not in (Fill.NAN, Fill.POS_INF, Fill.NEG_INF)


QUICK_FILLS = (Fill.NAN, Fill.LARGE)  # of the quick profile, besides stale data


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """A call ready to be made, and where its canaries are."""

    call: Call
    fill: Fill
    live_out: Tensor | None  # bool over the storage bytes of `out`: those that the kernel may write

    def canaries_broken(self, storage: Tensor) -> int:
        """Bytes past the plan that were written, of the storage (uint8) that came back for `out`."""
        if self.live_out is None:
            return 0
        return int(((storage != CANARY) & ~self.live_out).sum())


def lay_out(case: Case, material: Material, *, fill: Fill, salt: int, writes_padding: bool = False) -> Laid:
    """The call of `case`, its pages placed by `salt`, with `fill` past the plan.

    Live pages are scattered over a pool of more than twice their number and always include its last page.
    """
    stream = Stream(case.seed, f"pool/{salt}")
    batch = len(case.q_lens)
    size = case.page_size
    pages = [-(-n // size) for n in case.kv_lens]
    needed = sum(pages)
    pool = 2 * needed + 3 + salt  # so that a single page, always the last one, moves too
    ids = torch.cat([stream.permutation(pool - 1)[: max(0, needed - 1)], torch.tensor([pool - 1])])[:needed]
    ids = ids[stream.permutation(needed)] if needed else ids
    table = _garbage_table(stream, batch + case.padded_seqs, max([*pages, 1]) + 2, pool)
    start = 0
    for row, count in enumerate(pages):
        table[row, :count] = ids[start : start + count].int()
        start += count

    k_cache, v_cache = _caches(case, pool, material, fill, stream)
    page_of, slot_of = _places(case, ids, pages)
    _put(k_cache, page_of, slot_of, material.k)
    _put(v_cache, page_of, slot_of, material.v)

    q = _queries(case, material.q, fill)
    out, live_out = _output(case, writes_padding) if case.give_out else (None, None)
    past_q, past_k = _past_the_batch(case, fill)
    plan_q = torch.cat([material.cu_q, past_q])
    plan_k = torch.cat([torch.tensor(case.kv_lens, dtype=torch.int64), past_k])
    q_scale, k_scale, v_scale = (
        _with_hostile_rows(scale, case.padded_seqs, fill) for scale in (material.q_scale, material.k_scale, material.v_scale)
    )
    f = case.family
    call = Call(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        cu_seqlens_q=plan_q.int(),
        seqused_k=plan_k.int(),
        page_table=table,
        softmax_scale=f.scale,
        causal=f.causal,
        window_size=f.window,
        softcap=f.softcap,
        sinks=material.sinks,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        num_seqs=batch if case.padded_seqs else None,
        out=out,
        extras=material.extras,
    )
    return Laid(call=call, fill=fill, live_out=live_out)


def is_canary(out: Tensor) -> Tensor:
    """Which elements of `out` hold what it held before the call; bool of the same shape."""
    return (out.contiguous().view(torch.uint8).view(*out.shape, out.dtype.itemsize) == CANARY).all(-1)


def without_fill(laid: Laid) -> Call:
    """The call as the reference reads it; it never looks past the plan."""
    return replace(laid.call, out=None)


def _places(case: Case, ids: Tensor, pages: list[int]) -> tuple[Tensor, Tensor]:
    """Page id and slot of every packed key, (total_k,) int64 each."""
    lengths = torch.tensor(case.kv_lens, dtype=torch.int64)
    first_page = torch.tensor([0, *pages], dtype=torch.int64).cumsum(0)[:-1].repeat_interleave(lengths)
    first_key = torch.tensor([0, *case.kv_lens], dtype=torch.int64).cumsum(0)[:-1].repeat_interleave(lengths)
    index = torch.arange(case.total_k) - first_key
    return ids[first_page + index // case.page_size], index % case.page_size


def _put(cache: Tensor, page: Tensor, slot: Tensor, values: Tensor) -> None:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.dtype.itemsize]  # not every format can be indexed
    cache.view(bits)[page, slot] = values.view(bits)


def _past_the_batch(case: Case, fill: Fill) -> tuple[Tensor, Tensor]:
    """Entries of cu_seqlens_q and seqused_k past the live batch: those of a larger batch before, or out of every range."""
    count = case.padded_seqs
    if fill is Fill.STALE:
        return case.total_q + 1 + torch.arange(count), torch.full((count,), case.page_size + 1, dtype=torch.int64)
    value = 10**7 if fill in (Fill.LARGE, Fill.POS_INF) else -(10**7)
    return torch.full((count,), value, dtype=torch.int64), torch.full((count,), value, dtype=torch.int64)


def _with_hostile_rows(scale: Tensor | float | None, count: int, fill: Fill) -> Tensor | float | None:
    """A scale with `count` hostile rows for the sequences past the live batch, where it has a row for each sequence."""
    if not isinstance(scale, Tensor) or scale.dim() < 2:
        return scale
    return torch.cat([scale, _hostile((count, scale.shape[1]), scale.dtype, fill, scale)])


def _garbage_table(stream: Stream, rows: int, columns: int, pool: int) -> Tensor:
    """A page table of hostile entries: ids out of range, and ids of pages that belong to other sequences."""
    kinds = stream.integers(0, len(GARBAGE_IDS) + 2, rows * columns)
    hostile = torch.tensor([*GARBAGE_IDS, 0, 0])[kinds]
    plausible = stream.integers(0, pool, rows * columns)
    return torch.where(kinds >= len(GARBAGE_IDS), plausible, hostile).int().reshape(rows, columns)


def _hostile(shape: tuple[int, ...], dtype: torch.dtype, fill: Fill, stale: Tensor) -> Tensor:
    """A tensor of the given shape holding `fill`; `stale` is real data to take values from."""
    if fill is Fill.STALE:
        flat, count = stale.flatten(), math.prod(shape)
        if flat.numel() == 0:
            return torch.zeros(shape, dtype=dtype)
        return flat[(torch.arange(count) + 7) % flat.numel()].reshape(shape)
    largest = torch.finfo(dtype).max
    eight_bit = dtype == torch.float8_e4m3fn  # has no infinity
    value = {
        Fill.NAN: float("nan"),
        Fill.POS_INF: largest if eight_bit else float("inf"),
        Fill.NEG_INF: -largest if eight_bit else float("-inf"),
        Fill.LARGE: largest,
        Fill.NEG_LARGE: -largest,
    }[fill]
    return torch.full(shape, value, dtype=torch.float32).to(dtype) if eight_bit else torch.full(shape, value, dtype=dtype)


def _caches(case: Case, pool: int, material: Material, fill: Fill, stream: Stream) -> tuple[Tensor, Tensor]:
    """k_cache (pool, page_size, kv_heads, head_dim) and v_cache, all hostile, in the case's memory layout."""
    f, size = case.family, case.page_size
    dtype = material.k.dtype

    def hostile(*shape: int, like: Tensor = material.k) -> Tensor:
        return _hostile(shape, dtype, fill, like)

    if case.layout == "plain":
        return hostile(pool, size, f.kv_heads, f.head_dim), hostile(pool, size, f.kv_heads, f.head_dim_v, like=material.v)
    if case.layout == "hnd":
        k = hostile(pool, f.kv_heads, size, f.head_dim)
        return k.transpose(1, 2), hostile(pool, f.kv_heads, size, f.head_dim_v, like=material.v).transpose(1, 2)
    if case.layout == "strided":  # gaps after each k vector, v in HND order: their strides differ
        k = hostile(pool, size, f.kv_heads, f.head_dim + 8)[..., : f.head_dim]
        return k, hostile(pool, f.kv_heads, size, f.head_dim_v, like=material.v).transpose(1, 2)
    wide = max(f.head_dim, f.head_dim_v)
    layers = LAYERS if case.layout == "layers-in-page" else 1
    pages = hostile(pool, layers, 2, size, f.kv_heads, wide)[:, layers // 2]
    return pages[:, 0, ..., : f.head_dim], pages[:, 1, ..., : f.head_dim_v]


def _queries(case: Case, q: Tensor, fill: Fill) -> Tensor:
    """q (total_q + tail_rows, q_heads, head_dim), hostile past the plan; a slice of wider rows where the layout is strided."""
    rows, heads, dim = q.shape
    extra = 2 if case.layout == "strided" else 0
    whole = _hostile((rows + case.tail_rows, heads + extra, dim), q.dtype, fill, q)
    view = whole[:, extra // 2 : extra // 2 + heads]
    view[:rows] = q
    return view


def _output(case: Case, writes_padding: bool) -> tuple[Tensor, Tensor]:
    """`out` inside a storage of canaries, and which of the storage's bytes the kernel may write."""
    f = case.family
    dtype = TORCH_DTYPES[case.dtype]
    gap = 8 if case.layout == "strided" else 0
    rows = case.total_q + case.tail_rows
    shape = (rows + 2 * GUARD_ROWS, f.q_heads, f.head_dim_v + gap)
    storage = torch.full((*shape, dtype.itemsize), CANARY, dtype=torch.uint8)
    live = torch.zeros_like(storage, dtype=torch.bool)
    writable = rows if writes_padding else case.total_q
    live[GUARD_ROWS : GUARD_ROWS + writable, :, : f.head_dim_v] = True
    out = storage.view(dtype).squeeze(-1)[GUARD_ROWS : GUARD_ROWS + rows, :, : f.head_dim_v]
    return out, live.flatten()
