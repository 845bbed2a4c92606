"""Paged variable-length attention in Triton, for prefill and decode: the whole kernel contract.

One program owns a tile of query rows of one sequence and one kv head.  The rows of a sequence are its (token, query head of
the group) pairs, tokens outermost, so that a tile is full whatever the group is.  It walks the keys that its rows see in
tiles of `key_tile` keys, with a running maximum (flash attention); the row sum is taken before P is rounded to the format
of q.  `prefill_16`, `prefill_32` and `prefill_64` differ in the number of rows of a query tile only: a row meets the same
keys in the same order in each of them.  Interpreted, the three give the same bits.  Compiled for an H200, the first two do in
bf16 and fp16; in fp32, and with 64 rows, Triton lays out a tile differently and with it the order of the row sum.

On a machine without a GPU the kernels run in Triton's interpreter; `oracle.kernels.triton_language` says how.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The compiled functions below are written in Triton's language, which has no types that mypy knows.

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from oracle.contract import Kernel, Precision
from oracle.kernels.triton_host import Launch, as_bytes, triton_kernel
from oracle.kernels.triton_language import (  # before Triton: on a machine without a GPU it switches the interpreter on
    FLOOR,
    device_function,
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

from oracle.kernels.triton_tiles import head_scale, page_at, place, rows_of


@device_function
def _truncated(p):
    """p without the bits that bf16 has not."""
    return (p.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _prefill(
    q_ptr,
    k_ptr,
    v_ptr,
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
    DIM_V_PAD: tl.constexpr,
    LEFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TRUNCATE: tl.constexpr,
):
    """Writes `out` and, where lse_ptr is given, the LSE of one tile of ROWS query rows and one kv head.

    Pointers that may be None: lse, sinks and the three scales.  Strides are tuples in elements, of the tensor's own order; those
    of the page table are `table_stride` and `table_step`.  Addresses are int64: a pool may hold more than 2^31 elements.
    """
    seq, start, q_len, kv_len, row_begin, row_end = place(cu_ptr, used_ptr, seqs, GROUP, SEQS, ROWS)
    if row_begin >= row_end:
        return
    kv_head = tl.program_id(1).to(tl.int64)
    dtype = q_ptr.dtype.element_ty

    row = row_begin + tl.arange(0, ROWS)
    live = row < row_end
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    pos = kv_len - q_len + token
    row_lo = (pos - left).to(tl.int32)[:, None]
    row_hi = tl.minimum(pos + right + 1, kv_len).to(tl.int32)[:, None]
    lo = (tl.maximum(kv_len - q_len + row_begin // GROUP - left, 0) // KEYS * KEYS).to(tl.int32)
    hi = tl.minimum(kv_len - q_len + (row_end - 1) // GROUP + right + 1, kv_len).to(tl.int32)

    d = tl.arange(0, DIM_PAD).to(tl.int64)[None, :]
    q_rows = q_ptr + (start + token) * q_strides[0] + head * q_strides[1]
    q = operand(tl.load(q_rows[:, None] + d * q_strides[2], mask=live[:, None] & (d < DIM), other=0), dtype)
    table = table_ptr + seq * table_stride
    scale *= head_scale(q_scale_ptr, q_scale_strides, seq, kv_head)
    scale *= head_scale(k_scale_ptr, k_scale_strides, seq, kv_head)
    out_scale *= head_scale(v_scale_ptr, v_scale_strides, seq, kv_head)

    m = tl.full([ROWS], FLOOR, tl.float32)
    denominator = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, DIM_V_PAD], 0.0, tl.float32)

    for begin in range(lo, hi, KEYS):
        page = page_at(table, table_step, begin, hi, PAGE, KEYS, False)
        k = rows_of(k_ptr, k_strides, page, begin, hi, kv_head, 0, DIM, DIM_PAD, PAGE, KEYS, False, False)
        s = dot(q, tl.trans(operand(k, dtype))) * scale
        if SOFTCAP:
            s = softcap * tanh(s / softcap)
        key = tl.add(tl.arange(0, KEYS), begin, sanitize_overflow=False)[None, :]
        seen = (key >= row_lo) & (key < row_hi) if LEFT else key < row_hi
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, largest(s, 1))
        p = tl.exp(s - m_new[:, None])
        fade = tl.exp(m - m_new)
        denominator = denominator * fade + total(p, 1)
        v = rows_of(v_ptr, v_strides, page, begin, hi, kv_head, 0, DIM_V, DIM_V_PAD, PAGE, KEYS, False, False)
        if TRUNCATE:
            p = _truncated(p)
        weights = rounded(p, dtype)
        acc = acc * fade[:, None] + dot(weights, operand(v, dtype))
        m = m_new

    if sinks_ptr is not None:  # last, so that weights are rounded beside the largest of them and not beside the sink
        sink = tl.load(sinks_ptr + head, mask=live, other=0).to(tl.float32)
        m_new = tl.maximum(m, sink)
        fade = tl.exp(m - m_new)
        denominator = denominator * fade + tl.exp(sink - m_new)
        acc *= fade[:, None]
        m = m_new
    empty = denominator == 0.0  # no key and no sink; else the largest term alone is 1
    divisor = tl.where(empty, 1.0, denominator)
    result = stored(acc / divisor[:, None] * out_scale, out_ptr.dtype.element_ty)
    dv = tl.arange(0, DIM_V_PAD).to(tl.int64)[None, :]
    out_rows = out_ptr + (start + token) * out_strides[0] + head * out_strides[1]
    tl.store(out_rows[:, None] + dv * out_strides[2], result, mask=live[:, None] & (dv < DIM_V))
    if lse_ptr is not None:
        lse = tl.where(empty, float("-inf"), m + tl.log(divisor))
        tl.store(lse_ptr + (start + token) * HEADS + head, lse, mask=live)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiling:
    """How the query rows are cut into tiles, and what is compiled for one."""

    rows: int  # query rows of a tile
    warps: int
    truncate: bool = False  # P is truncated to bf16, the planted fault


def _start(tiling: _Tiling, launch: Launch) -> None:
    """Launches `_prefill` under `tiling`."""
    call = launch.call
    _prefill[(launch.tiles(tiling.rows), call.k_cache.shape[2])](
        **launch.arguments,
        k_ptr=as_bytes(call.k_cache),
        v_ptr=as_bytes(call.v_cache),
        ROWS=tiling.rows,
        KEYS=launch.keys,
        DIM_PAD=launch.dim_pad,
        DIM_V_PAD=launch.dim_v_pad,
        TRUNCATE=tiling.truncate,
        num_warps=tiling.warps,
        num_stages=2 if launch.keys * launch.dim_pad * call.q.element_size() <= 2**14 else 1,
    )


def _kernel(name: str, what: str, tiling: _Tiling, dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")) -> Kernel:
    """The kernel of the contract that runs `_prefill` under `tiling`, with its record."""
    # exp is ex2.approx on a GPU (2^-22) and NumPy's on the CPU (measured: 2^-22.2).
    precision = Precision(eps_exp=2.0**-21, eps_tanh=2.0**-19, subtract_first=True)
    return triton_kernel(name, what, partial(_start, tiling), who="kernels/triton_prefill.py", dtypes=dtypes, precision=precision)


prefill_16 = _kernel("prefill_16", "Attention by the contract, in tiles of 16 query rows.", _Tiling(rows=16, warps=4))
prefill_32 = _kernel("prefill_32", "Attention by the contract, in tiles of 32 query rows.", _Tiling(rows=32, warps=4))
prefill_64 = _kernel("prefill_64", "Attention by the contract, in tiles of 64 query rows.", _Tiling(rows=64, warps=8))
prefill_truncating = _kernel(
    "prefill_truncating",
    "Wrong on purpose: `prefill_16` with P truncated to bf16, as Triton's interpreter casts it, where its record says rounded.",
    _Tiling(rows=16, warps=4, truncate=True),
    dtypes=("bf16",),
)
