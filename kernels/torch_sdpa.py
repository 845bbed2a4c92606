"""PyTorch's own attention, `scaled_dot_product_attention`, as kernels of the contract.

Nothing is emulated.  For each sequence the adapter states the window and the bottom-right causal rule as a mask, and calls torch
once.  `sdpa_flash` is the fast CPU kernel of this table.

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
from oracle.kernels.field.sequences import Attend, Dense, by_sequence

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


def _by(attend: _Attention) -> Attend:
    """`attend` over one sequence, the window and bottom-right causal rule as a mask where torch's own flag does not say it."""

    def run(dense: Dense) -> tuple[Tensor, Tensor | None]:
        is_causal = dense.causal and dense.pos == 0  # torch's flag aligns top-left: the same when square
        mask = None if is_causal or dense.full else dense.mask()
        out, lse = attend(*dense.heads_first(), mask, is_causal, dense.call.softmax_scale)
        return out[0].transpose(0, 1), None if lse is None else lse[0].T

    return run


def _flash(call: Call, return_lse: bool) -> Answer:
    """Attention by torch's FLASH_ATTENTION backend; head_dim_v must equal head_dim."""
    attend = _flash_with_lse if return_lse else _public(SDPBackend.FLASH_ATTENTION)
    return by_sequence(call, _by(attend), return_lse=return_lse)


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
def sdpa_math(call: Call, _: bool) -> Answer:
    """Attention by torch's MATH backend, in fp32 whatever the inputs are."""
    return by_sequence(call, _by(_public(SDPBackend.MATH)))


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
def sdpa_math_reduced(call: Call, _: bool) -> Answer:
    """Less than its record says: `sdpa_math` allowed to reduce in the format of q, so that it rounds the scores to it too."""
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]  # torch's
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        return by_sequence(call, _by(_public(SDPBackend.MATH)))
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)
