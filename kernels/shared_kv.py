"""Prefill where K and V share a projection: three kernels that read 640 elements of a key instead of 1024.

In Gemma 4's global layers K is a projection, RMS-normed, times a weight, a quarter of its columns rotated; V is the same
projection, RMS-normed.  So the unrotated columns of K are V times the weight, and the pool need not hold them: a row is
[V's second half | K's rotated quarter | V's second quarter | V's first quarter] (`folded_pool`).  Its first head_dim elements
are K, but for the weight, with the halves of the head exchanged, its first and its last head_dim // 2 are V.  A program that
writes the second half of the output takes it from the tile that it has read for the scores.

The kernels differ in where the weight enters:

- `rebuilt_bf16`: K is rebuilt and rounded, as a pool of K would hold it, but from a V and a weight that were rounded before;
- `rebuilt_fp32`: K is rebuilt and not rounded: q times the weight is kept as a sum of two bf16 numbers, which is off by 2^-17;
- `folded`: q times the weight, rounded to bf16.

As kernels of the contract they take pools of K and V and fold what the plan declares live, which is not what a server would do
each time: `prefill` takes the folded pool itself.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The compiled functions below are written in Triton's language, which has no types that mypy knows.

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from oracle.contract import SCALES, Answer, Call, Kernel, Precision, Record, contract_kernel
from oracle.kernels.rebuilt_k import read_pages
from oracle.kernels.triton_host import NO_LIMIT
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
    total,
)

# isort: split

import triton
import triton.language as tl

from oracle.kernels.triton_tiles import descriptor, fits_tma, page_at, place, rows_of

Form = Literal["rebuilt_bf16", "rebuilt_fp32", "folded"]
ROTATED = 4  # one in so many columns of K is rotated: the first ones
_KEYS = 64  # of a tile


@triton.jit(do_not_specialize=["table_stride", "table_step", "seqs", "scale", "right"])
def _prefill(
    q_ptr,
    source,
    weight_ptr,
    out_ptr,
    lse_ptr,
    cu_ptr,
    used_ptr,
    table_ptr,
    q_strides,
    strides,
    out_strides,
    table_stride,
    table_step,
    seqs,
    scale,
    right,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    PAGE: tl.constexpr,
    SEQS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SECOND: tl.constexpr,
    FORM: tl.constexpr,
    TMA: tl.constexpr,
):
    """Writes the first half of the output's columns, or the second and the LSE, of a tile of query rows and one kv head.

    `source` is the folded pool or, with TMA, a descriptor of it as (pages, kv_heads, page_size, dim); TURNED counts K's rotated
    columns; lse_ptr may be None.  All else is as in `oracle.kernels.triton_split`.
    """
    seq, start, q_len, kv_len, row_begin, row_end = place(cu_ptr, used_ptr, seqs, GROUP, SEQS, ROWS)
    if row_begin >= row_end:
        return
    kv_head = tl.program_id(1).to(tl.int64)
    dtype = q_ptr.dtype.element_ty

    row = tl.arange(0, ROWS) + (row_begin % GROUP).to(tl.int32)  # of those from the tile's first token on
    live = row < (row_end - row_begin // GROUP * GROUP).to(tl.int32)
    token = row // GROUP
    head = row % GROUP
    first_pos = kv_len - q_len + row_begin // GROUP
    last_pos = kv_len - q_len + (row_end - 1) // GROUP
    row_hi = tl.minimum(first_pos.to(tl.int32) + token + right + 1, kv_len.to(tl.int32))[:, None]
    hi = tl.minimum(last_pos + right + 1, kv_len).to(tl.int32)
    whole = (tl.maximum(tl.minimum(first_pos + right + 1, kv_len), 0) // KEYS * KEYS).to(tl.int32)  # all rows see those before

    start += row_begin // GROUP
    col = tl.arange(0, HALF)
    q_rows = q_ptr + start * q_strides[0] + kv_head * GROUP * q_strides[1]
    q_rows += token.to(tl.int64) * q_strides[0] + head.to(tl.int64) * q_strides[1]
    q_rows = q_rows[:, None] + col.to(tl.int64)[None, :] * q_strides[2]
    front = operand(tl.load(q_rows, mask=live[:, None], other=0), dtype)
    back = operand(tl.load(q_rows + HALF * q_strides[2], mask=live[:, None], other=0), dtype)
    w_front = tl.where(col < TURNED, 1.0, tl.load(weight_ptr + col))[None, :]  # K's rotated columns have it already
    w_back = tl.load(weight_ptr + HALF + col)[None, :]
    if FORM == "rebuilt_bf16":
        w_front = rounded(w_front, dtype).to(tl.float32)
        w_back = rounded(w_back, dtype).to(tl.float32)
    else:
        f, b = front.to(tl.float32) * w_front, back.to(tl.float32) * w_back
        front, back = rounded(f, dtype), rounded(b, dtype)
        if FORM == "rebuilt_fp32":
            front_rest = rounded(f - front.to(tl.float32), dtype)
            back_rest = rounded(b - back.to(tl.float32), dtype)

    table = table_ptr + seq * table_stride
    m = tl.full([ROWS], FLOOR, tl.float32)  # of logits over ln 2
    denominator = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, HALF], 0.0, tl.float32)
    scale *= LOG2E

    for span in tl.static_range(2):  # the keys that all rows see, the rest
        if span == 0:
            begin, end = tl.full([], 0, tl.int32), whole
        else:
            begin, end = whole, hi
        ahead = page_at(table, table_step, begin, end, PAGE, KEYS, TMA)
        for at in tl.range(begin, end, KEYS):
            page = ahead
            ahead = page_at(table, table_step, at + KEYS, end, PAGE, KEYS, TMA)  # fetched while this tile is worked on
            k_back = rows_of(source, strides, page, at, end, kv_head, 0, HALF, HALF, PAGE, KEYS, TMA, span == 0)
            k_front = rows_of(source, strides, page, at, end, kv_head, HALF, HALF, HALF, PAGE, KEYS, TMA, span == 0)
            key = tl.add(tl.arange(0, KEYS), at, sanitize_overflow=False)
            v = k_back
            if FORM == "rebuilt_bf16":
                k_back = rounded(operand(k_back, dtype).to(tl.float32) * w_back, dtype)
                k_front = rounded(operand(k_front, dtype).to(tl.float32) * w_front, dtype)
            else:
                k_back, k_front = operand(k_back, dtype), operand(k_front, dtype)
            s = dot(back, tl.trans(k_back))
            if FORM == "rebuilt_fp32":
                s += dot(back_rest, tl.trans(k_back))
                s += dot(front_rest, tl.trans(k_front))
            s += dot(front, tl.trans(k_front))
            s *= scale
            if span == 1:
                s = tl.where(key[None, :] < row_hi, s, float("-inf"))
            m_new = tl.maximum(m, largest(s, 1))
            p = tl.exp2(s - m_new[:, None])
            fade = tl.exp2(m - m_new)
            denominator = denominator * fade + total(p, 1)
            if not SECOND:
                v = rows_of(source, strides, page, at, end, kv_head, HALF + TURNED, HALF, HALF, PAGE, KEYS, TMA, span == 0)
            if TMA and span == 1:
                v = tl.where((key < end)[:, None], v, 0.0)  # what lies past the plan may be NaN
            weights = rounded(p, dtype)
            acc = acc * fade[:, None] + dot(weights, operand(v, dtype))
            m = m_new

    empty = denominator == 0.0
    divisor = tl.where(empty, 1.0, denominator)
    result = stored(acc / divisor[:, None], out_ptr.dtype.element_ty)
    column = HALF + col if SECOND else (col + TURNED) % HALF  # the pool's last HALF elements start at V's column TURNED
    out_rows = out_ptr + start * out_strides[0] + kv_head * GROUP * out_strides[1]
    out_rows += token.to(tl.int64) * out_strides[0] + head.to(tl.int64) * out_strides[1]
    tl.store(out_rows[:, None] + column.to(tl.int64)[None, :] * out_strides[2], result, mask=live[:, None])
    if SECOND and lse_ptr is not None:
        lse = tl.where(empty, float("-inf"), m * LN2 + tl.log(divisor))
        tl.store(lse_ptr + (start + token) * HEADS + kv_head * GROUP + head, lse, mask=live)


def folded_pool(k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """The folded pool of pools of K and V (pages, page_size, kv_heads, head_dim): the same but head_dim + head_dim // 4 wide."""
    half, turned = v_cache.shape[-1] // 2, v_cache.shape[-1] // ROTATED
    return torch.cat((v_cache[..., half:], k_cache[..., :turned], v_cache[..., turned:half], v_cache[..., :turned]), -1)


def prefill(
    q: Tensor,
    pool: Tensor,
    *,
    form: Form,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    page_table: Tensor,
    softmax_scale: float,
    k_norm_weight: Tensor,
    causal: bool = True,
    num_seqs: int | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (total_q, q_heads, head_dim) bf16 over a `folded_pool`; k_norm_weight is (head_dim,) float32.

    All else is as in the kernel contract.  Returns out, or (out, lse).  Raises ValueError for another dtype or head dim.
    """
    total_q, q_heads, dim = q.shape
    _, page_size, kv_heads, _ = pool.shape
    if q.dtype != torch.bfloat16 or pool.dtype != torch.bfloat16 or dim not in (64, 128, 256, 512):
        raise ValueError(
            f"kernels/shared_kv.py: got q {q.dtype}, pool {pool.dtype}, head dim {dim}; expected bfloat16 and 64, 128, 256 or 512"
        )
    seqs, group, half = seqused_k.shape[0] if num_seqs is None else num_seqs, q_heads // kv_heads, dim // 2
    out = q.new_empty(total_q, q_heads, dim) if out is None else out
    lse = q.new_empty(total_q, q_heads, dtype=torch.float32) if return_lse else None
    tma = not INTERPRETED and len(pool) > 0 and fits_tma(pool, _KEYS)
    rows = 64 if form == "rebuilt_fp32" else 128  # two parts of q take the shared memory of two rows
    if seqs and total_q:
        for second in (True, False):
            _prefill[(total_q * group // rows + seqs, kv_heads)](
                q,
                descriptor(pool, _KEYS, half) if tma else pool,
                k_norm_weight,
                out,
                lse,
                cu_seqlens_q.contiguous(),
                seqused_k.contiguous(),
                page_table,
                q.stride(),
                pool.stride(),
                out.stride(),
                *page_table.stride(),
                seqs,
                softmax_scale,
                0 if causal else NO_LIMIT,
                HEADS=q_heads,
                GROUP=group,
                HALF=half,
                TURNED=dim // ROTATED,
                PAGE=page_size,
                SEQS=max(256, triton.next_power_of_2(seqs)),
                ROWS=rows,
                KEYS=_KEYS,
                SECOND=second,
                FORM=form,
                TMA=tma,
                num_warps=rows // 16,
                num_stages=1,
                enable_fp_fusion=False,
            )
    return out if lse is None else (out, lse)


def _kernel(form: Form, what: str) -> Kernel:
    """`prefill` in this form as a kernel of the contract, with its record."""

    def run(call: Call, return_lse: bool) -> Answer:
        ids, table = read_pages(call)
        return prefill(
            call.q,
            folded_pool(call.k_cache[ids], call.v_cache[ids]),
            form=form,
            cu_seqlens_q=call.cu_seqlens_q,
            seqused_k=call.seqused_k,
            page_table=table,
            softmax_scale=call.softmax_scale,
            k_norm_weight=call.extras["k_norm_weight"],
            causal=call.causal,
            num_seqs=call.num_seqs,
            out=call.out,
            return_lse=return_lse,
        )

    run.__doc__ = what
    record = Record(
        dtypes=("bf16",),
        head_dims=(64, 128, 256, 512),
        devices=("cpu",) if INTERPRETED else ("cuda",),
        precision=Precision(eps_exp=2.0**-22, subtract_first=True),
        interpreted=bool(INTERPRETED),
    )
    lacks = ("window_size", "softcap", "sinks", *SCALES)
    return contract_kernel(record, lacks=lacks, extras=("k_norm_weight",), name=form)(run)


rebuilt_bf16 = _kernel("rebuilt_bf16", "K rebuilt from V and rounded to bf16: must be rejected.")
rebuilt_fp32 = _kernel("rebuilt_fp32", "K rebuilt from V and not rounded.")
folded = _kernel("folded", "K's norm weight folded into q.")
