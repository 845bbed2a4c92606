"""Faults of the plan: what a kernel misreads of its page table, its lengths and its strides, or keeps of an earlier call's.

Patches as in `oracle.mutants.patches`.  Wild page ids are wrapped to the pool, so that a mutant computes a wrong number where
a GPU would read another page or the memory next door.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oracle.contract import Call
from oracle.mutants.mutant import Before, Run
from oracle.mutants.patches import with_call

# The page table


def wrapped(table: Tensor, call: Call) -> Tensor:
    """Page ids brought into the pool."""
    return torch.remainder(table.long(), call.k_cache.shape[0])


def pages_are(rule: Callable[[Tensor, Call], Tensor]) -> Before:
    """The page table (rows, columns) int64 by a rule of the kernel's own, wrapped to the pool."""

    def change(call: Call) -> Call:
        return replace(call, page_table=wrapped(rule(call.page_table.long(), call), call))

    return with_call(change)


def page_count(call: Call) -> Tensor:
    """Live pages of each live sequence, (sequences, 1) int64."""
    return -(-call.seqused_k[: call.live_seqs, None].long() // call.k_cache.shape[1])


def live_pages_are(rule: Callable[[Tensor, Tensor, Call], Tensor]) -> Before:
    """Which logical page stands in which place: the rule gets the places (1, columns) and the counts (sequences, 1)."""

    def change(table: Tensor, call: Call) -> Tensor:
        count = page_count(call)
        place = torch.arange(table.shape[1])[None]
        which = torch.where(place < count, rule(place, count, call), place).clamp(0, table.shape[1] - 1)
        live = torch.gather(table[: call.live_seqs], 1, which.expand(call.live_seqs, -1))
        return torch.cat([live, table[call.live_seqs :]])

    return pages_are(change)


def consecutive(table: Tensor, call: Call) -> Tensor:
    """Pages taken for one run of the pool from each sequence's first on."""
    return table[:, :1] + torch.arange(table.shape[1])


def packed_table(table: Tensor, call: Call) -> Tensor:
    """Rows looked up with a stride of the most pages in use instead of the table's."""
    used = max(1, int(page_count(call).max())) if call.live_seqs else 1
    index = torch.arange(table.shape[0])[:, None] * used + torch.arange(table.shape[1])
    return table.flatten()[index % table.numel()]


def page_offset_wraps(bits: int) -> Callable[[Tensor, Call], Tensor]:
    """Page id times page stride in a signed integer of so many bits: the page that the wrapped offset falls in."""

    def rule(table: Tensor, call: Call) -> Tensor:
        stride = max(1, call.k_cache.stride(0))
        offset: Tensor = torch.remainder(table * stride + 2 ** (bits - 1), 2**bits) - 2 ** (bits - 1)
        return offset // stride

    return rule


# Lengths and offsets


def kv_lens_are(rule: Callable[[Tensor, Call], Tensor]) -> Before:
    """The number of keys of each live sequence (sequences,) int64 by a rule of the kernel's own; ids past the plan wrap."""

    def change(call: Call) -> Call:
        lengths = rule(call.seqused_k[: call.live_seqs].long(), call)
        lengths = lengths.clamp(0, call.page_table.shape[1] * call.k_cache.shape[1])
        seqused_k = torch.cat([lengths, call.seqused_k[call.live_seqs :].long()])
        return replace(call, seqused_k=seqused_k, page_table=wrapped(call.page_table, call))

    return with_call(change)


def whole_last_page(lengths: Tensor, call: Call) -> Tensor:
    """The length rounded up to whole pages."""
    size = call.k_cache.shape[1]
    return -(-lengths // size) * size


def one_page_more(lengths: Tensor, call: Call) -> Tensor:
    """A page past the end where the last one is full."""
    size = call.k_cache.shape[1]
    return torch.where((lengths % size == 0) & (lengths > 0), lengths + size, lengths)


def q_lens_are(rule: Callable[[Tensor], Tensor]) -> Before:
    """The offsets of the live sequences in q (sequences + 1,) int64 by a rule of the kernel's own."""

    def change(call: Call) -> Call:
        live = call.live_seqs + 1
        cu = call.cu_seqlens_q.long()
        return replace(call, cu_seqlens_q=torch.cat([rule(cu[:live]), cu[live:]]))

    return with_call(change)


def even_split(cu: Tensor) -> Tensor:
    """All sequences taken for equally long, the last one takes what is left."""
    count = max(1, len(cu) - 1)
    even = torch.arange(len(cu)) * (int(cu[-1]) // count)
    return torch.cat([even[:-1], cu[-1:]])


# Strides


def restrided(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """`x` read with other strides from the same first element; offsets past its storage wrap."""
    size = x.untyped_storage().nbytes() // x.dtype.itemsize
    furthest = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    if x.numel() == 0 or furthest < size:
        return x.as_strided(x.shape, strides)
    at = torch.tensor(x.storage_offset())
    for n, s in zip(x.shape, strides, strict=True):
        at = at[..., None] + torch.arange(n) * s
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize]
    whole = x.view(bits).as_strided((size,), (1,), 0)
    return whole[at % size].view(x.dtype)


def packed_strides(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor of that shape."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def as_packed(x: Tensor) -> Tensor:
    """`x` read as if it were contiguous."""
    return restrided(x, packed_strides(x.shape))


def pages_as_packed(cache: Tensor) -> Tensor:
    """The page stride taken for page size times slot stride."""
    return restrided(cache, (cache.shape[1] * cache.stride(1), *cache.stride()[1:]))


def as_hnd(cache: Tensor) -> Tensor:
    """(pages, slots, heads, dim) read as if heads came before slots."""
    slots, heads, dim = cache.shape[1:]
    return restrided(cache, (slots * heads * dim, dim, slots * dim, 1))


def strides_swapped(run: Run) -> Call:
    """K read with V's strides and V with K's."""
    k, v = run.call.k_cache, run.call.v_cache
    return replace(run.call, k_cache=restrided(k, v.stride()), v_cache=restrided(v, k.stride()))


def q_as_packed(call: Call) -> Call:
    """q read as if it were contiguous."""
    return replace(call, q=as_packed(call.q))


def v_inside_k(run: Run) -> Call:
    """V read from where K starts."""
    k, v = run.call.k_cache, run.call.v_cache
    size = v.untyped_storage().nbytes() // v.dtype.itemsize
    furthest = k.storage_offset() + sum((n - 1) * s for n, s in zip(v.shape, v.stride(), strict=True))
    shared = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() and furthest < size
    return replace(run.call, v_cache=v.as_strided(v.shape, v.stride(), k.storage_offset())) if shared else run.call


def first_layout_again(run: Run) -> Call:
    """K read with the strides of the first call of the same shapes."""
    before = run.first_of_shape
    return run.call if before is None else replace(run.call, k_cache=restrided(run.call.k_cache, before.strides))


def sorted_ids(table: Tensor, call: Call) -> Tensor:
    """The live entries of each row in ascending order."""
    live = torch.arange(table.shape[1]) < page_count(call)
    ordered = torch.where(live, table[: call.live_seqs], 2**40).sort(1).values
    return torch.cat([torch.where(live, ordered, table[: call.live_seqs]), table[call.live_seqs :]])


def table_of_other_rows(table: Tensor, call: Call) -> Tensor:
    """Each sequence reads the row of the one before it, whose entries past its own pages wrap."""
    return torch.cat([table[: call.live_seqs].roll(1, 0), table[call.live_seqs :]])


def q_lens(call: Call) -> Tensor:
    """New tokens of each live sequence, (sequences,) int64."""
    cu = call.cu_seqlens_q[: call.live_seqs + 1].long()
    return cu[1:] - cu[:-1]


def as_seen_first(*names: str) -> Before:
    """The arguments named are those of the first call of the same shapes, where they fit this one."""

    def before(run: Run) -> Call:
        first = run.first_of_shape
        if first is None:
            return run.call
        kept: dict[str, Any] = {name: getattr(first.call, name) for name in names}
        call = replace(run.call, **kept)
        lengths_fit = int(call.cu_seqlens_q[call.live_seqs]) == len(run.plan)
        return replace(call, page_table=wrapped(call.page_table, call)) if lengths_fit else run.call

    return before
