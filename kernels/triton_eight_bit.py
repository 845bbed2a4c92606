"""8-bit paged prefill in Triton for Hopper: `prefill_fp8`, `prefill_int8` and their kin, each a scheme of `eight_bit`.

A call is two steps, which can be timed apart: `triton_quantise.quantised` writes codes and scales, and `attention` computes with
them.  Products of codes are exact but for their sums.  Those of int8 are exact in int32.  Those of e4m3 run through Hopper's
FP22 accumulator, which cuts every addend to 13 bits below the largest, so sums have two levels: q.k is moved to float32 every
128 channels, P.V every tile of 64 keys, two instructions.  An instruction cuts 32 products and the accumulator, so a tile loses
at most 2 x 17 x 2^-13 = 0.0042 of its largest addend, beside 3 u = 0.19 of it that the bound allows for rounding P to e4m3:
as losses of tiles add up and roundings do not, the first overtakes the second after (0.19 / 0.0042)^2 = 2,000 tiles, 130
thousand keys, and that with the worst addends.  q.k of 512 channels loses at most 16 x 17 x 2^-13 = 0.033 of its largest
product, beside 0.22 of it for rounding q and k.  So the records promise float32 sums: with those of FP22 a bound would allow
what `prefill_fp8_narrow` does.

The wrong ones are kept because they must be rejected: `prefill_fp8_lazy` keeps a maximum until it is 2^8 too low, so that P
times 256 exceeds 448 and saturates (FlashAttention issue 2577; the LSE stays clean); `prefill_fp8_narrow` never leaves FP22;
`prefill_fp8_unscaled` starts with the sink as its maximum and does not scale P, which underflows behind it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
# ruff: noqa: RUF005
# The compiled functions below are written in Triton's language, which has no types that mypy knows, and no starred expressions.

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from oracle.contract import SCALES, DeclaredKernel
from oracle.kernels.eight_bit import ATTENTIONS, K_BLOCK, Scheme, record_of
from oracle.kernels.triton_decode import with_sink
from oracle.kernels.triton_host import Launch, as_bytes, padded, triton_kernel
from oracle.kernels.triton_language import (  # before Triton: on a machine without a GPU it switches the interpreter on
    FLOOR,
    INTERPRETED,
    LN2,
    LOG2E,
    device_function,
    dot,
    largest,
    operand,
    rounded,
    stored,
    tanh,
    total,
)
from oracle.kernels.triton_quantise import Codes, e4m3_value, quantised

# isort: split

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from oracle.kernels.triton_tiles import descriptor, fits_tma, page_at, place, rows_of

_PROMOTE = 128  # channels of q.k that an FP22 accumulator may add up
_keys, _promote = tl.constexpr(K_BLOCK), tl.constexpr(_PROMOTE)


@device_function
def _tile(source, row, column, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """(ROWS, COLUMNS) codes from a row and a column on, of a matrix with rows of `width`; `source` is it or its descriptor."""
    if TMA:
        return source.load([row.to(tl.int32), column])
    else:
        address = source + (row + tl.arange(0, ROWS))[:, None] * width
        return tl.load(address + (column + tl.arange(0, COLUMNS)).to(tl.int64)[None, :])


@device_function
def _wide(codes):
    """Codes as an operand of `tl.dot`: as they are, or as fp32 where interpreted."""
    if not INTERPRETED:
        return codes
    else:
        return codes.to(tl.float32)


@device_function
def _scores(q, k, PROMOTE: tl.constexpr):
    """q @ k^T of codes, fp32."""
    if INTERPRETED:
        return dot(q, tl.trans(k))
    elif q.dtype == tl.int8:
        return tl.dot(q, tl.trans(k)).to(tl.float32)
    else:
        return tl.dot(q, tl.trans(k), max_num_imprecise_acc=PROMOTE)


@device_function
def _e4m3(p):
    """fp32 p >= 0 rounded to e4m3, saturated, as an operand of `tl.dot`."""
    if not INTERPRETED:
        return p.to(tl.float8e4nv)
    else:
        return e4m3_value(tl.minimum(p, 448.0))


@device_function
def _weighted(p, v):
    """p @ v of codes, fp32."""
    if INTERPRETED:
        return dot(p, v)
    else:
        return tl.dot(p, v)


@device_function
def _narrow(acc, p, v):
    """acc + p @ v of codes in Hopper's FP22: where interpreted, as docs/gpu.md found it, but for the exponent of a product."""
    if not INTERPRETED:
        return tl.dot(p, v, acc)
    else:
        products = p[:, :, None] * v[None, :, :]
        for half in tl.static_range(2):  # an instruction adds up 32
            inside = (tl.arange(0, p.shape[1]) // 32 == half)[None, :, None]
            addends = tl.where(inside, products, 0.0)
            top = tl.maximum(largest(tl.abs(addends), 1), tl.abs(acc))
            place = (tl.maximum(top, 2.0**-100).to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 2.0**-13
            cut = total((addends / place[:, None, :]).to(tl.int32), 1) + (acc / place).to(tl.int32)
            acc = ((cut.to(tl.float32) * place).to(tl.uint32, bitcast=True) & 0xFFFFFC00).to(tl.float32, bitcast=True)
        return acc


@triton.jit(do_not_specialize=["table_stride", "table_step", "seqs", "scale", "softcap", "left", "right", "blocks"])
def _attend(
    q_ptr,
    q_scale_ptr,
    offset_ptr,
    k_source,
    k_scale_ptr,
    v_source,
    v_scale_ptr,
    out_ptr,
    lse_ptr,
    cu_ptr,
    used_ptr,
    table_ptr,
    sinks_ptr,
    v_strides,
    out_strides,
    table_stride,
    table_step,
    seqs,
    scale,
    softcap,
    left,
    right,
    blocks,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM_V: tl.constexpr,
    PAGE: tl.constexpr,
    SEQS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM_PAD: tl.constexpr,
    DIM_V_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PROMOTE: tl.constexpr,
    P_SCALE: tl.constexpr,
    V8: tl.constexpr,
    V_CHANNEL: tl.constexpr,
    LEFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    V_TMA: tl.constexpr,
    LAZY: tl.constexpr,
    NARROW: tl.constexpr,
    SINK_FIRST: tl.constexpr,
):
    """Writes WIDTH columns of `out`, and its first part the LSE, of a tile of query rows and one kv head.

    Codes and scales are those of `triton_quantise.Codes`, v_source with V8, else it is the pool; each source is the tensor or a
    descriptor, as TMA and V_TMA say.  The output is summed in chunks of CHUNK columns.  Pointers that may be None: offset,
    v_scale, lse and sinks.
    """
    seq, start, q_len, kv_len, row_begin, row_end = place(cu_ptr, used_ptr, seqs, GROUP, SEQS, ROWS)
    if row_begin >= row_end:
        return
    parts: tl.constexpr = DIM_V_PAD // WIDTH
    chunks: tl.constexpr = WIDTH // CHUNK
    kv_head = (tl.program_id(1) // parts).to(tl.int64)
    part = tl.program_id(1) % parts
    own = seq * (HEADS // GROUP) + kv_head
    dtype = out_ptr.dtype.element_ty

    row = row_begin + tl.arange(0, ROWS)
    live = row < row_end
    row = tl.minimum(row, row_end - 1)  # rows past the tile's last are its last again
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    first_pos = kv_len - q_len + row_begin // GROUP
    last_pos = kv_len - q_len + (row_end - 1) // GROUP
    pos = kv_len - q_len + token
    row_lo = (pos - left).to(tl.int32)[:, None]
    row_hi = tl.minimum(pos + right + 1, kv_len).to(tl.int32)[:, None]
    lo = (tl.maximum(first_pos - left, 0) // _keys * _keys).to(tl.int32)
    hi = tl.minimum(last_pos + right + 1, kv_len).to(tl.int32)
    whole_lo = (tl.maximum(last_pos - left + _keys - 1, 0) // _keys * _keys).to(tl.int32)
    whole_hi = (tl.maximum(tl.minimum(first_pos + right + 1, kv_len), 0) // _keys * _keys).to(tl.int32)

    at_rows = (start + token) * HEADS + head
    q = _wide(tl.load(q_ptr + at_rows[:, None] * DIM_PAD + tl.arange(0, DIM_PAD)[None, :]))
    factor = tl.load(q_scale_ptr + at_rows) * scale
    offset = tl.full([ROWS], 0.0, tl.float32)
    if offset_ptr is not None:
        offset = tl.load(offset_ptr + at_rows)
    table = table_ptr + seq * table_stride

    m = tl.full([ROWS], FLOOR, tl.float32)  # of logits over ln 2, without the offset unless they are capped
    denominator = tl.full([ROWS], 0.0, tl.float32)
    if SINK_FIRST and sinks_ptr is not None:
        m = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        denominator = tl.full([ROWS], 1.0, tl.float32)
    acc = (tl.full([ROWS, CHUNK], 0.0, tl.float32),)
    for _ in tl.static_range(chunks - 1):
        acc = acc + (tl.full([ROWS, CHUNK], 0.0, tl.float32),)
    if not SOFTCAP:
        factor *= LOG2E

    for span in tl.static_range(0 if LEFT else 1, 3):  # the window's left edge, the keys that all rows see, the rest
        if span == 0:
            begin, end = lo, tl.minimum(whole_lo, hi)
        elif span == 1:
            begin, end = whole_lo if LEFT else lo, whole_hi
        else:
            begin, end = tl.maximum(whole_lo if LEFT else lo, whole_hi), hi
        if not V8:
            ahead = page_at(table, table_step, begin, end, PAGE, _keys, V_TMA)
        for at in tl.range(begin, end, _keys):
            k_scale = tl.load(k_scale_ptr + own * blocks + at // _keys)  # asked for before the tiles
            v_scale = 1.0
            if V8 and not V_CHANNEL:
                v_scale = tl.load(v_scale_ptr + own * blocks + at // _keys)
            k = _wide(_tile(k_source, own * blocks * _keys + at, 0, DIM_PAD, _keys, DIM_PAD, TMA))
            s = _scores(q, k, PROMOTE) * (factor * k_scale)[:, None]
            if SOFTCAP:
                s = (softcap * LOG2E) * tanh((s + offset[:, None]) / softcap)
            key = tl.add(tl.arange(0, _keys), at, sanitize_overflow=False)
            if span != 1:
                seen = (key[None, :] >= row_lo) & (key[None, :] < row_hi) if LEFT else key[None, :] < row_hi
                s = tl.where(seen, s, float("-inf"))
            top = largest(s, 1)
            m_new = tl.where(top > m + LAZY, top, m) if LAZY else tl.maximum(m, top)
            p = tl.exp2(s - m_new[:, None])
            fade = tl.exp2(m - m_new)
            denominator = denominator * fade + total(p, 1)
            m = m_new
            summed = ()
            if V8:
                weights = _e4m3(p * P_SCALE)
                for c in tl.static_range(chunks):
                    column = own * DIM_V_PAD + part * WIDTH + c * CHUNK
                    v = _wide(_tile(v_source, column, at, blocks * _keys, CHUNK, _keys, TMA))
                    before = acc[c] * fade[:, None]
                    if NARROW:
                        summed = summed + (_narrow(before / v_scale, weights, tl.trans(v)) * v_scale,)
                    else:
                        summed = summed + (before + _weighted(weights, tl.trans(v)) * v_scale,)
            else:
                page = ahead
                ahead = page_at(table, table_step, at + _keys, end, PAGE, _keys, V_TMA)
                weights = rounded(p, dtype)
                for c in tl.static_range(chunks):
                    column = part * WIDTH + c * CHUNK
                    v = rows_of(v_source, v_strides, page, at, end, kv_head, column, DIM_V, CHUNK, PAGE, _keys, V_TMA, span == 1)
                    if V_TMA and span != 1:
                        v = tl.where((key < end)[:, None], v, 0.0)  # what lies past the plan may be NaN
                    summed = summed + (acc[c] * fade[:, None] + dot(weights, operand(v, dtype)),)
            acc = summed

    if not SOFTCAP:
        m += offset * LOG2E
    top = m * LN2
    fade = tl.full([ROWS], 1.0, tl.float32)
    if not SINK_FIRST and sinks_ptr is not None:
        denominator, top, fade = with_sink(m, denominator, tl.load(sinks_ptr + head).to(tl.float32))
    empty = denominator == 0.0  # no key and no sink; else the largest term alone is 1
    divisor = tl.where(empty, 1.0, denominator)
    out_rows = out_ptr + (start + token) * out_strides[0] + head * out_strides[1]
    for c in tl.static_range(chunks):
        dv = (part * WIDTH + c * CHUNK + tl.arange(0, CHUNK)).to(tl.int64)[None, :]
        result = acc[c] * fade[:, None] / (divisor * P_SCALE)[:, None]
        if V_CHANNEL:
            result *= tl.load(v_scale_ptr + own * DIM_V_PAD + dv)
        tl.store(out_rows[:, None] + dv * out_strides[2], stored(result, dtype), mask=live[:, None] & (dv < DIM_V))
    if lse_ptr is not None:  # noqa: SIM102  # two ifs: the first is decided at compile time, where lse_ptr may be None
        if part == 0:
            tl.store(lse_ptr + at_rows, tl.where(empty, float("-inf"), top + tl.log(divisor)), mask=live)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How the query rows and the output's columns are cut, and how the compiler treats a program."""

    rows: int  # query rows of a tile
    width: int  # columns of the output that a program owns at most
    chunk: int  # columns that are summed at once in 8 bits
    warps: int
    stages: int  # key tiles in flight


# By the larger of head_dim and head_dim_v, padded.
TILINGS = {
    32: Tiling(rows=64, width=32, chunk=32, warps=4, stages=3),
    64: Tiling(rows=128, width=64, chunk=64, warps=8, stages=3),
    128: Tiling(rows=128, width=128, chunk=64, warps=8, stages=3),
    256: Tiling(rows=128, width=256, chunk=64, warps=8, stages=2),
    512: Tiling(rows=64, width=512, chunk=128, warps=8, stages=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a wrong kernel does."""

    lazy: int = 0  # the maximum stays until one is so many powers of two above it
    narrow: bool = False  # P.V is added up in FP22, never moved to float32
    sink_first: bool = False  # the sink is the first maximum
    p_scale: float | None = None  # in the place of the scheme's


def attention(launch: Launch, scheme: Scheme, codes: Codes, fault: Fault | None = None, tiling: Tiling | None = None) -> None:
    """Launches `_attend` on the codes of the call under its scheme, by default in the tiling of its head dim."""
    call, arguments, wrong = launch.call, launch.arguments, fault or Fault()
    _, kv_heads, keys, dim_pad = codes.k.shape
    dim_v_pad = padded(call.v_cache.shape[3]) if codes.v is None else codes.v.shape[2]
    tile = tiling or TILINGS[max(dim_pad, dim_v_pad)]
    width = min(tile.width, dim_v_pad)
    chunk = min(tile.chunk, width) if codes.v is not None else min(width, 256)
    tma = not INTERPRETED
    v_tma = tma and codes.v is None and call.v_cache.dtype == call.q.dtype and fits_tma(call.v_cache, K_BLOCK)
    k_rows = codes.k.view(-1, dim_pad)
    v_source: Any
    if codes.v is not None:
        v_rows = codes.v.view(-1, keys)
        v_source = TensorDescriptor(v_rows, list(v_rows.shape), [keys, 1], [chunk, K_BLOCK]) if tma else v_rows
    else:
        v_source = descriptor(call.v_cache, K_BLOCK, chunk) if v_tma else as_bytes(call.v_cache)
    names = ["out_ptr", "lse_ptr", "cu_ptr", "used_ptr", "table_ptr", "sinks_ptr", "v_strides", "out_strides", "table_stride"]
    names += ["table_step", "seqs", "softcap", "left", "right", "HEADS", "GROUP", "DIM_V", "PAGE", "SEQS", "LEFT", "SOFTCAP"]
    p_scale = 1.0 if codes.v is None else wrong.p_scale or scheme.p_scale
    _attend[(launch.tiles(tile.rows), kv_heads * (dim_v_pad // width))](
        **{name: arguments[name] for name in names},
        q_ptr=codes.q,
        q_scale_ptr=codes.q_scale,
        offset_ptr=codes.offset,
        k_source=TensorDescriptor(k_rows, list(k_rows.shape), [dim_pad, 1], [K_BLOCK, dim_pad]) if tma else k_rows,
        k_scale_ptr=codes.k_scale,
        v_source=v_source,
        v_scale_ptr=codes.v_scale,
        scale=call.softmax_scale,
        blocks=codes.blocks,
        ROWS=tile.rows,
        DIM_PAD=dim_pad,
        DIM_V_PAD=dim_v_pad,
        WIDTH=width,
        CHUNK=chunk,
        PROMOTE=min(dim_pad, _PROMOTE),
        P_SCALE=p_scale,
        V8=codes.v is not None,
        V_CHANNEL=scheme.v_scale == "channel",
        TMA=tma,
        V_TMA=v_tma,
        LAZY=wrong.lazy,
        NARROW=wrong.narrow,
        SINK_FIRST=wrong.sink_first,
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=False,
    )


def _start(scheme: Scheme, fault: Fault | None, launch: Launch) -> None:
    """Quantises the call and attends."""
    attention(launch, scheme, quantised(launch, scheme), fault)


def _kernel(name: str, what: str, scheme: Scheme, fault: Fault | None = None, **declares: Any) -> DeclaredKernel:
    """The kernel of the contract that computes with the scheme, with its record: every head dim, or what it declares."""
    return triton_kernel(
        name,
        what,
        partial(_start, scheme, fault),
        who="kernels/triton_eight_bit.py",
        dtypes=("bf16", "fp16"),
        precision=record_of(scheme).precision,  # the same contract, so that it may be judged against the CPU's kernel
        lacks=SCALES,
        declares={
            "batch_invariant": True,
            "cache_dtypes": (),
            "head_dims": (40, 64, 72, 80, 96, 112, 128, 192, 256, 512),
            "uneven_head_dims": ((96, 64), (128, 256), (192, 128)),
        }
        | declares,
    )


FP8, INT8, INT8_V8 = ATTENTIONS["fp8-block"], ATTENTIONS["int8-block"], ATTENTIONS["int8-block-v8"]
HADAMARD = ATTENTIONS["fp8-block-hadamard"]

prefill_fp8 = _kernel("prefill_fp8", "q, k, v and P in e4m3, a scale for 128 rows and for 64 keys.", FP8)
prefill_fp8_hadamard = _kernel("prefill_fp8_hadamard", "The same, q and k turned by a Hadamard transform first.", HADAMARD)
prefill_int8 = _kernel("prefill_int8", "q and smoothed k in int8, a scale for 128 rows and for 64 keys: SageAttention.", INT8)
prefill_int8_v8 = _kernel("prefill_int8_v8", "The same, v by channels and P in e4m3: SageAttention2.", INT8_V8)
prefill_fp8_lazy = _kernel("prefill_fp8_lazy", "Wrong: P saturates behind a maximum that is too low.", FP8, Fault(lazy=8))
# It shows in long contexts, which only the default profile has: few shapes, then, to be compiled in minutes.
prefill_fp8_narrow = _kernel(
    "prefill_fp8_narrow",
    "Wrong: P.V is added up in FP22, from the first key to the last.",
    FP8,
    Fault(narrow=True),
    head_dims=(64,),
    uneven_head_dims=(),
    page_sizes=(64,),
)
prefill_fp8_unscaled = _kernel(
    "prefill_fp8_unscaled", "Wrong: P underflows behind a sink.", FP8, Fault(sink_first=True, p_scale=1.0)
)
