"""Paged decode in Triton, the keys of a sequence split over programs: `decode`, the whole kernel contract.

A call of one to eight new tokens a sequence has too few query rows to fill a GPU: what takes time is reading the cache, and a
batch of 16 sequences and 4 kv heads is 64 programs.  So the keys that a tile of query rows sees are cut into shares, and a
program walks one share.  It leaves its sums, not yet divided, with their maximum and their weight (`_share`); a second launch
adds them up (`_merge`).  These two are what the share's natural-log LSE is made of.  They are merged before the logarithm is
taken, because a float32 LSE of 2^20, which logits may have, is only good to 1/16.  Sequences of more tokens, and those of one
share, are finished by their one program.

How many keys a share has follows from the keys that the tile sees, and so from its own sequence alone: a sequence has the same
bits in any batch.  A share grows with the square root of that number, so that the sums of a long context stay a few percent of
what is read of the cache.

Rows are (token, query head of the group) pairs as in `oracle.kernels.triton_prefill`.  Sequences of up to 16 rows and of more
are two launches, which leave each other's alone: 16 or 32 rows stay in registers (mma.sync), 64 are what Hopper's wgmma takes
at once from shared memory, so that eight tokens of eight heads read the cache once.  The host does not know which there are.
Where 64 rows of all columns of V would take too many registers, two programs, side by side, take half of the columns each and
both work out the scores: the second finds K in the L2 cache.

An e4m3 cache is fetched as words of two columns, which the copy engine and ldmatrix move as they move bf16.  A register of four
codes then holds two keys or columns twice over, and becomes a pair of even and a pair of odd columns without a shuffle
(`triton_tiles.columns_of`): q.k is a sum over the even columns and one over the odd ones, P.V an answer for each.

Scores are kept in powers of two, as in `oracle.kernels.triton_split`.  On a machine without a GPU the kernel runs in Triton's
interpreter.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The compiled functions below are written in Triton's language, which has no types that mypy knows.

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import torch

from oracle.contract import Precision
from oracle.kernels.triton_host import NO_LIMIT, Launch, as_bytes, triton_kernel
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

# isort: split

import triton
import triton.language as tl

from oracle.kernels.triton_tiles import columns_of, descriptor, fits_tma, fits_words, head_scale, page_at, place, rows_of

TOKENS = 8  # new tokens of a sequence whose keys are split
FEW, MANY = 16, 64  # query rows of a small tile, and of any other at most
MOST_KEYS = 64  # of a tile
SHARE = 128  # keys of a share at least
_GROWTH = 32  # a share of n keys is doubled where n^2 is less than so many times the keys that are seen
_DOUBLINGS = 10  # of a share at most: 2^17 keys of 2^29
_STEP = 8  # shares that are added up at once

_most_keys = tl.constexpr(MOST_KEYS)
_share_keys, _doublings, _tokens = tl.constexpr(SHARE), tl.constexpr(_DOUBLINGS), tl.constexpr(TOKENS)
_few_rows = tl.constexpr(FEW)
_growth, _step = tl.constexpr(_GROWTH), tl.constexpr(_STEP)
_CHANGING = ["seqs", "out_scale", "left", "right", "by_row", "by_seq", "most"]  # from call to call: no variants are compiled


@device_function
def _cut(q_len, kv_len, row_begin, row_end, left, right, GROUP: tl.constexpr):
    """Where keys that rows [row_begin, row_end) of a sequence see begin, in whole tiles, and end; keys of a share; shares: int64.

    There is one share at least, which is empty where no key is seen.
    """
    first_pos = kv_len - q_len + row_begin // GROUP
    last_pos = kv_len - q_len + (row_end - 1) // GROUP
    lo = tl.maximum(first_pos - left, 0) // _most_keys * _most_keys
    hi = tl.maximum(tl.minimum(last_pos + right + 1, kv_len), lo)
    seen = hi - lo
    share = seen * 0 + _share_keys
    for _ in tl.static_range(_doublings):
        share = tl.where(share * share < _growth * seen, 2 * share, share)
    share = tl.where(q_len > _tokens, tl.maximum(seen, 1), share)
    return lo, hi, share, tl.maximum((seen + share - 1) // share, 1)


@device_function
def with_sink(m, denominator, sink):
    """The row sum and the natural maximum once a sink has joined, given those before it, and what to multiply sums by.

    Last, so that weights are rounded beside the largest of them and not beside the sink.
    """
    m_new = tl.maximum(m, sink * LOG2E)
    fade = tl.exp2(m - m_new)
    denominator = denominator * fade + tl.exp2(sink * LOG2E - m_new)
    return denominator, tl.where(m_new > m, sink, m * LN2), fade


@triton.jit(do_not_specialize=[*_CHANGING, "table_stride", "table_step", "scale", "softcap"])
def _share(
    q_ptr,
    k_source,
    v_source,
    out_ptr,
    lse_ptr,
    sums_ptr,
    tops_ptr,
    weights_ptr,
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
    by_row,
    by_seq,
    most,
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
    TMA: tl.constexpr,
    FEW: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One share of the keys of a tile of query rows and one kv head: its sums, or the answer where it is the only one.

    sums (slots, HEADS, most, DIM_V), tops and weights (slots, HEADS, most), all float32.  The slot of a row is its own number,
    or that of its sequence times TOKENS and its token, as `by_row` and `by_seq` say.  The rest is as in `triton_split._prefill`.
    """
    seq, start, q_len, kv_len, row_begin, row_end = place(cu_ptr, used_ptr, seqs, GROUP, SEQS, ROWS, PARTS)
    if row_begin >= row_end:
        return
    if (q_len * GROUP <= _few_rows) != FEW:
        return
    # Heads of a page come together: they lie side by side in it.
    kv_heads: tl.constexpr = HEADS // GROUP
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    part = tl.program_id(1) // kv_heads
    lo, hi, share, shares = _cut(q_len, kv_len, row_begin, row_end, left, right, GROUP)
    if part >= shares:
        return
    dtype = q_ptr.dtype.element_ty

    row = row_begin + tl.arange(0, ROWS)
    live = row < row_end
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    first_pos = kv_len - q_len + row_begin // GROUP
    last_pos = kv_len - q_len + (row_end - 1) // GROUP
    pos = kv_len - q_len + token
    row_lo = (pos - left).to(tl.int32)[:, None]
    row_hi = tl.minimum(pos + right + 1, kv_len).to(tl.int32)[:, None]
    begin = (lo + part * share).to(tl.int32)
    end = tl.minimum(lo + (part + 1) * share, hi).to(tl.int32)
    # Every row sees all keys of the tiles between these two.
    whole_lo = tl.maximum(last_pos - left + KEYS - 1, 0) // KEYS * KEYS
    whole_hi = tl.maximum(tl.minimum(first_pos + right + 1, kv_len), 0) // KEYS * KEYS
    middle = tl.minimum(tl.maximum(whole_lo.to(tl.int32), begin), end) if LEFT else begin
    last = tl.minimum(tl.maximum(whole_hi.to(tl.int32), middle), end)

    pack: tl.constexpr = 2 if WORDS else 1
    width: tl.constexpr = DIM_V_PAD // PARTS // pack
    column = tl.program_id(0) % PARTS * width  # of V as it is fetched
    d = tl.arange(0, DIM_PAD // pack).to(tl.int64)[None, :] * pack
    q_rows = (q_ptr + (start + token) * q_strides[0] + head * q_strides[1])[:, None]
    q = operand(tl.load(q_rows + d * q_strides[2], mask=live[:, None] & (d < DIM), other=0), dtype)
    if WORDS:
        d += 1
        q_odd = operand(tl.load(q_rows + d * q_strides[2], mask=live[:, None] & (d < DIM), other=0), dtype)
    table = table_ptr + seq * table_stride
    scale *= head_scale(q_scale_ptr, q_scale_strides, seq, kv_head)
    scale *= head_scale(k_scale_ptr, k_scale_strides, seq, kv_head)
    out_scale *= head_scale(v_scale_ptr, v_scale_strides, seq, kv_head)

    m = tl.full([ROWS], FLOOR, tl.float32)  # of logits over ln 2
    denominator = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, width], 0.0, tl.float32)
    if WORDS:
        acc_odd = acc
    if not SOFTCAP:
        scale *= LOG2E

    for span in tl.static_range(0 if LEFT else 1, 3):  # the window's left edge, the keys that all rows see, the rest
        if span == 0:
            first, stop = begin, middle
        elif span == 1:
            first, stop = middle, last
        else:
            first, stop = last, end
        ahead = page_at(table, table_step, first, stop, PAGE, KEYS, TMA)
        for at in tl.range(first, stop, KEYS):
            page = ahead
            ahead = page_at(table, table_step, at + KEYS, stop, PAGE, KEYS, TMA)  # fetched while this tile is worked on
            k = rows_of(k_source, k_strides, page, at, stop, kv_head, 0, DIM // pack, DIM_PAD // pack, PAGE, KEYS, TMA, span == 1)
            v = rows_of(v_source, v_strides, page, at, stop, kv_head, column, DIM_V // pack, width, PAGE, KEYS, TMA, span == 1)
            if WORDS:
                k, k_odd = columns_of(tl.trans(k), dtype)
                s = (dot(q, k) + dot(q_odd, k_odd)) * scale
            else:
                s = dot(q, tl.trans(operand(k, dtype))) * scale
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
            weights = rounded(p, dtype)
            if TMA and span != 1 and not (WORDS and dtype == tl.bfloat16):
                v = tl.where((key < stop)[:, None], v, 0)  # past the plan may be NaN; words in bf16 are finite whatever they hold
            if WORDS:
                v, v_odd = columns_of(v, dtype)
                acc_odd = acc_odd * fade[:, None] + dot(weights, v_odd)
            else:
                v = operand(v, dtype)
            acc = acc * fade[:, None] + dot(weights, v)
            m = m_new

    if WORDS:
        acc = tl.reshape(tl.join(acc, acc_odd), [ROWS, width * pack])
    dv = column * pack + tl.arange(0, width * pack).to(tl.int64)[None, :]
    if shares > 1:
        slot = ((start * by_row + seq * by_seq + token) * HEADS + head) * most + part
        tl.store(tops_ptr + slot, m, mask=live)  # by each program of the row, the same
        tl.store(weights_ptr + slot, denominator, mask=live)
        tl.store(sums_ptr + slot[:, None] * DIM_V + dv, acc, mask=live[:, None] & (dv < DIM_V))
        return
    top = m * LN2
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=live, other=0).to(tl.float32)
        denominator, top, fade = with_sink(m, denominator, sink)
        acc *= fade[:, None]
    empty = denominator == 0.0  # no key and no sink; else the largest term alone is 1
    divisor = tl.where(empty, 1.0, denominator)
    result = stored(acc / divisor[:, None] * out_scale, out_ptr.dtype.element_ty)
    out_rows = out_ptr + (start + token) * out_strides[0] + head * out_strides[1]
    tl.store(out_rows[:, None] + dv * out_strides[2], result, mask=live[:, None] & (dv < DIM_V))
    if lse_ptr is not None:
        lse = tl.where(empty, float("-inf"), top + tl.log(divisor))
        tl.store(lse_ptr + (start + token) * HEADS + head, lse, mask=live)


@triton.jit(do_not_specialize=_CHANGING)
def _merge(
    out_ptr,
    lse_ptr,
    sums_ptr,
    tops_ptr,
    weights_ptr,
    cu_ptr,
    used_ptr,
    sinks_ptr,
    v_scale_ptr,
    out_strides,
    v_scale_strides,
    seqs,
    out_scale,
    left,
    right,
    by_row,
    by_seq,
    most,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM_V: tl.constexpr,
    SEQS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM_V_PAD: tl.constexpr,
):
    """Writes `out` and, where lse_ptr is given, the LSE of one query row and head whose keys were split."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, SEQS).to(tl.int64)
    behind = tl.load(cu_ptr + i + 1, mask=i < seqs, other=0).to(tl.int64)
    seq = total(((behind <= row) & (i < seqs)).to(tl.int64), 0)
    if seq >= seqs:
        return
    start = tl.load(cu_ptr + seq).to(tl.int64)
    q_len = tl.load(cu_ptr + seq + 1).to(tl.int64) - start
    kv_len = tl.load(used_ptr + seq).to(tl.int64)
    own = (row - start) * GROUP + head % GROUP
    row_begin = own // ROWS * ROWS
    row_end = tl.minimum(row_begin + ROWS, q_len * GROUP)
    _, _, _, shares = _cut(q_len, kv_len, row_begin, row_end, left, right, GROUP)
    if shares == 1:
        return  # its one program has finished it
    slot = ((start * by_row + seq * by_seq + row - start) * HEADS + head) * most
    m = tl.full([1], FLOOR, tl.float32)
    for at in tl.range(0, shares, _step):
        part = at + tl.arange(0, _step)
        m = tl.maximum(m, largest(tl.load(tops_ptr + slot + part, mask=part < shares, other=FLOOR), 0))
    denominator = tl.full([1], 0.0, tl.float32)
    acc = tl.full([DIM_V_PAD], 0.0, tl.float32)
    dv = tl.arange(0, DIM_V_PAD).to(tl.int64)
    for at in tl.range(0, shares, _step):
        part = at + tl.arange(0, _step)
        held = part < shares
        fade = tl.exp2(tl.load(tops_ptr + slot + part, mask=held, other=FLOOR) - m)
        denominator += total(tl.load(weights_ptr + slot + part, mask=held, other=0.0) * fade, 0)
        sums = tl.load(sums_ptr + (slot + part)[:, None] * DIM_V + dv, mask=held[:, None] & (dv < DIM_V), other=0.0)
        acc += total(sums * fade[:, None], 0)
    top = m * LN2
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        denominator, top, fade = with_sink(m, denominator, sink)
        acc *= fade
    empty = denominator == 0.0
    divisor = tl.where(empty, 1.0, denominator)
    out_scale *= head_scale(v_scale_ptr, v_scale_strides, seq, head // GROUP)
    result = stored(acc / divisor * out_scale, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_strides[0] + head * out_strides[1] + dv * out_strides[2], result, mask=dv < DIM_V)
    if lse_ptr is not None:
        lse = tl.where(empty, float("-inf"), top + tl.log(divisor))
        tl.store(lse_ptr + row * HEADS + head + tl.arange(0, 1), lse)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """What one program of `_share` holds, and how the compiler treats it."""

    rows: int  # query rows of a tile
    keys: int  # of a tile, MOST_KEYS or a part of it
    parts: int  # programs that share the columns of V; each works out the scores
    warps: int
    stages: int  # key tiles in flight


def tiling(size: int, words: bool, group: int, few: bool) -> Tiling:
    """The tiling for heads padded to `size` columns, in e4m3 words or not, `group` query heads a kv head, and sequences of few
    rows or of more."""
    keys = max(16, min(MOST_KEYS, 2**14 * (1 + words) // size))  # 32 KiB of K
    warps, stages = 8 if size >= 256 else 4, 1 if size > 512 else 2 if size == 256 else 3
    if few:
        return Tiling(rows=FEW, keys=keys, parts=1, warps=warps, stages=2 if words and size == 512 else stages)
    # wgmma takes e4m3 as bf16 from shared memory only: a second pass over K and V costs less where heads are wide.
    if TOKENS * group <= MANY // 2 or (words and size >= 256):
        return Tiling(rows=MANY // 2, keys=keys, parts=1, warps=warps, stages=stages)
    if size == 512:  # one program's sums of all columns would take half of the registers, and leave no room for a third tile
        return Tiling(rows=MANY, keys=keys, parts=2, warps=4, stages=3)
    return Tiling(rows=MANY, keys=keys, parts=1, warps=warps, stages=min(stages, 2))


def most_shares(keys: int) -> int:
    """Shares that `_cut` makes of so many keys or fewer, at most."""
    return max(1, isqrt(max(0, keys - 1) // _GROWTH) + 1, -(-keys // (SHARE << _DOUBLINGS)))


def _start(launch: Launch) -> None:
    """Launches `_share` and `_merge`."""
    call, arguments = launch.call, launch.arguments
    total_q, heads, _ = call.q.shape
    kv_heads, dim_v = call.k_cache.shape[2], call.v_cache.shape[3]
    seen = call.page_table.shape[1] * call.k_cache.shape[1]
    if max(arguments["left"], arguments["right"]) < NO_LIMIT:
        seen = min(seen, arguments["left"] + arguments["right"] + TOKENS + MOST_KEYS)
    most = most_shares(seen)
    by_row = total_q <= TOKENS * call.live_seqs
    slots = total_q if by_row else TOKENS * call.live_seqs
    tops, weights = torch.empty(2, slots, heads, most, dtype=torch.float32, device=call.q.device)
    both = {
        "sums_ptr": torch.empty(slots, heads, most, dim_v, dtype=torch.float32, device=call.q.device),
        "tops_ptr": tops,
        "weights_ptr": weights,
        "by_row": int(by_row),
        "by_seq": 0 if by_row else TOKENS,
        "most": most,
        "DIM_V_PAD": launch.dim_v_pad,
    }
    pools = (call.k_cache, call.v_cache)
    words = min(launch.dim_pad, launch.dim_v_pad) >= 32 and all(map(fits_words, pools))
    if words:
        pools = (call.k_cache.view(torch.int16), call.v_cache.view(torch.int16))
        arguments = arguments | {"k_strides": pools[0].stride(), "v_strides": pools[1].stride()}
    group = heads // kv_heads
    tiles = {few: tiling(max(launch.dim_pad, launch.dim_v_pad), words, group, few) for few in (True, False)}
    for few, tile in tiles.items():
        if not (group <= FEW if few else total_q * group > FEW):
            continue
        tma = not INTERPRETED and all((words or pool.dtype == call.q.dtype) and fits_tma(pool, tile.keys) for pool in pools)
        widths = [width // (1 + words) for width in (launch.dim_pad, launch.dim_v_pad // tile.parts)]
        k_source, v_source = (
            descriptor(pool, tile.keys, width) if tma else as_bytes(pool) for pool, width in zip(pools, widths, strict=True)
        )
        _share[(launch.tiles(tile.rows) * tile.parts, kv_heads * most)](
            **arguments,
            **both,
            k_source=k_source,
            v_source=v_source,
            DIM_PAD=launch.dim_pad,
            ROWS=tile.rows,
            KEYS=tile.keys,
            PARTS=tile.parts,
            TMA=tma,
            FEW=few,
            WORDS=words,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
    if most > 1:
        names = ["out_ptr", "lse_ptr", "cu_ptr", "used_ptr", "sinks_ptr", "v_scale_ptr", "out_strides", "v_scale_strides"]
        names += ["seqs", "out_scale", "left", "right", "HEADS", "GROUP", "DIM_V", "SEQS"]
        rows = tiles[False].rows  # right for sequences of few rows too, which are one tile either way
        _merge[(total_q, heads)](**{n: arguments[n] for n in names}, **both, ROWS=rows, num_warps=4, enable_fp_fusion=False)


decode = triton_kernel(
    "decode",
    "Attention by the contract, for a few new tokens a sequence: their keys are split over programs.",
    _start,
    who="kernels/triton_decode.py",
    dtypes=("bf16", "fp16"),
    precision=Precision(eps_exp=2.0**-22, eps_tanh=2.0**-19, subtract_first=True),  # as triton_split's
    declares={"batch_invariant": True, "thresholds": (TOKENS, SHARE, SHARE * SHARE // _GROWTH)},
)
