"""Faults of the call: what a kernel misreads of its options, scales and heads.

Each patch is a function from a run to the call that the body sees, or makes one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oracle.contract import Call
from oracle.mutants.mutant import Before, Run
from oracle.references.plan import head_scales

Scale = Tensor | float | None


def having(**options: Any) -> Before:
    """The call with other options."""
    return lambda run: replace(run.call, **options)


def with_call(change: Callable[[Call], Call]) -> Before:
    """A change that needs no more than the call."""
    return lambda run: change(run.call)


def then(*patches: Before) -> Before:
    """One patch after the other."""

    def before(run: Run) -> Call:
        for patch in patches:
            run = replace(run, call=patch(run))
        return run.call

    return before


def compact(call: Call) -> Call:
    """The call on the pages that its table names, and no other: a copy of a whole pool could exceed any memory."""
    ids, table = torch.unique(call.page_table.long() % call.k_cache.shape[0], return_inverse=True)
    pages = {name: _picked(getattr(call, name), ids, 0) for name in ("k_cache", "v_cache")}
    return replace(call, k_cache=pages["k_cache"], v_cache=pages["v_cache"], page_table=table)


def _picked(cache: Tensor, index: Tensor, axis: int) -> Tensor:
    """The cache's slices `index` along an axis; not every format can be indexed."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.dtype.itemsize]
    return cache.view(bits).index_select(axis, index.to(cache.device)).view(cache.dtype)


# The softmax scale and the softcap


def scale_is(rule: Callable[[Call], float]) -> Before:
    """The softmax scale by a rule of the kernel's own."""
    return with_call(lambda call: replace(call, softmax_scale=rule(call)))


def softcap_is(rule: Callable[[Call], float]) -> Before:
    """The softcap by a rule of the kernel's own, where there is one."""
    return with_call(lambda call: replace(call, softcap=rule(call)) if call.softcap > 0 else call)


def to_bf16(value: float) -> float:
    """The nearest bf16 number."""
    return float(torch.tensor(value).bfloat16())


# The window


def window_is(rule: Callable[[int, int], tuple[int, int]]) -> Before:
    """The window by a rule of the kernel's own, where there is one."""

    def change(call: Call) -> Call:
        return call if call.window_size == (-1, -1) else replace(call, window_size=rule(*call.window_size))

    return with_call(change)


# Sinks


def sinks_are(rule: Callable[[Tensor, Call], Tensor]) -> Before:
    """The sinks by a rule of the kernel's own, where there are some."""
    return with_call(lambda call: call if call.sinks is None else replace(call, sinks=rule(call.sinks, call)))


# Dequantisation scales


def scales_are(rule: Callable[[Tensor], Tensor], *names: str) -> Before:
    """Those of the scales named that are there, as (sequences, kv_heads), by a rule of the kernel's own."""

    def change(call: Call) -> Call:
        def table(scale: Scale) -> Scale:
            return None if scale is None else rule(head_scales(scale, call.live_seqs, call.k_cache.shape[2]).clone())

        changed: dict[str, Any] = {name: table(getattr(call, name)) for name in names}
        return replace(call, **changed)

    return with_call(change)


def k_and_v_scales_swapped(run: Run) -> Call:
    """k_scale where v_scale belongs, and the other way round."""
    return replace(run.call, k_scale=run.call.v_scale, v_scale=run.call.k_scale)


def views_are(rule: Callable[[Tensor], Tensor], *names: str) -> Before:
    """The tensors named, each by a rule that gives a view."""

    def change(call: Call) -> Call:
        changed: dict[str, Any] = {name: rule(getattr(call, name)) for name in names}
        return replace(call, **changed)

    return with_call(change)


def values_are(rule: Callable[[Tensor], Tensor], *names: str) -> Before:
    """The tensors named, each by a rule that gives a copy."""
    return then(with_call(compact), views_are(rule, *names))


def reread(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The bits of an 8-bit cache taken for another 8-bit format; other caches are left alone."""
    return lambda cache: cache.view(dtype).float() if cache.dtype.itemsize == 1 else cache


def saturated(limit: float) -> Callable[[Tensor], Tensor]:
    """A cache of 16 bits or more, clamped."""
    return lambda cache: cache if cache.dtype.itemsize == 1 else cache.clamp(-limit, limit)


def tf32(x: Tensor) -> Tensor:
    """float32 cut to ten bits of mantissa; other formats are left alone."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) if x.dtype == torch.float32 else x


# Heads


def heads_read(rule: Callable[[Tensor, int, int], Tensor]) -> Before:
    """Each query head reads the kv head that the rule gives from its number, the group size and the number of kv heads."""

    def change(call: Call) -> Call:
        q_heads, kv_heads = call.q.shape[1], call.k_cache.shape[2]
        index = rule(torch.arange(q_heads), q_heads // kv_heads, kv_heads).clamp(0, kv_heads - 1)
        call = compact(call)
        tables: dict[str, Any] = {
            name: None if scale is None else head_scales(scale, call.live_seqs, kv_heads)[:, index]
            for name, scale in (("q_scale", call.q_scale), ("k_scale", call.k_scale), ("v_scale", call.v_scale))
        }
        return replace(call, k_cache=_picked(call.k_cache, index, 2), v_cache=_picked(call.v_cache, index, 2), **tables)

    return with_call(change)


def dims_are(rule: Callable[[int], int]) -> Before:
    """q.k over the first dims only, as many as the rule makes of head_dim."""

    def change(call: Call) -> Call:
        dims = rule(call.q.shape[2])
        return replace(call, q=call.q[..., :dims], k_cache=call.k_cache[..., :dims])

    return with_call(change)
