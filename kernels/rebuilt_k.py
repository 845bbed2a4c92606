"""K rebuilt from V: what a kernel saves when K and V share a projection, and what it costs in accuracy.

Where K is V times a norm weight but for its rotated part (Gemma 4's global layers), a kernel can read V only and multiply.
Done in bf16, K is rounded twice.  Kept because it must be rejected: it was measured 1.6 to 1.8 times farther from fp64.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oracle.contract import SCALES, Answer, Call, Record, contract_kernel
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import emulate

ROTATED = 4  # one in so many columns of K is rotated, and stored


@contract_kernel(
    Record(dtypes=("bf16",), devices=("cpu",)), lacks=("softcap", "sinks", "out", *SCALES), extras=("k_norm_weight",)
)
def rebuilt_k(call: Call, return_lse: bool) -> Answer:
    """Textbook attention over K whose unrotated columns are `v * k_norm_weight` (head_dim,), rounded to the cache's format.

    Returns out (total_q, q_heads, head_dim), and with `return_lse` the LSE (total_q, q_heads); rows past the plan are 0.
    """
    stored, weight = call.k_cache.shape[-1] // ROTATED, call.extras["k_norm_weight"]
    ids, table = read_pages(call)
    k, v = call.k_cache[ids], call.v_cache[ids]
    k[..., stored:] = v[..., stored:] * weight[stored:].to(k.dtype)
    live_out, live_lse = emulate(replace(call, k_cache=k, v_cache=v, page_table=table), Arithmetic())
    out, lse = call.q.new_zeros(*call.q.shape[:2], v.shape[-1]), live_lse.new_zeros(call.q.shape[:2])
    out[: len(live_out)], lse[: len(live_lse)] = live_out, live_lse
    return (out, lse) if return_lse else out


def read_pages(call: Call) -> tuple[Tensor, Tensor]:
    """The ids of the pages that the plan reads, ascending, and the page table that names them by their place among these.

    The pool may be far larger than what is read of it.
    """
    seqs, page_size = call.live_seqs, call.k_cache.shape[1]
    pages = -(-call.seqused_k[:seqs] // page_size)
    read = torch.arange(call.page_table.shape[1], device=call.q.device) < pages[:, None]
    ids, places = torch.unique(call.page_table[:seqs][read], return_inverse=True)
    table = torch.zeros_like(call.page_table)
    table[:seqs][read] = places.int()
    return ids, table
