"""MLX's `mx.fast.scaled_dot_product_attention` on CPUs, with its own sinks and its own lower-right causal rule.

Read in MLX 0.32's source: on the CPU it is unfused, q is scaled and scores are formed in the format of q, and the softmax is in
fp32.  With 16-bit inputs that rounds the scores, which no record of a kernel can promise: that kernel is listed by itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oracle.contract import SCALES, Answer, Call, Precision, Record, contract_kernel
from oracle.kernels.field.sequences import Dense, by_sequence


def _given(x: Tensor) -> Any:
    """The tensor as an array of MLX, bit by bit: numpy has no bfloat16."""
    import mlx.core as mx

    if x.dtype is torch.bfloat16:
        return mx.array(x.view(torch.uint16).numpy()).view(mx.bfloat16)
    return mx.array(x.numpy())


def _taken(x: Any, dtype: torch.dtype) -> Tensor:
    """The array as a tensor, bit by bit."""
    import mlx.core as mx
    import numpy as np

    if dtype is torch.bfloat16:
        return torch.from_numpy(np.array(x.view(mx.uint16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def _attend(dense: Dense) -> tuple[Tensor, None]:
    """MLX over one sequence."""
    import mlx.core as mx

    q, k, v = (_given(x) for x in dense.heads_first())
    mask = "causal" if dense.causal else None if dense.full else mx.array(dense.mask().numpy())
    sinks = None if dense.call.sinks is None else _given(dense.call.sinks)
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=dense.call.softmax_scale, mask=mask, sinks=sinks, stream=mx.cpu)
    return _taken(out, dense.q.dtype)[0].transpose(0, 1), None


_RECORD = Record(
    head_dims=(40, 64, 80, 96, 128, 256, 512),
    uneven_head_dims=((192, 128), (128, 64), (64, 128), (576, 512)),
    page_sizes=(1, 8, 16, 32, 64, 128, 256),
    devices=("cpu",),
    precision=Precision(eps_exp=2.0**-21, subtract_first=True),
)
_LACKS = ("softcap", *SCALES, "return_lse")


@contract_kernel(replace(_RECORD, dtypes=("fp32",)), lacks=_LACKS)
def attention_fp32(call: Call, _: bool) -> Answer:
    """Attention by MLX in float32."""
    return by_sequence(call, _attend)


@contract_kernel(_RECORD, lacks=(*_LACKS, "sinks"))
def attention_16(call: Call, _: bool) -> Answer:
    """Attention by MLX with 16-bit inputs; sinks would have to be of that format too."""
    return by_sequence(call, _attend)
