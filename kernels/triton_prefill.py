"""Paged variable-length attention in Triton, for prefill and decode: the whole kernel contract.

One program owns a tile of query rows of one sequence and one kv head.  The rows of a sequence are its (token, query head of
the group) pairs, tokens outermost, so that a tile is full whatever the group is.  It walks the keys that its rows see in
tiles of `_key_tile` keys, with a running maximum (flash attention); the row sum is taken before P is rounded to the format
of q.  `prefill_16`, `prefill_32` and `prefill_64` differ in the number of rows of a query tile only: a row meets the same
keys in the same order in each of them.  Interpreted, the three give the same bits.  Compiled for an H200, the first two do in
bf16 and fp16; in fp32, and with 64 rows, Triton lays out a tile differently and with it the order of the row sum.

On a machine without a GPU the module switches Triton's interpreter on (`TRITON_INTERPRET=1`) before it imports Triton, and
the kernels then take CPU tensors.  Triton's interpreter multiplies the bit patterns of bf16 operands in `tl.dot` and
truncates when it casts fp32 to bf16, so interpreted programs widen operands to fp32 (exact) and round by hand.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The compiled functions below are written in Triton's language, which has no types that mypy knows.

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oracle.contract import Call, Kernel, Precision, Record

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when functions are decorated, so before the import

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max, _sum_combine

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_FLOOR = tl.constexpr(-1e37)  # running maximum before the first key; finite, so that no difference of infinities arises
_NO_LIMIT = 2**30  # a window bound that no sequence reaches and that int32 sums survive


def _device_function(fn: Callable[..., Any]) -> Any:
    """`fn` as a function that compiled programs may call.

    Interpreted, it stays a Python function: a call through `triton.jit` patches the whole language each time (0.2 ms).
    For the same reason the kernel reduces by `tl.reduce` and not by `tl.sum` and `tl.max`.
    """
    return fn if _INTERPRETED else triton.jit(fn)


@_device_function
def _operand(x, dtype: tl.constexpr, interpreted: tl.constexpr):
    """x, as loaded (e4m3 as uint8), as an operand of `tl.dot`: in dtype, or in fp32 where interpreted.  Exact."""
    if x.dtype == tl.uint8:
        x = x.to(tl.float8e4nv, bitcast=True)
    if not interpreted:
        return x.to(dtype)
    elif x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@_device_function
def _dot(a, b, interpreted: tl.constexpr):
    """a @ b, summed in fp32.  A row's bits do not depend on the number of rows of a, a multiple of 16, where interpreted."""
    if interpreted:
        # BLAS picks the order of its sums by the shape of the product, so all tilings call it with 16 rows.
        rows, inner, columns = a.shape[0], a.shape[1], b.shape[1]
        a = tl.reshape(a, [rows // 16, 16, inner])
        b = tl.broadcast_to(b[None, :, :], [rows // 16, inner, columns])
        return tl.reshape(tl.dot(a, b, input_precision="ieee"), [rows, columns])
    else:
        return tl.dot(a, b, input_precision="ieee")


@_device_function
def _bf16_bits(x):
    """fp32 bits of x rounded to bf16, to nearest, ties to even.  Right for all but NaNs with a payload of ones."""
    bits = x.to(tl.uint32, bitcast=True)
    odd = (bits >> 16) & 1
    return tl.add(tl.add(bits, 0x7FFF, sanitize_overflow=False), odd, sanitize_overflow=False)


@_device_function
def _weights(p, dtype: tl.constexpr, truncate: tl.constexpr, interpreted: tl.constexpr):
    """P rounded to dtype, as an operand of `tl.dot`.  truncate drops the low bits of a bf16 instead."""
    if truncate:
        p = (p.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    if not interpreted:
        return p.to(dtype)
    elif dtype == tl.bfloat16:
        return (_bf16_bits(p) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return p.to(dtype).to(tl.float32)


@_device_function
def _output(x, dtype: tl.constexpr, interpreted: tl.constexpr):
    """x in dtype, rounded to nearest, ties to even."""
    if interpreted and dtype == tl.bfloat16:
        return (_bf16_bits(x) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@_device_function
def _tanh(x):
    """tanh(x), relative error below 2^-20 for every x."""
    # (1 - e) / (1 + e) cancels near 0: with exp good to 2^-21 it is off by 1.6 * 2^-21 at 1/4, and more below.  There the
    # series to x^9 is off by 0.009 x^10 = 2^-27.
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    large = (1.0 - e) / (1.0 + e)
    y = tl.minimum(size * size, 0.0625)
    series = 1.0 + y * (-0.3333333333 + y * (0.1333333333 + y * (-0.0539682540 + y * 0.0218694885)))
    return tl.where(size < 0.25, x * series, tl.where(x < 0.0, -large, large))


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
    table_strides,
    q_scale_strides,
    k_scale_strides,
    v_scale_strides,
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
    INTERPRETED: tl.constexpr,
):
    """Writes `out` and, where lse_ptr is given, the LSE of one tile of ROWS query rows and one kv head.

    Pointers that may be None: lse, sinks and the three scales.  Strides are tuples in elements, of the tensor's own order.
    Addresses are int64: a pool may hold more than 2^31 elements.
    """
    tile = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)

    # Sequence i starts at tile cu[i] * GROUP // ROWS + i, which leaves it at least as many tiles as it fills: the grid
    # follows from sizes alone, without reading the plan on the host.
    i = tl.arange(0, SEQS).to(tl.int64)
    first = tl.load(cu_ptr + i, mask=i < seqs, other=0).to(tl.int64) * GROUP // ROWS + i
    seq = tl.reduce(((first <= tile) & (i < seqs)).to(tl.int64), 0, _sum_combine) - 1
    start = tl.load(cu_ptr + seq).to(tl.int64)
    q_len = tl.load(cu_ptr + seq + 1).to(tl.int64) - start
    kv_len = tl.load(used_ptr + seq).to(tl.int64)
    row_begin = (tile - start * GROUP // ROWS - seq) * ROWS
    row_end = tl.minimum(row_begin + ROWS, q_len * GROUP)
    if row_begin >= row_end:
        return

    row = row_begin + tl.arange(0, ROWS)
    live = row < row_end
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    pos = kv_len - q_len + token
    row_lo = (pos - left).to(tl.int32)[:, None]
    row_hi = tl.minimum(pos + right + 1, kv_len).to(tl.int32)[:, None]
    lo = (tl.maximum(kv_len - q_len + row_begin // GROUP - left, 0) // KEYS * KEYS).to(tl.int32)
    hi = tl.minimum(kv_len - q_len + (row_end - 1) // GROUP + right + 1, kv_len).to(tl.int32)

    lane = tl.arange(0, KEYS)
    d = tl.arange(0, DIM_PAD).to(tl.int64)[None, :]
    dv = tl.arange(0, DIM_V_PAD).to(tl.int64)[None, :]
    q_rows = q_ptr + (start + token) * q_strides[0] + head * q_strides[1]
    q = tl.load(q_rows[:, None] + d * q_strides[2], mask=live[:, None] & (d < DIM), other=0)
    q = _operand(q, q_ptr.dtype.element_ty, INTERPRETED)
    k_head = k_ptr + kv_head * k_strides[2] + d * k_strides[3]
    v_head = v_ptr + kv_head * v_strides[2] + dv * v_strides[3]
    table = table_ptr + seq * table_strides[0]
    if q_scale_ptr is not None:
        scale *= tl.load(q_scale_ptr + seq * q_scale_strides[0] + kv_head * q_scale_strides[1])
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + seq * k_scale_strides[0] + kv_head * k_scale_strides[1])
    if v_scale_ptr is not None:
        out_scale *= tl.load(v_scale_ptr + seq * v_scale_strides[0] + kv_head * v_scale_strides[1])

    if sinks_ptr is not None:
        m = tl.load(sinks_ptr + head, mask=live, other=0).to(tl.float32)
        denominator = tl.full([ROWS], 1.0, tl.float32)
    else:
        m = tl.full([ROWS], _FLOOR, tl.float32)
        denominator = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, DIM_V_PAD], 0.0, tl.float32)

    for begin in range(lo, hi, KEYS):
        key = tl.add(lane, begin, sanitize_overflow=False)
        held = key < hi
        page = tl.load(table + (key // PAGE).to(tl.int64) * table_strides[1], mask=held, other=0).to(tl.int64)
        slot = (key % PAGE).to(tl.int64)
        held = held[:, None]
        k_at = k_head + (page * k_strides[0] + slot * k_strides[1])[:, None]
        k = tl.load(k_at, mask=held if DIM == DIM_PAD else held & (d < DIM), other=0)
        s = _dot(q, tl.trans(_operand(k, q_ptr.dtype.element_ty, INTERPRETED)), INTERPRETED) * scale
        if SOFTCAP:
            s = softcap * _tanh(s / softcap)
        key = key[None, :]
        seen = (key >= row_lo) & (key < row_hi) if LEFT else key < row_hi
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.reduce(s, 1, _elementwise_max))
        p = tl.exp(s - m_new[:, None])
        fade = tl.exp(m - m_new)
        denominator = denominator * fade + tl.reduce(p, 1, _sum_combine)
        v_at = v_head + (page * v_strides[0] + slot * v_strides[1])[:, None]
        v = tl.load(v_at, mask=held if DIM_V == DIM_V_PAD else held & (dv < DIM_V), other=0)
        weights = _weights(p, q_ptr.dtype.element_ty, TRUNCATE, INTERPRETED)
        acc = acc * fade[:, None] + _dot(weights, _operand(v, q_ptr.dtype.element_ty, INTERPRETED), INTERPRETED)
        m = m_new

    empty = denominator == 0.0  # no key and no sink; else the largest term alone is 1
    divisor = tl.where(empty, 1.0, denominator)
    result = _output(acc / divisor[:, None] * out_scale, out_ptr.dtype.element_ty, INTERPRETED)
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


def _key_tile(dim_pad: int, itemsize: int) -> int:
    """Keys of a tile: 64, or as many as 64 KiB of shared memory hold, and at least 16, the least that `tl.dot` takes.

    The order of sums hangs on it, so it follows from the call alone and never from the tiling.
    """
    return min(64, max(16, 2**16 // (dim_pad * itemsize)))


def _bound(limit: int) -> int:
    """One side of the window as the kernel takes it, where -1 and huge limits are `_NO_LIMIT`."""
    return _NO_LIMIT if limit < 0 else min(limit, _NO_LIMIT)


def _head_scale(scale: Tensor | float | None, seqs: int, kv_heads: int) -> tuple[float, Tensor | None]:
    """A dequantisation scale as a factor for all heads and, where it is a tensor, (at least seqs, kv_heads) float32."""
    if scale is None:
        return 1.0, None
    if not isinstance(scale, Tensor):
        return float(scale), None
    return 1.0, scale.float() if scale.dim() == 2 else scale.float().expand(seqs, kv_heads)


def _bytes(cache: Tensor) -> Tensor:
    """An e4m3 cache as uint8, which masked loads can fill with 0 on every target; any other cache as it is."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, tiling: _Tiling) -> None:
    """Raises: ValueError or RuntimeError where the kernel cannot do what it is asked."""
    if q.device.type == "cpu" and not _INTERPRETED:
        raise RuntimeError(
            "kernels/triton_prefill.py: got tensors on the CPU, but Triton was set up to compile for a GPU; "
            "set TRITON_INTERPRET=1 before Triton is first imported"
        )
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or (tiling.truncate and q.dtype != torch.bfloat16):
        raise ValueError(f"kernels/triton_prefill.py: q has dtype {q.dtype}, expected one of the record's dtypes")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype not in (q.dtype, torch.float8_e4m3fn):
            raise ValueError(f"kernels/triton_prefill.py: {name} has dtype {cache.dtype}, expected {q.dtype} or float8_e4m3fn")


def _run(call: Call, tiling: _Tiling, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """The kernel's answer to `call`: out, or (out, lse).  Reads no plan on the host, so a CUDA graph may replay it."""
    q, k_cache, v_cache = call.q, call.k_cache, call.v_cache
    _check(q, k_cache, v_cache, tiling)
    total_q, q_heads, dim = q.shape
    _, page_size, kv_heads, dim_v = v_cache.shape
    seqs, group = call.live_seqs, q_heads // kv_heads
    out = q.new_empty(total_q, q_heads, dim_v) if call.out is None else call.out
    lse = q.new_empty(total_q, q_heads, dtype=torch.float32) if return_lse else None
    if seqs and total_q:
        (q_factor, q_scale), (k_factor, k_scale), (v_factor, v_scale) = (
            _head_scale(scale, seqs, kv_heads) for scale in (call.q_scale, call.k_scale, call.v_scale)
        )
        dim_pad, dim_v_pad = (max(16, triton.next_power_of_2(size)) for size in (dim, dim_v))
        keys = _key_tile(max(dim_pad, dim_v_pad), q.element_size())
        left, right = call.window_size
        if call.causal:
            right = 0
        _prefill[(total_q * group // tiling.rows + seqs, kv_heads)](
            q,
            _bytes(k_cache),
            _bytes(v_cache),
            out,
            lse,
            call.cu_seqlens_q.contiguous(),
            call.seqused_k.contiguous(),
            call.page_table,
            None if call.sinks is None else call.sinks.contiguous(),
            q_scale,
            k_scale,
            v_scale,
            q.stride(),
            k_cache.stride(),
            v_cache.stride(),
            out.stride(),
            call.page_table.stride(),
            *((0, 0) if scale is None else scale.stride() for scale in (q_scale, k_scale, v_scale)),
            seqs,
            call.softmax_scale * q_factor * k_factor,
            v_factor,
            call.softcap,
            _bound(left),
            _bound(right),
            HEADS=q_heads,
            GROUP=group,
            DIM=dim,
            DIM_V=dim_v,
            PAGE=page_size,
            SEQS=triton.next_power_of_2(seqs),
            ROWS=tiling.rows,
            KEYS=keys,
            DIM_PAD=dim_pad,
            DIM_V_PAD=dim_v_pad,
            LEFT=left >= 0,
            SOFTCAP=call.softcap != 0.0,
            TRUNCATE=tiling.truncate,
            INTERPRETED=_INTERPRETED,
            num_warps=tiling.warps,
            num_stages=2 if keys * dim_pad * q.element_size() <= 2**14 else 1,
        )
    return out if lse is None else (out, lse)


def _kernel(name: str, what: str, tiling: _Tiling, dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")) -> Kernel:
    """The kernel of the contract that runs `_prefill` under `tiling`, with its record."""

    def kernel(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cu_seqlens_q: Tensor,
        seqused_k: Tensor,
        page_table: Tensor,
        softmax_scale: float,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        q_scale: Tensor | float | None = None,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
        num_seqs: int | None = None,
        out: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        call = Call(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            cu_seqlens_q=cu_seqlens_q,
            seqused_k=seqused_k,
            page_table=page_table,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            sinks=sinks,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            num_seqs=num_seqs,
            out=out,
        )
        return _run(call, tiling, return_lse)

    kernel.__name__ = kernel.__qualname__ = name
    kernel.__doc__ = what
    kernel.record = Record(  # type: ignore[attr-defined]  # functions have no declared attributes
        dtypes=dtypes,
        cache_dtypes=("e4m3",),
        head_dims=(40, 64, 72, 80, 96, 112, 128, 192, 256, 512, 576),
        uneven_head_dims=((96, 64), (128, 256), (192, 128), (576, 512)),
        page_sizes=(1, 8, 16, 32, 64, 128, 256),
        devices=("cpu",) if _INTERPRETED else ("cuda",),
        # exp is ex2.approx on a GPU (2^-22) and NumPy's on the CPU (measured: 2^-22.2); tanh is _tanh, above.
        precision=Precision(eps_exp=2.0**-21, eps_tanh=2.0**-19, subtract_first=True),
        interpreted=_INTERPRETED,
    )
    return kernel


prefill_16 = _kernel("prefill_16", "Attention by the contract, in tiles of 16 query rows.", _Tiling(rows=16, warps=4))
prefill_32 = _kernel("prefill_32", "Attention by the contract, in tiles of 32 query rows.", _Tiling(rows=32, warps=4))
prefill_64 = _kernel("prefill_64", "Attention by the contract, in tiles of 64 query rows.", _Tiling(rows=64, warps=8))
prefill_truncating = _kernel(
    "prefill_truncating",
    "Wrong on purpose: `prefill_16` with P truncated to bf16, as Triton's interpreter casts it, where its record says rounded.",
    _Tiling(rows=16, warps=4, truncate=True),
    dtypes=("bf16",),
)
