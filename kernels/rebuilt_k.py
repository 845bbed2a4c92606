"""K rebuilt from V: what a kernel saves when K and V share a projection, and what it costs in accuracy.

Where K is V times a norm weight but for its rotated part (Gemma 4's global layers), a kernel can read V only and multiply.
Done in bf16, K is rounded twice.  Kept because it must be rejected: it was measured 1.6 to 1.8 times farther from fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.contract import Call, Record
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import emulate

ROTATED = 4  # one in so many columns of K is rotated, and stored


def rebuilt_k(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    page_table: Tensor,
    softmax_scale: float,
    k_norm_weight: Tensor,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    num_seqs: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Textbook attention over K whose unrotated columns are `v * k_norm_weight` (head_dim,), rounded to the cache's format.

    Returns out (total_q, q_heads, head_dim), and with `return_lse` the LSE (total_q, q_heads); rows past the plan are 0.
    """
    stored = k_cache.shape[-1] // ROTATED
    seqs = len(seqused_k) if num_seqs is None else num_seqs
    pages = -(-seqused_k[:seqs] // k_cache.shape[1])
    read = torch.arange(page_table.shape[1]) < pages[:, None]
    live, table = torch.unique(page_table[:seqs][read], return_inverse=True)  # the pool may be far larger than what is read of it
    k, v = k_cache[live], v_cache[live]
    k[..., stored:] = v[..., stored:] * k_norm_weight[stored:].to(k.dtype)
    compact = torch.zeros_like(page_table)
    compact[:seqs][read] = table.int()
    call = Call(
        q=q,
        k_cache=k,
        v_cache=v,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        page_table=compact,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        num_seqs=num_seqs,
    )
    live_out, live_lse = emulate(call, Arithmetic())
    out, lse = q.new_zeros(*q.shape[:2], v_cache.shape[-1]), live_lse.new_zeros(q.shape[:2])
    out[: len(live_out)], lse[: len(live_lse)] = live_out, live_lse
    return (out, lse) if return_lse else out


rebuilt_k.record = Record(dtypes=("bf16",), devices=("cpu",))  # type: ignore[attr-defined]
