"""PyTorch's own attention, `scaled_dot_product_attention`, as kernels of the contract.

Nothing is emulated.  For each sequence the adapter gathers the live keys that some row sees from the page pool, states the
window and the bottom-right causal rule as a mask, and calls torch once.  `sdpa_flash` is the fast CPU kernel of this table.

What torch does with 16-bit inputs, as measured with torch 2.13: FLASH_ATTENTION rounds P to the format of q before P.V and
sums the row before that; MATH widens q, k and v to fp32 and rounds the output only, unless it has been allowed to reduce in
the format of q, when it rounds scores and P to that format as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from oracle.contract import SCALES, Answer, Call, Precision, Record, contract_kernel

_NO_LIMIT = 2**30  # a window bound that no sequence reaches and that int32 sums survive
_HEAD_DIMS = (40, 64, 72, 80, 96, 112, 128, 192, 256, 512, 576)
_UNEVEN_HEAD_DIMS = ((96, 64), (128, 256), (192, 128), (576, 512))
_PAGE_SIZES = (1, 8, 16, 32, 64, 128, 256)
_LACKS = ("softcap", "sinks", *SCALES)

# (q, k, v, mask or None, is_causal, scale) -> (out, lse or None), all (1, heads, length, ...)
_Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], tuple[Tensor, Tensor | None]]


def _public(backend: SDPBackend) -> _Attention:
    """torch's public function under one backend.  It returns no LSE."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, None]:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out, None

    return attend


def _flash_with_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    """The operator under FLASH_ATTENTION, for the LSE that the public function drops: natural log, (1, heads, len_q) fp32."""
    if mask is not None:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -inf)  # the operator takes no boolean mask
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return out, lse


def _gather(cache: Tensor, pages: Tensor, start: int, stop: int) -> Tensor:
    """Tokens start..stop-1 counted from the first of `pages`, contiguous: (1, kv_heads, stop - start, dim)."""
    return cache[pages].flatten(0, 1)[start:stop].transpose(0, 1).contiguous()[None]


def _mask(lo: int, pos: int, kv_len: int, left: int, right: int, device: torch.device) -> Tensor | None:
    """Which of keys lo..kv_len-1 the rows at positions pos..kv_len-1 see, (rows, keys) bool; None where it is all of them."""
    if kv_len - 1 - left <= lo and pos + right >= kv_len - 1:
        return None
    keys, rows = (torch.arange(first, kv_len, dtype=torch.int32, device=device) for first in (lo, pos))
    ahead = keys - rows[:, None]
    return (ahead >= -left) & (ahead <= right)


def _run(call: Call, attend: _Attention, lse: Tensor | None = None) -> Tensor:
    """The answer of `attend` to every sequence of `call`; fills lse (total_q, q_heads) float32 where it is given."""
    page_size, dim_v = call.v_cache.shape[1], call.v_cache.shape[3]
    out = call.q.new_empty(*call.q.shape[:2], dim_v) if call.out is None else call.out
    offsets = call.cu_seqlens_q[: call.live_seqs + 1].tolist()
    left, right = (_NO_LIMIT if limit < 0 else min(limit, _NO_LIMIT) for limit in call.window_size)
    if call.causal:
        right = 0
    for seq, kv_len in enumerate(call.seqused_k[: call.live_seqs].tolist()):
        # Rows before the first key see nothing.  What torch answers to a fully masked row is not documented (2.13: out 0,
        # LSE 0), so these rows, always the first of a sequence, are not sent to it.
        begin, end = offsets[seq], offsets[seq + 1]
        first = end if kv_len == 0 else min(end, max(begin, end - kv_len - right))
        out[begin:first] = 0
        if lse is not None:
            lse[begin:first] = -inf
        if first == end:
            continue
        pos = kv_len - (end - first)
        lo = max(0, pos - left)
        page = lo // page_size
        pages = call.page_table[seq, page : -(-kv_len // page_size)].long()
        q = call.q[first:end].transpose(0, 1).contiguous()[None]
        k, v = (_gather(cache, pages, lo - page * page_size, kv_len - page * page_size) for cache in (call.k_cache, call.v_cache))
        is_causal = right == 0 and pos == 0 and left >= kv_len - 1  # torch's flag aligns top-left: the same when square
        mask = None if is_causal else _mask(lo, pos, kv_len, left, right, q.device)
        answer, row_lse = attend(q, k, v, mask, is_causal, call.softmax_scale)
        out[first:end] = answer[0].transpose(0, 1)
        if lse is not None and row_lse is not None:
            lse[first:end] = row_lse[0].T
    return out


def _flash(call: Call, return_lse: bool) -> Answer:
    """Attention by torch's FLASH_ATTENTION backend; head_dim_v must equal head_dim."""
    if not return_lse:
        return _run(call, _public(SDPBackend.FLASH_ATTENTION))
    lse = call.q.new_empty(call.q.shape[:2], dtype=torch.float32)
    return _run(call, _flash_with_lse, lse), lse


# Measured: exp is off by up to 2^-13.2 in bf16 and fp16 (AVX-512; the largest term, exp(0), by 2^-14.2), 2^-21.4 in fp32.
_FLASH = Record(
    head_dims=_HEAD_DIMS,
    page_sizes=_PAGE_SIZES,
    devices=("cpu",),
    precision=Precision(eps_exp=2.0**-13, subtract_first=True),
)
_FLASH_FP32 = replace(_FLASH, dtypes=("fp32",), precision=replace(_FLASH.precision, eps_exp=2.0**-21))
sdpa_flash = contract_kernel(_FLASH, lacks=_LACKS, name="sdpa_flash")(_flash)
sdpa_flash_fp32 = contract_kernel(_FLASH_FP32, lacks=_LACKS, name="sdpa_flash_fp32")(_flash)


@contract_kernel(
    Record(
        dtypes=("bf16", "fp16", "fp32"),
        head_dims=_HEAD_DIMS,
        uneven_head_dims=_UNEVEN_HEAD_DIMS,
        page_sizes=_PAGE_SIZES,
        precision=Precision(p_format="fp32", eps_exp=2.0**-21, subtract_first=True),
    ),
    lacks=(*_LACKS, "return_lse"),
)
def sdpa_math(call: Call, _: bool) -> Tensor:
    """Attention by torch's MATH backend, in fp32 whatever the inputs are."""
    return _run(call, _public(SDPBackend.MATH))


@contract_kernel(
    Record(
        head_dims=_HEAD_DIMS,
        uneven_head_dims=_UNEVEN_HEAD_DIMS,
        page_sizes=_PAGE_SIZES,
        devices=("cpu",),
        precision=Precision(eps_exp=2.0**-21, subtract_first=True),
    ),
    lacks=(*_LACKS, "return_lse"),
)
def sdpa_math_reduced(call: Call, _: bool) -> Tensor:
    """Less than its record says: `sdpa_math` allowed to reduce in the format of q, so that it rounds the scores to it too."""
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]  # torch's
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        return _run(call, _public(SDPBackend.MATH))
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)
