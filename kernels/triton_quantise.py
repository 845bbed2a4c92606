"""The 8-bit codes of a call in Triton: q, and K and V gathered from their pages, with the scales of a scheme of `eight_bit`.

Codes and scales are those of `oracle.kernels.eight_bit`, bit for bit: a peak is exact in any order, quotients are rounded to
nearest (Triton's own division is not), and a mean key is summed in float64.  What is written is laid out for Hopper's 8-bit
wgmma, which takes both operands with the contracted index innermost: V is transposed.  A sequence's blocks of 64 keys lie one
after the other whatever its pages are; keys past its last have codes of 0, and so have columns past the head's.

Everything is sized by the page table and not by the plan, which stays on the GPU.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The compiled functions below are written in Triton's language, which has no types that mypy knows.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.kernels.eight_bit import K_BLOCK, Q_BLOCK, Scheme
from oracle.kernels.quantised import CODES, LARGEST, signs_of
from oracle.kernels.triton_host import Launch, as_bytes
from oracle.kernels.triton_language import (  # before Triton: on a machine without a GPU it switches the interpreter on
    INTERPRETED,
    device_function,
    largest,
    operand,
    rounded,
    total,
)

# isort: split

import triton
import triton.language as tl

from oracle.kernels.triton_tiles import page_at, place, rows_of

_STEP = 16  # rows that are worked on at once

_q_block, _k_block, _step = tl.constexpr(Q_BLOCK), tl.constexpr(K_BLOCK), tl.constexpr(_STEP)
_CHANGING = ["table_stride", "table_step", "seqs", "softmax_scale", "blocks"]  # from call to call: no variants are compiled


@device_function
def e4m3_value(x):
    """fp32 x, |x| <= 448, rounded to the nearest number of E4M3, ties to even, as fp32."""
    # 1.5 x 2^20 times the power of two below x: an fp32 whose neighbours are as far apart as e4m3's are at x
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, (127 - 6) << 23)
    binade = exponent.to(tl.float32, bitcast=True) * (1.5 * 2**20)
    return (x + binade) - binade


@device_function
def _e4m3_code(x):
    """The byte of fp32 x, |x| <= 448, as E4M3, to nearest, ties to even."""
    if not INTERPRETED:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        size = tl.abs(e4m3_value(x))
        normal = tl.maximum(size, 2.0**-6).to(tl.uint32, bitcast=True) >> 20  # sign, exponent and three bits of the fraction
        code = tl.where(size < 2.0**-6, (size * 512.0).to(tl.uint32), normal - ((127 - 7) << 3))
        return (code | (x.to(tl.uint32, bitcast=True) >> 24 & 0x80)).to(tl.uint8)


@device_function
def _scale(peak, LARGEST: tl.constexpr):
    """The scale of numbers whose largest magnitude is `peak`; 0 counts as 1."""
    top = tl.where(peak > 0, peak, 1.0)
    return tl.div_rn(top, top * 0.0 + LARGEST)


@device_function
def _codes(x, scale, INT8: tl.constexpr, LARGEST: tl.constexpr):
    """fp32 x in steps of `scale`, a tensor of its shape: int8, or bytes of E4M3."""
    ratio = tl.minimum(tl.maximum(tl.div_rn(x, scale), -LARGEST), LARGEST)
    if INT8:
        return ((ratio + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 x 2^23: neighbours are 1 apart there
    else:
        return _e4m3_code(ratio)


@device_function
def _rotated(x, signs, ROWS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, FACTOR: tl.constexpr, STAGES: tl.constexpr):
    """`quantised.rotate` of the rows of fp32 x (ROWS, WIDTH): blocks of SIZE = 2^STAGES columns, FACTOR = SIZE^-1/2."""
    x = x * signs
    for stage in tl.static_range(STAGES):
        # Written out: a name for 2^stage would be a constexpr assigned twice.
        pairs = tl.permute(tl.reshape(x, [ROWS, WIDTH // (2 << stage), 2, 1 << stage]), (0, 1, 3, 2))
        first, second = tl.split(pairs)
        pairs = tl.join(first + second, first - second)
        x = tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), [ROWS, WIDTH])
    return x * FACTOR


@triton.jit(do_not_specialize=_CHANGING)
def _quantise_q(
    q_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    means_ptr,
    signs_ptr,
    cu_ptr,
    used_ptr,
    q_strides,
    seqs,
    softmax_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SEQS: tl.constexpr,
    INT8: tl.constexpr,
    LARGEST: tl.constexpr,
    SIZE: tl.constexpr,
    FACTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Codes (total_q, HEADS, DIM_PAD) and a scale a row (total_q, HEADS) of a block of one head's rows.

    With means (seqs, kv_heads, DIM_PAD), also what the mean key adds to a row's logits (total_q, HEADS), fp32.
    """
    seq, start, _, _, row_begin, row_end = place(cu_ptr, used_ptr, seqs, 1, SEQS, _q_block)
    if row_begin >= row_end:
        return
    head = tl.program_id(1).to(tl.int64)
    dtype = q_ptr.dtype.element_ty
    d = tl.arange(0, DIM_PAD).to(tl.int64)[None, :]
    signs = 1.0
    if signs_ptr is not None:
        signs = tl.load(signs_ptr + d)
    peak = tl.full([1], 0.0, tl.float32)
    for begin in tl.range(row_begin, row_end, _step):
        row = begin + tl.arange(0, _step)
        rows = q_ptr + (start + row) * q_strides[0] + head * q_strides[1]
        x = tl.load(rows[:, None] + d * q_strides[2], mask=(row < row_end)[:, None] & (d < DIM), other=0)
        x = operand(x, dtype).to(tl.float32)
        if signs_ptr is not None:
            x = _rotated(x, signs, _step, DIM_PAD, SIZE, FACTOR, STAGES)
        peak = tl.maximum(peak, largest(largest(tl.abs(x), 1), 0))
    scale = _scale(peak, LARGEST)
    for begin in tl.range(row_begin, row_end, _step):
        row = begin + tl.arange(0, _step)
        live = row < row_end
        rows = q_ptr + (start + row) * q_strides[0] + head * q_strides[1]
        raw = tl.load(rows[:, None] + d * q_strides[2], mask=live[:, None] & (d < DIM), other=0)
        raw = operand(raw, dtype).to(tl.float32)
        at = (start + row) * HEADS + head
        x = raw
        if signs_ptr is not None:
            x = _rotated(x, signs, _step, DIM_PAD, SIZE, FACTOR, STAGES)
        codes = _codes(x, tl.broadcast_to(scale[:, None], [_step, DIM_PAD]), INT8, LARGEST)
        tl.store(codes_ptr + at[:, None] * DIM_PAD + d, codes, mask=live[:, None])
        tl.store(scales_ptr + at, tl.broadcast_to(scale, [_step]), mask=live)
        if means_ptr is not None:
            mean = tl.load(means_ptr + (seq * (HEADS // GROUP) + head // GROUP) * DIM_PAD + d).to(tl.float64)
            offset = total(raw.to(tl.float64) * mean, 1) * softmax_scale
            tl.store(offsets_ptr + at, offset.to(tl.float32), mask=live)


@triton.jit(do_not_specialize=_CHANGING)
def _statistics(
    k_ptr,
    v_ptr,
    sums_ptr,
    peaks_ptr,
    used_ptr,
    table_ptr,
    k_strides,
    v_strides,
    table_stride,
    table_step,
    blocks,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    DIM_PAD: tl.constexpr,
    DIM_V_PAD: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Of a block of keys, by channel: the sum of K in float64 where sums_ptr is given, and V's peak where peaks_ptr is."""
    block, kv_head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_len = tl.load(used_ptr + seq)
    if block * _k_block >= kv_len:
        return
    end = tl.minimum((block + 1) * _k_block, kv_len)
    table = table_ptr + seq * table_stride
    at = (seq * KV_HEADS + kv_head) * blocks + block
    d, dv = tl.arange(0, DIM_PAD).to(tl.int64), tl.arange(0, DIM_V_PAD).to(tl.int64)
    sums = tl.full([DIM_PAD], 0.0, tl.float64)
    peaks = tl.full([DIM_V_PAD], 0.0, tl.float32)
    for begin in tl.range(block * _k_block, end, _step):
        page = page_at(table, table_step, begin, end, PAGE, _step, False)
        if sums_ptr is not None:
            k = rows_of(k_ptr, k_strides, page, begin, end, kv_head, 0, DIM, DIM_PAD, PAGE, _step, False, False)
            sums += total(operand(k, k_ptr.dtype.element_ty).to(tl.float32).to(tl.float64), 0)
        if peaks_ptr is not None:
            v = rows_of(v_ptr, v_strides, page, begin, end, kv_head, 0, DIM_V, DIM_V_PAD, PAGE, _step, False, False)
            peaks = tl.maximum(peaks, largest(tl.abs(operand(v, v_ptr.dtype.element_ty).to(tl.float32)), 0))
    if sums_ptr is not None:
        tl.store(sums_ptr + at * DIM_PAD + d, sums)
    if peaks_ptr is not None:
        tl.store(peaks_ptr + at * DIM_V_PAD + dv, peaks)


@triton.jit(do_not_specialize=_CHANGING)
def _gather(
    sums_ptr,
    peaks_ptr,
    means_ptr,
    scales_ptr,
    used_ptr,
    blocks,
    KV_HEADS: tl.constexpr,
    DIM_PAD: tl.constexpr,
    DIM_V_PAD: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Of one sequence and kv head: the mean key rounded to DTYPE, as fp32, and V's scale by channel, from those of its blocks."""
    kv_head, seq = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    kv_len = tl.load(used_ptr + seq)
    own = seq * KV_HEADS + kv_head
    d, dv = tl.arange(0, DIM_PAD).to(tl.int64), tl.arange(0, DIM_V_PAD).to(tl.int64)
    sums = tl.full([DIM_PAD], 0.0, tl.float64)
    peaks = tl.full([DIM_V_PAD], 0.0, tl.float32)
    for begin in tl.range(0, (kv_len + _k_block - 1) // _k_block, _step):
        block = begin + tl.arange(0, _step)
        held = (block * _k_block < kv_len)[:, None]
        at = (own * blocks + block)[:, None]
        if sums_ptr is not None:
            sums += total(tl.load(sums_ptr + at * DIM_PAD + d, mask=held, other=0.0), 0)
        if peaks_ptr is not None:
            peaks = tl.maximum(peaks, largest(tl.load(peaks_ptr + at * DIM_V_PAD + dv, mask=held, other=0.0), 0))
    if sums_ptr is not None:
        mean = (sums / tl.maximum(kv_len, 1).to(tl.float64)).to(tl.float32)  # to fp32 first, as torch does
        tl.store(means_ptr + own * DIM_PAD + d, rounded(mean, DTYPE).to(tl.float32))
    if peaks_ptr is not None:
        tl.store(scales_ptr + own * DIM_V_PAD + dv, _scale(peaks, 448.0))


@triton.jit(do_not_specialize=_CHANGING)
def _quantise_kv(
    k_ptr,
    v_ptr,
    k_codes_ptr,
    k_scales_ptr,
    v_codes_ptr,
    v_scales_ptr,
    means_ptr,
    signs_ptr,
    used_ptr,
    table_ptr,
    k_strides,
    v_strides,
    table_stride,
    table_step,
    blocks,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    DIM_PAD: tl.constexpr,
    DIM_V_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    INT8: tl.constexpr,
    LARGEST: tl.constexpr,
    V_CHANNEL: tl.constexpr,
    SIZE: tl.constexpr,
    FACTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Codes and scales of a block of keys of one kv head, and of its V where v_codes_ptr is given.

    k_codes (seqs, KV_HEADS, blocks * 64, DIM_PAD), v_codes (seqs, KV_HEADS, DIM_V_PAD, blocks * 64), k_scales (seqs, KV_HEADS,
    blocks); v_scales like it, written, or with V_CHANNEL (seqs, KV_HEADS, DIM_V_PAD), read.
    """
    block, kv_head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_len = tl.load(used_ptr + seq)
    at = block * _k_block
    if at >= kv_len:
        return
    table = table_ptr + seq * table_stride
    own = seq * KV_HEADS + kv_head
    key = at + tl.arange(0, _k_block)
    d, dv = tl.arange(0, DIM_PAD).to(tl.int64)[None, :], tl.arange(0, DIM_V_PAD).to(tl.int64)
    page = page_at(table, table_step, at, kv_len, PAGE, _k_block, False)
    k = rows_of(k_ptr, k_strides, page, at, kv_len, kv_head, 0, DIM, DIM_PAD, PAGE, _k_block, False, False)
    k = operand(k, k_ptr.dtype.element_ty).to(tl.float32)
    if means_ptr is not None:
        k = tl.where((key < kv_len)[:, None], k - tl.load(means_ptr + own * DIM_PAD + d), 0.0)
    if signs_ptr is not None:
        k = _rotated(k, tl.load(signs_ptr + d), _k_block, DIM_PAD, SIZE, FACTOR, STAGES)
    scale = _scale(largest(largest(tl.abs(k), 1), 0) + tl.full([1], 0.0, tl.float32), LARGEST)
    codes = _codes(k, tl.broadcast_to(scale[:, None], [_k_block, DIM_PAD]), INT8, LARGEST)
    tl.store(k_codes_ptr + (own * blocks * _k_block + key)[:, None] * DIM_PAD + d, codes)
    tl.store(k_scales_ptr + own * blocks + block + tl.arange(0, 1), scale)
    if v_codes_ptr is not None:
        v = rows_of(v_ptr, v_strides, page, at, kv_len, kv_head, 0, DIM_V, DIM_V_PAD, PAGE, _k_block, False, False)
        v = operand(v, v_ptr.dtype.element_ty).to(tl.float32)
        if V_CHANNEL:
            v_scale = tl.broadcast_to(tl.load(v_scales_ptr + own * DIM_V_PAD + dv)[None, :], [_k_block, DIM_V_PAD])
        else:
            v_scale = _scale(largest(largest(tl.abs(v), 1), 0) + tl.full([1], 0.0, tl.float32), 448.0)
            tl.store(v_scales_ptr + own * blocks + block + tl.arange(0, 1), v_scale)
            v_scale = tl.broadcast_to(v_scale[:, None], [_k_block, DIM_V_PAD])
        codes = tl.trans(_codes(v, v_scale, False, 448.0))
        tl.store(v_codes_ptr + (own * DIM_V_PAD + dv)[:, None] * (blocks * _k_block) + key[None, :], codes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """The operands of an 8-bit attention: `blocks` of 64 keys a sequence, H kv heads, columns padded."""

    blocks: int
    q: Tensor  # (total_q, q_heads, dim_pad), int8 or e4m3
    q_scale: Tensor  # (total_q, q_heads) float32
    k: Tensor  # (seqs, H, blocks * 64, dim_pad), as q
    k_scale: Tensor  # (seqs, H, blocks) float32
    v: Tensor | None = None  # (seqs, H, dim_v_pad, blocks * 64) e4m3, where the scheme quantises v
    v_scale: Tensor | None = None  # (seqs, H, blocks) or by channel (seqs, H, dim_v_pad), float32
    mean: Tensor | None = None  # (seqs, H, dim_pad) float32, where it was taken off k
    offset: Tensor | None = None  # (total_q, q_heads) float32: what the mean key adds to a row's logits


def columns(dim: int) -> int:
    """The columns that a head of `dim` is padded to: a power of two, and 32, the least that an 8-bit product takes."""
    return max(32, 1 << (dim - 1).bit_length())


def quantised(launch: Launch, scheme: Scheme) -> Codes:
    """The codes of a call under a scheme whose q and k have block scales, v block or channel scales or none.

    Raises ValueError for another scheme.
    """
    if scheme.qk_scale != "block" or scheme.v_scale not in ("block", "channel", None):
        raise ValueError(
            f"triton_quantise: got scales {scheme.qk_scale} and {scheme.v_scale}, expected block, and block or channel"
        )
    call = launch.call
    device, seqs, (_, heads, dim) = call.q.device, call.live_seqs, call.q.shape
    _, page_size, kv_heads, dim_v = call.v_cache.shape
    dim_pad, dim_v_pad = columns(dim), columns(dim_v)
    blocks = max(1, -(-call.page_table.shape[1] * page_size // K_BLOCK))
    size = dim & -dim
    kind = CODES[scheme.qk_format]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    signs = None
    if scheme.rotated:
        signs = torch.nn.functional.pad(signs_of(dim), (0, dim_pad - dim), value=1.0).to(device)
    codes = Codes(
        blocks=blocks,
        q=empty(call.q.shape[0], heads, dim_pad, dtype=kind),
        q_scale=empty(call.q.shape[0], heads),
        k=empty(seqs, kv_heads, blocks * K_BLOCK, dim_pad, dtype=kind),
        k_scale=empty(seqs, kv_heads, blocks),
        v=None if scheme.v_scale is None else empty(seqs, kv_heads, dim_v_pad, blocks * K_BLOCK, dtype=CODES["e4m3"]),
        v_scale=None if scheme.v_scale is None else empty(seqs, kv_heads, dim_v_pad if scheme.v_scale == "channel" else blocks),
        mean=empty(seqs, kv_heads, dim_pad) if scheme.smooth_k else None,
        offset=empty(call.q.shape[0], heads) if scheme.smooth_k else None,
    )
    pool = {
        name: launch.arguments[name] for name in ("used_ptr", "table_ptr", "k_strides", "v_strides", "table_stride", "table_step")
    }
    shapes = {"KV_HEADS": kv_heads, "DIM": dim, "DIM_V": dim_v, "DIM_PAD": dim_pad, "DIM_V_PAD": dim_v_pad, "PAGE": page_size}
    formats = {"INT8": scheme.qk_format == "int8", "LARGEST": LARGEST[scheme.qk_format]}
    turn = {"SIZE": size, "FACTOR": size**-0.5, "STAGES": size.bit_length() - 1}
    caches = {"k_ptr": as_bytes(call.k_cache), "v_ptr": as_bytes(call.v_cache)}
    channel = scheme.v_scale == "channel"
    if scheme.smooth_k or channel:
        sums = empty(seqs, kv_heads, blocks, dim_pad, dtype=torch.float64) if scheme.smooth_k else None
        peaks = empty(seqs, kv_heads, blocks, dim_v_pad) if channel else None
        both = {"sums_ptr": sums, "peaks_ptr": peaks, "blocks": blocks}
        _statistics[(blocks, kv_heads, seqs)](**caches, **both, **pool, **shapes, num_warps=4)
        _gather[(kv_heads, seqs)](
            **both,
            means_ptr=codes.mean,
            scales_ptr=codes.v_scale if channel else None,
            used_ptr=pool["used_ptr"],
            KV_HEADS=kv_heads,
            DIM_PAD=dim_pad,
            DIM_V_PAD=dim_v_pad,
            DTYPE=_TYPES[call.q.dtype],
            num_warps=4,
        )
    _quantise_kv[(blocks, kv_heads, seqs)](
        **caches,
        k_codes_ptr=_bytes(codes.k),
        k_scales_ptr=codes.k_scale,
        v_codes_ptr=None if codes.v is None else _bytes(codes.v),
        v_scales_ptr=codes.v_scale,
        means_ptr=codes.mean,
        signs_ptr=signs,
        **pool,
        blocks=blocks,
        **shapes,
        **formats,
        V_CHANNEL=channel,
        **turn,
        num_warps=8,
        enable_fp_fusion=False,
    )
    _quantise_q[(call.q.shape[0] // Q_BLOCK + seqs, heads)](
        q_ptr=call.q,
        codes_ptr=_bytes(codes.q),
        scales_ptr=codes.q_scale,
        offsets_ptr=codes.offset,
        means_ptr=codes.mean,
        signs_ptr=signs,
        **{name: launch.arguments[name] for name in ("cu_ptr", "used_ptr", "q_strides", "seqs", "HEADS", "GROUP", "DIM", "SEQS")},
        softmax_scale=call.softmax_scale,
        DIM_PAD=dim_pad,
        **formats,
        **turn,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return codes


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _bytes(codes: Tensor) -> Tensor:
    """Codes as a kernel stores them: e4m3 as uint8."""
    return codes if codes.dtype == torch.int8 else codes.view(torch.uint8)
