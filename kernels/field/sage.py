"""SageAttention 1 (`sageattn`), Triton kernels that quantise q and k to int8 inside.

Its causal rule is for q and k of equal length, as it says itself: there a whole prompt is one call, and any other row, which sees
all keys up to its own, is a call of its own, as in decoding.  It has no window, softcap, sinks or LSE.

Read in the source of version 1.0.6: the mean key is taken off (`smooth_k`, in place: it is given copies), q is quantised in
blocks of 128 rows and k of 64 tokens, v becomes float16, and P is float16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.contract import SCALES, Answer, Call, Precision, Record, contract_kernel
from oracle.kernels.field.sequences import Dense, by_sequence


def _once(dense: Dense, first: int, stop: int, keys: int, causal: bool) -> Tensor:
    """Rows first..stop-1 over the first `keys` keys: (rows, q_heads, head_dim)."""
    from sageattention import sageattn

    q, k, v = (x.transpose(0, 1).clone()[None].contiguous() for x in (dense.q[first:stop], dense.k[:keys], dense.v[:keys]))
    out: Tensor = sageattn(q, k, v, is_causal=causal, sm_scale=dense.call.softmax_scale)
    return out[0].transpose(0, 1)


def _attend(dense: Dense) -> tuple[Tensor, None]:
    """SageAttention over one sequence."""
    rows, keys = dense.q.shape[0], dense.k.shape[0]
    if dense.full or dense.pos == 0:
        return _once(dense, 0, rows, keys, not dense.full), None
    return torch.cat([_once(dense, row, row + 1, dense.pos + row + 1, False) for row in range(rows)]), None


@contract_kernel(
    Record(
        head_dims=(64, 96, 128),
        page_sizes=(1, 8, 16, 32, 64, 128, 256),
        devices=("cuda",),
        precision=Precision(p_format="fp16", qk_format="int8", qk_block=128, smooth_k=True),
    ),
    lacks=("window_size", "softcap", "sinks", *SCALES, "return_lse"),
)
def attention(call: Call, _: bool) -> Answer:
    """Attention by SageAttention."""
    return by_sequence(call, _attend)
