"""Paged variable-length prefill in Triton for Hopper, the output's head dim split over programs: the whole kernel contract.

An output of 128 rows by 512 columns does not fit into the registers of one program.  Here a program owns a tile of query rows,
one kv head and at most 256 columns of the output; programs that share rows each compute the scores.  Where a page of the pool
holds whole key tiles, the copy engine fetches a tile of K and one of V through a tensor descriptor each; elsewhere every row of
a tile has its own address.  The keys that all rows of a tile see are walked without a mask, those at the edges with one.

`split_64`, the incumbent, and `split_tuned`, the candidate, differ in the rows of a tile, the warps that share them and how
the compiler is told to treat them.  A row meets the same keys in the same order in both.  Scores are kept in powers of two, so
that exp is the hardware's ex2.approx; products and differences of them are never fused, so that the largest weight of a row
is 1 whatever the logits are.

On a machine without a GPU the kernels run in Triton's interpreter, without the copy engine; `oracle.kernels.triton_language`
says how.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The compiled functions below are written in Triton's language, which has no types that mypy knows.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from oracle.contract import Kernel, Precision
from oracle.kernels.triton_host import Launch, as_bytes, triton_kernel
from oracle.kernels.triton_language import (  # before Triton: on a machine without a GPU it switches the interpreter on
    FLOOR,
    INTERPRETED,
    LN2,
    LOG2E,
    dot,
    largest,
    operand,
    rounded,
    stored,
    tanh,
    total,
)

# isort: split

import triton
import triton.language as tl

from oracle.kernels.triton_tiles import descriptor, fits_tma, head_scale, page_at, place, rows_of

_WIDTH = 256  # columns of the output that a program owns at most
_SHARED = 220 * 2**10  # bytes of shared memory that tiles may take; a program has 227 KiB
_Pick = Callable[[int, bool], "_Tiling"]  # the tiling for heads padded to so many columns, with the copy engine or without


@triton.jit(do_not_specialize=["table_stride", "table_step", "seqs", "scale", "out_scale", "softcap", "left", "right"])
def _prefill(
    q_ptr,
    k_source,
    v_source,
    out_ptr,
    lse_ptr,
    cu_ptr,
    used_ptr,
    table_ptr,
    sinks_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    q_scale_strides,
    k_scale_strides,
    v_scale_strides,
    table_stride,
    table_step,
    seqs,
    scale,
    out_scale,
    softcap,
    left,
    right,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    PAGE: tl.constexpr,
    SEQS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    LEFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Writes columns of `out`, and its first part the LSE where lse_ptr is given, of a tile of query rows and one kv head.

    `k_source` and `v_source` are the pools or, with TMA, descriptors of them as (pages, kv_heads, page_size, dim).  Pointers
    that may be None: lse, sinks and the three scales.  Strides are tuples in elements, of the tensor's own order; those of the
    page table are `table_stride` and `table_step`, for which, as for all else that changes from call to call, Triton compiles
    no variants (it would for each member of a tuple).
    """
    seq, start, q_len, kv_len, row_begin, row_end = place(cu_ptr, used_ptr, seqs, GROUP, SEQS, ROWS)
    if row_begin >= row_end:
        return
    kv_head = (tl.program_id(1) // PARTS).to(tl.int64)
    part = tl.program_id(1) % PARTS
    dtype = q_ptr.dtype.element_ty

    row = tl.arange(0, ROWS) + (row_begin % GROUP).to(tl.int32)  # of those from the tile's first token on
    live = row < (row_end - row_begin // GROUP * GROUP).to(tl.int32)
    token = row // GROUP
    head = row % GROUP
    first_pos = kv_len - q_len + row_begin // GROUP
    last_pos = kv_len - q_len + (row_end - 1) // GROUP
    pos = first_pos.to(tl.int32) + token
    row_lo = (pos - left)[:, None]
    row_hi = tl.minimum(pos + right + 1, kv_len.to(tl.int32))[:, None]
    lo = (tl.maximum(first_pos - left, 0) // KEYS * KEYS).to(tl.int32)
    hi = tl.minimum(last_pos + right + 1, kv_len).to(tl.int32)
    # Every row sees all keys of the tiles between these two.
    whole_lo = (tl.maximum(last_pos - left + KEYS - 1, 0) // KEYS * KEYS).to(tl.int32)
    whole_hi = (tl.maximum(tl.minimum(first_pos + right + 1, kv_len), 0) // KEYS * KEYS).to(tl.int32)

    d = tl.arange(0, DIM_PAD).to(tl.int64)[None, :]
    start += row_begin // GROUP
    q_rows = q_ptr + start * q_strides[0] + kv_head * GROUP * q_strides[1]
    q_rows += token.to(tl.int64) * q_strides[0] + head.to(tl.int64) * q_strides[1]
    q = operand(tl.load(q_rows[:, None] + d * q_strides[2], mask=live[:, None] & (d < DIM), other=0), dtype)
    table = table_ptr + seq * table_stride
    scale *= head_scale(q_scale_ptr, q_scale_strides, seq, kv_head)
    scale *= head_scale(k_scale_ptr, k_scale_strides, seq, kv_head)
    out_scale *= head_scale(v_scale_ptr, v_scale_strides, seq, kv_head)

    m = tl.full([ROWS], FLOOR, tl.float32)  # of logits over ln 2
    denominator = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, WIDTH], 0.0, tl.float32)
    if not SOFTCAP:
        scale *= LOG2E

    for span in tl.static_range(0 if LEFT else 1, 3):  # the window's left edge, the keys that all rows see, the rest
        if span == 0:
            begin, end = lo, tl.minimum(whole_lo, hi)
        elif span == 1:
            begin, end = whole_lo if LEFT else lo, whole_hi
        else:
            begin, end = tl.maximum(whole_lo if LEFT else lo, whole_hi), hi
        ahead = page_at(table, table_step, begin, end, PAGE, KEYS, TMA)
        for at in tl.range(begin, end, KEYS):
            page = ahead
            ahead = page_at(table, table_step, at + KEYS, end, PAGE, KEYS, TMA)  # fetched while this tile is worked on
            k = rows_of(k_source, k_strides, page, at, end, kv_head, 0, DIM, DIM_PAD, PAGE, KEYS, TMA, span == 1)
            s = dot(q, tl.trans(operand(k, dtype))) * scale
            if EARLY:
                v = rows_of(v_source, v_strides, page, at, end, kv_head, part * WIDTH, DIM_V, WIDTH, PAGE, KEYS, TMA, span == 1)
            if SOFTCAP:
                s = (softcap * LOG2E) * tanh(s / softcap)
            key = tl.add(tl.arange(0, KEYS), at, sanitize_overflow=False)
            if span != 1:
                seen = (key[None, :] >= row_lo) & (key[None, :] < row_hi) if LEFT else key[None, :] < row_hi
                s = tl.where(seen, s, float("-inf"))
            m_new = tl.maximum(m, largest(s, 1))
            p = tl.exp2(s - m_new[:, None])
            fade = tl.exp2(m - m_new)
            denominator = denominator * fade + total(p, 1)
            if not EARLY:
                v = rows_of(v_source, v_strides, page, at, end, kv_head, part * WIDTH, DIM_V, WIDTH, PAGE, KEYS, TMA, span == 1)
            if TMA and span != 1:
                v = tl.where((key < end)[:, None], v, 0.0)  # what lies past the plan may be NaN
            weights = rounded(p, dtype)
            acc = acc * fade[:, None] + dot(weights, operand(v, dtype))
            m = m_new

    top = m * LN2
    if sinks_ptr is not None:  # last, so that weights are rounded beside the largest of them and not beside the sink
        sink = tl.load(sinks_ptr + kv_head * GROUP + head, mask=live, other=0).to(tl.float32)
        m_new = tl.maximum(m, sink * LOG2E)
        fade = tl.exp2(m - m_new)
        denominator = denominator * fade + tl.exp2(sink * LOG2E - m_new)
        acc *= fade[:, None]
        top = tl.where(m_new > m, sink, top)
    empty = denominator == 0.0  # no key and no sink; else the largest term alone is 1
    divisor = tl.where(empty, 1.0, denominator)
    result = stored(acc / divisor[:, None] * out_scale, out_ptr.dtype.element_ty)
    dv = (part * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)[None, :]
    out_rows = out_ptr + start * out_strides[0] + kv_head * GROUP * out_strides[1]
    out_rows += token.to(tl.int64) * out_strides[0] + head.to(tl.int64) * out_strides[1]
    tl.store(out_rows[:, None] + dv * out_strides[2], result, mask=live[:, None] & (dv < DIM_V))
    if lse_ptr is not None:  # noqa: SIM102  # two ifs: the first is decided at compile time, where lse_ptr may be None
        if part == 0:
            lse = tl.where(empty, float("-inf"), top + tl.log(divisor))
            tl.store(lse_ptr + (start + token) * HEADS + kv_head * GROUP + head, lse, mask=live)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """How the query rows are cut into tiles, and how the compiler treats one."""

    rows: int  # query rows of a tile
    warps: int
    stages: int | None = None  # key tiles in flight, None = as many as shared memory holds, up to 3
    registers: int | None = None  # of a thread at most; 128 let two programs of 8 warps share a multiprocessor
    early: bool = False  # V is asked for before the softmax, not after it


# By the larger of head_dim and the columns of a program.  Measured on an H200 (docs/kernels.md).
_TUNED = {
    64: _Tiling(rows=128, warps=4, stages=3),
    128: _Tiling(rows=128, warps=8, stages=2, registers=128, early=True),
    256: _Tiling(rows=128, warps=8, stages=2, early=True),
    512: _Tiling(rows=128, warps=8, stages=1),
    1024: _Tiling(rows=64, warps=4, stages=1),
}


def _plain(size: int, tma: bool) -> _Tiling:
    """The tiling of `split_64`."""
    return _Tiling(rows=64, warps=4)


def _tuned(size: int, tma: bool) -> _Tiling:
    """The tiling of `split_tuned` for heads padded to `size` columns; what is tuned by measurement is so for `tma` only."""
    return _TUNED[max(64, size)] if tma else _Tiling(rows=min(128, 2**16 // size), warps=8 if size <= 512 else 4)


def _start(pick: _Pick, launch: Launch) -> None:
    """Launches `_prefill` in the tiles that `pick` gives."""
    call, keys, dim_pad = launch.call, launch.keys, launch.dim_pad
    caches, size = (call.k_cache, call.v_cache), call.q.element_size()
    width = min(launch.dim_v_pad, _WIDTH)
    parts = launch.dim_v_pad // width
    tma = not INTERPRETED and all(cache.dtype == call.q.dtype and fits_tma(cache, keys) for cache in caches)
    tiling = pick(max(dim_pad, width), tma)
    room = _SHARED - tiling.rows * dim_pad * size
    _prefill[(launch.tiles(tiling.rows), call.k_cache.shape[2] * parts)](
        **launch.arguments,
        k_source=descriptor(call.k_cache, keys, dim_pad) if tma else as_bytes(call.k_cache),
        v_source=descriptor(call.v_cache, keys, width) if tma else as_bytes(call.v_cache),
        ROWS=tiling.rows,
        KEYS=keys,
        DIM_PAD=dim_pad,
        WIDTH=width,
        PARTS=parts,
        TMA=tma,
        EARLY=tiling.early,
        num_warps=tiling.warps,
        num_stages=tiling.stages or max(1, min(3, room // (keys * (dim_pad + width) * size))),
        maxnreg=tiling.registers,
        enable_fp_fusion=False,
    )


def _kernel(name: str, what: str, pick: _Pick) -> Kernel:
    """The kernel of the contract that runs `_prefill` in the tiles that `pick` gives, with its record."""
    # exp2 is ex2.approx on a GPU (2^-22.7) and NumPy's on the CPU.
    precision = Precision(eps_exp=2.0**-22, eps_tanh=2.0**-19, subtract_first=True)
    return triton_kernel(
        name, what, partial(_start, pick), who="kernels/triton_split.py", dtypes=("bf16", "fp16"), precision=precision
    )


split_64 = _kernel("split_64", "Attention by the contract, 64 rows by 4 warps whatever the head dim: the incumbent.", _plain)
split_tuned = _kernel("split_tuned", "Attention by the contract, tiles tuned by head dim for an H200: the candidate.", _tuned)
