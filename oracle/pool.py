"""Laying a case out in memory: the page pool, the plan, and what lies past it.

One case can be laid out in many ways that must give the same bits: other page ids, another hostile fill.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from oracle.cases import Case
from oracle.contract import Call
from oracle.isolation.sparse import sparse_zeros
from oracle.material import TORCH_DTYPES, Material
from oracle.streams import Stream

GUARD_ROWS = 2  # canary rows before and after `out`
GARBAGE_IDS = (-1, 2**31 - 1, -(2**31), 10**7, -(10**7))
LAYERS = 3  # layers that share a page in the layout "layers-in-page", at least in "far-pages"; the middle one is judged
SPARSE = ("many-pages", "far-pages")  # layouts whose pools have memory only for live pages and those beside them
MANY = 70_000  # pages in the layout "many-pages": ids beyond 2^16
MOST_ELEMENTS = 2**30  # of a pool in the layout "many-pages"
FAR = 2**31  # elements of the pool in the layout "far-pages" beyond which half the live pages lie
FIRST_FAR = 66_000  # page id that this falls on at most: where pages are small, ids beyond 2^16 are live too
BESIDE = 512  # live pages at most whose neighbours are hostile in a sparse pool; the others have holes beside them


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
        return int(((storage != canary(storage.numel())) & ~self.live_out).sum())


def lay_out(case: Case, material: Material, *, fill: Fill, salt: int, writes_padding: bool = False) -> Laid:
    """The call of `case`, its pages placed by `salt`, with `fill` past the plan.

    Live pages are scattered over a pool of more than twice their number and always include its last page.
    """
    stream = Stream(case.seed, f"pool/{salt}")
    batch = len(case.q_lens)
    size = case.page_size
    pages = [-(-n // size) for n in case.kv_lens]
    common = [n // size for n in case.shared]
    shape = _pool_shape(case, sum(pages) - sum(common), salt)
    own = _page_ids(stream, shape, sum(pages) - sum(common))
    row, column, ids = _table_entries(own, pages, common)
    filled = _filled_pages(case, shape, ids)
    table = _garbage_table(case, stream, batch + case.padded_seqs, max([*pages, 1]) + 2, filled)
    table[row, column] = ids.int()

    k_cache, v_cache = _caches(case, shape, material, fill, ids, filled)
    page_of, slot_of = _places(case, ids, pages)
    _put(k_cache, page_of, slot_of, material.k)
    _put(v_cache, page_of, slot_of, material.v)

    q = _queries(case, material.q, fill)
    out, live_out = _output(case, writes_padding) if case.give_out else (None, None)
    past_q, past_k = _past_the_batch(case, fill)
    plan_q = torch.cat([material.cu_q, past_q])
    plan_k = torch.cat([torch.tensor(case.kv_lens, dtype=torch.int64), past_k])
    scales = [
        _with_hostile_rows(scale, case.padded_seqs, fill) for scale in (material.q_scale, material.k_scale, material.v_scale)
    ]
    cut = _end_of_longer if case.layout == "strided" else _as_it_is
    f = case.family
    call = Call(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        cu_seqlens_q=cut(plan_q.int()),
        seqused_k=cut(plan_k.int()),
        page_table=table,
        softmax_scale=f.scale,
        causal=f.causal,
        window_size=f.window,
        softcap=f.softcap,
        sinks=cut(material.sinks),
        q_scale=cut(scales[0]),
        k_scale=cut(scales[1]),
        v_scale=cut(scales[2]),
        num_seqs=batch if case.padded_seqs else None,
        out=out,
        extras=material.extras,
    )
    return Laid(call=call, fill=fill, live_out=live_out)


def canary(nbytes: int) -> Tensor:
    """What a storage of `nbytes` for `out` holds before the call, (nbytes,) uint8.

    Other bytes at every place; as bf16, fp16 or fp32 finite numbers beyond 100, which no attention kernel writes by chance.
    """
    pattern = _canary_pattern()
    return pattern.repeat(-(-nbytes // len(pattern)))[:nbytes].clone()  # a storage of its own, of that size


@functools.cache
def _canary_pattern() -> Tensor:
    """Two-byte words, a prime number of them: an odd byte, below one of the 32 that give large numbers in every format."""
    drawn = Stream(0, "canary").integers(0, 128 * 32, 16_381)
    return (((0x5A + drawn // 128) << 8) + 2 * (drawn % 128) + 1).to(torch.int16).view(torch.uint8)


def is_canary(out: Tensor) -> Tensor:
    """Which elements of `out`, a view of the storage that came back for it, hold what they held before the call; bool."""
    bits = {2: torch.int16, 4: torch.int32}[out.dtype.itemsize]
    before = canary(out.untyped_storage().nbytes()).view(bits)
    return out.view(bits) == before.as_strided(out.shape, out.stride(), out.storage_offset())


def without_fill(laid: Laid) -> Call:
    """The call as the reference reads it; it never looks past the plan."""
    return replace(laid.call, out=None)


@dataclass(frozen=True, slots=True)
class _PoolShape:
    """How large a page pool is."""

    pages: int
    layers: int = 1  # that share a page
    high: int = 0  # first of the page ids that half the live pages are given; 0 = no page is given preference


def _pool_shape(case: Case, needed: int, salt: int) -> _PoolShape:
    """More than twice the `needed` pages, and another number for each salt, so that a single page, always the last one, moves."""
    least = 2 * needed + 3
    if case.layout not in SPARSE:
        return _PoolShape(least + salt, LAYERS if case.layout == "layers-in-page" else 1)
    page = 2 * case.page_size * case.family.kv_heads * max(case.family.head_dim, case.family.head_dim_v)
    if case.layout == "many-pages":
        pages = max(least, min(MANY, MOST_ELEMENTS // page)) + salt
        return _PoolShape(pages, high=pages - max(needed, pages // 16))
    layers = max(LAYERS, -(-FAR // (FIRST_FAR * page)))
    high = -(-FAR // (layers * page))
    return _PoolShape(high + max(least, high // 12) + salt, layers, high)


def _page_ids(stream: Stream, shape: _PoolShape, needed: int) -> Tensor:
    """`needed` different page ids in no order, the last one among them; half of them high where the shape says so."""
    upper = stream.permutation(shape.pages - 1 - shape.high) + shape.high
    if shape.high:
        upper = upper[: max(needed // 2, needed - 1 - shape.high)]
        upper = torch.cat([upper, stream.permutation(shape.high)])
    ids = torch.cat([upper[: max(0, needed - 1)], torch.tensor([shape.pages - 1])])[:needed]
    return ids[stream.permutation(needed)] if needed else ids


def _table_entries(own: Tensor, pages: list[int], common: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and page id of every live entry of the page table, (sum(pages),) int64 each, row by row.

    The first `common` pages of a sequence are those of sequence 0; all others are `own`, each in one place.
    """
    counts = torch.tensor(pages, dtype=torch.int64)
    row = torch.repeat_interleave(counts)
    column = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    of_first = column < torch.tensor(common, dtype=torch.int64)[row]
    ids = torch.empty_like(row)
    ids[~of_first] = own
    ids[of_first] = ids[column[of_first]]
    return row, column, ids


def _filled_pages(case: Case, shape: _PoolShape, ids: Tensor) -> Tensor:
    """The pages that hold something: all, or in a sparse pool the live ones `ids` and their neighbours; ascending."""
    if case.layout not in SPARSE:
        return torch.arange(shape.pages)
    beside = ids[:: max(1, -(-len(ids) // BESIDE))]
    around = torch.cat([ids, beside - 1, beside + 1, torch.tensor([shape.pages - 1])])
    found: Tensor = torch.unique(around.clamp(0, shape.pages - 1))
    return found


def _places(case: Case, ids: Tensor, pages: list[int]) -> tuple[Tensor, Tensor]:
    """Page id and slot of every packed key, (total_k,) int64 each."""
    lengths = torch.tensor(case.kv_lens, dtype=torch.int64)
    first_page = torch.tensor([0, *pages], dtype=torch.int64).cumsum(0)[:-1].repeat_interleave(lengths)
    first_key = torch.tensor([0, *case.kv_lens], dtype=torch.int64).cumsum(0)[:-1].repeat_interleave(lengths)
    index = torch.arange(case.total_k) - first_key
    return ids[first_page + index // case.page_size], index % case.page_size


def _put(cache: Tensor, page: Tensor, slot: Tensor, values: Tensor) -> None:
    bits = _bits(cache)
    cache.view(bits)[page, slot] = values.view(bits)


def _bits(x: Tensor) -> torch.dtype:
    """An integer format of the size of x's: not every format can be indexed."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize]


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


def _as_it_is(x: Tensor | float | None) -> Any:
    return x


def _end_of_longer(x: Tensor | float | None) -> Any:
    """`x` as the last part of a longer array, hostile before it, whose size is a multiple of 16 bytes."""
    if not isinstance(x, Tensor):
        return x
    before = torch.full((4 + -x.numel() % 4,), torch.nan if x.is_floating_point() else 2**31 - 1, dtype=x.dtype)
    return torch.cat([before, x.flatten()])[len(before) :].view(x.shape)


def _garbage_table(case: Case, stream: Stream, rows: int, columns: int, pages: Tensor) -> Tensor:
    """A page table of hostile entries: ids out of range, and `pages`, which belong to other sequences or to no one.

    It has at least `columns` columns, and a multiple of 16 bytes; where the layout is strided, it is cut from a wider one.
    """
    extra = 4 if case.layout == "strided" else 0
    wide = -(-columns // 4) * 4 + extra
    kinds = stream.integers(0, len(GARBAGE_IDS) + 2, rows * wide)
    hostile = torch.tensor([*GARBAGE_IDS, 0, 0])[kinds]
    plausible = pages[stream.integers(0, len(pages), rows * wide)]
    return torch.where(kinds >= len(GARBAGE_IDS), plausible, hostile).int().reshape(rows, wide)[:, extra:]


def _hostile(shape: tuple[int, ...], dtype: torch.dtype, fill: Fill, stale: Tensor) -> Tensor:
    """A tensor of the given shape holding `fill`; `stale` is real data to take values from."""
    if fill is Fill.STALE:
        flat, count = stale.flatten(), math.prod(shape)
        if flat.numel() == 0:
            return torch.zeros(shape, dtype=dtype)
        from_another_place = flat.view(_bits(flat)).roll(-7).repeat(-(-count // flat.numel()))[:count]
        return from_another_place.clone().view(flat.dtype).reshape(shape)  # a storage of its own, of that size
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


def _caches(case: Case, shape: _PoolShape, material: Material, fill: Fill, ids: Tensor, filled: Tensor) -> tuple[Tensor, Tensor]:
    """k_cache (pages, page_size, kv_heads, head_dim) and v_cache, hostile in the pages `filled`, in the case's memory layout."""
    f, size, pool = case.family, case.page_size, shape.pages
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
    judged = shape.layers // 2
    if case.layout in SPARSE:
        numel = pool * shape.layers * 2 * size * f.kv_heads * wide
        pages = sparse_zeros(numel * dtype.itemsize).view(dtype).view(pool, shape.layers, 2, size, f.kv_heads, wide)
        _fill(pages, filled, judged, hostile(len(filled), 2, size, f.kv_heads, wide))
        for beside in range(max(0, judged - 1), min(shape.layers, judged + 2)):
            if beside != judged:
                _fill(pages, ids, beside, hostile(len(ids), 2, size, f.kv_heads, wide))
    else:
        pages = hostile(pool, shape.layers, 2, size, f.kv_heads, wide)
    return pages[:, judged, 0, ..., : f.head_dim], pages[:, judged, 1, ..., : f.head_dim_v]


def _fill(pages: Tensor, ids: Tensor, layer: int, values: Tensor) -> None:
    bits = _bits(pages)
    pages.view(bits)[ids, layer] = values.view(bits)


def _queries(case: Case, q: Tensor, fill: Fill) -> Tensor:
    """q (total_q + tail_rows, q_heads, head_dim), hostile past the plan.

    A slice of wider rows where the layout is strided, heads outermost where it is hnd.
    """
    rows, heads, dim = q.shape
    extra = 2 if case.layout == "strided" else 0
    shape = (heads + extra, rows + case.tail_rows, dim)
    if case.layout == "hnd":
        whole = _hostile(shape, q.dtype, fill, q).transpose(0, 1)
    else:
        whole = _hostile((shape[1], shape[0], dim), q.dtype, fill, q)
    view = whole[:, extra // 2 : extra // 2 + heads]
    view[:rows] = q
    return view


def _output(case: Case, writes_padding: bool) -> tuple[Tensor, Tensor]:
    """`out` inside a storage of canaries, laid out as q is, and which of the storage's bytes the kernel may write."""
    f = case.family
    dtype = TORCH_DTYPES[case.dtype]
    gap = 8 if case.layout == "strided" else 0
    rows = case.total_q + case.tail_rows
    outer = (f.q_heads, rows + 2 * GUARD_ROWS) if case.layout == "hnd" else (rows + 2 * GUARD_ROWS, f.q_heads)
    shape = (*outer, f.head_dim_v + gap)
    storage = canary(math.prod(shape) * dtype.itemsize)
    live = torch.zeros(*shape, dtype.itemsize, dtype=torch.bool)
    out = storage.view(dtype).view(shape)
    by_row = live
    if case.layout == "hnd":
        out, by_row = out.transpose(0, 1), live.transpose(0, 1)
    writable = rows if writes_padding else case.total_q
    by_row[GUARD_ROWS : GUARD_ROWS + writable, :, : f.head_dim_v] = True
    return out[GUARD_ROWS : GUARD_ROWS + rows, :, : f.head_dim_v], live.flatten()
