"""Faults of writing: what a kernel leaves out of its buffers, and what else it writes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.contract import Call
from oracle.mutants.addressing import packed_strides, page_count, wrapped
from oracle.mutants.mutant import Result, Run, Write, written


def left_out(run: Run, chosen: Tensor, result: Result, buffers: Result) -> None:
    """The chosen pairs are never written: neither output nor LSE."""
    for buffer, rows in zip(buffers, result, strict=True):
        buffer[: len(rows)][~chosen] = rows[~chosen]


def out_left_out(run: Run, chosen: Tensor, result: Result, buffers: Result) -> None:
    """The output of the chosen pairs is never written, their LSE is."""
    buffers[0][: len(chosen)][~chosen] = result[0][~chosen]
    buffers[1][: len(chosen)] = result[1]


def lse_left_out(run: Run, chosen: Tensor, result: Result, buffers: Result) -> None:
    """The LSE of the chosen pairs is never written, their output is."""
    buffers[0][: len(chosen)] = result[0]
    buffers[1][: len(chosen)][~chosen] = result[1][~chosen]


def columns_left_out(start: int) -> Write:
    """The columns of the output from `start` on are never written at the chosen pairs."""

    def write(run: Run, chosen: Tensor, result: Result, buffers: Result) -> None:
        mask = chosen[..., None] & (torch.arange(result[0].shape[-1]) >= start)
        live = buffers[0][: len(chosen)]
        live[~mask] = result[0][~mask]
        buffers[1][: len(chosen)] = result[1]

    return write


def added(run: Run, chosen: Tensor, result: Result, buffers: Result) -> None:
    """The output is added to what the caller left in the buffer."""
    held = buffers[0][: len(chosen)].clone()
    written(result, buffers)
    buffers[0][: len(chosen)][chosen] += held[chosen]


def padding_zeroed(rows: int) -> Write:
    """Rows past the plan become 0, up to a whole tile of `rows` rows."""

    def write(run: Run, chosen: Tensor, result: Result, buffers: Result) -> None:
        written(result, buffers)
        live = len(chosen)
        buffers[0][live : -(-live // rows) * rows] = 0

    return write


def row_before(run: Run, chosen: Tensor, result: Result, buffers: Result) -> None:
    """The last live row is written once more, before the first."""
    written(result, buffers)
    out = buffers[0]
    if run.call.out is not None and len(chosen):
        out.as_strided(out.shape[1:], out.stride()[1:], out.storage_offset() - out.stride(0)).copy_(result[0][-1])


def as_if_packed(run: Run, chosen: Tensor, result: Result, buffers: Result) -> None:
    """The output is written as if `out` were contiguous."""
    out = buffers[0]
    packed = out.as_strided(out.shape, packed_strides(out.shape))
    packed[: len(chosen)] = result[0]
    buffers[1][: len(chosen)] = result[1]


def neighbours_zeroed(run: Run, chosen: Tensor, result: Result, buffers: Result) -> None:
    """Each chosen row also zeroes the row after it, whosever that is."""
    written(result, buffers)
    rows = chosen.any(1).nonzero().flatten() + 1
    buffers[0][rows[rows < len(buffers[0])]] = 0


def lse_transposed(run: Run, chosen: Tensor, result: Result, buffers: Result) -> None:
    """The LSE is written heads first into a buffer of rows first."""
    written(result, buffers)
    buffers[1][: len(chosen)] = result[1].T.reshape(result[1].shape)


def inputs_change(name: str, rule: Callable[[Tensor, Call], None]) -> Write:
    """An argument is changed in place by the way."""

    def write(run: Run, chosen: Tensor, result: Result, buffers: Result) -> None:
        written(result, buffers)
        rule(getattr(run.call, name), run.call)

    return write


def append_key(cache: Tensor, call: Call) -> None:
    """The slot after the last key of each sequence is written; where there is no page for it, in the next row's first page."""
    size, count = cache.shape[1], page_count(call).flatten()
    table = wrapped(call.page_table, call).flatten()
    columns = call.page_table.shape[1]
    for seq in range(call.live_seqs):
        page, slot = divmod(int(call.seqused_k[seq]), size)
        at = seq * columns + page if page < int(count[seq]) else (seq + 1) % call.live_seqs * columns
        cache[table[at], slot] = cache[table[at], slot].float().nan_to_num(0.0).neg().add(1.0).to(cache.dtype)


def scale_in_place(q: Tensor, call: Call) -> None:
    """q is multiplied by the softmax scale."""
    q.mul_(call.softmax_scale)


def clamp_ids(table: Tensor, call: Call) -> None:
    """Page ids out of range become ids of the pool."""
    table.clamp_(0, call.k_cache.shape[0] - 1)


def advance(lengths: Tensor, call: Call) -> None:
    """Each sequence is a key longer."""
    lengths.add_(1)


def clear_page_zero(cache: Tensor, call: Call) -> None:
    """The first page of the pool becomes 0."""
    cache[0].zero_()


def unpadded(run: Run, chosen: Tensor, result: Result, buffers: Result) -> None:
    """Sequences past the live batch write their rows too, as far as `out` has some."""
    written(result, buffers)
    padding = run.call.seqused_k.shape[0] - run.call.live_seqs
    buffers[0][len(chosen) : len(chosen) + padding] = 0
