"""FlashInfer's paged wrappers: `BatchPrefillWithPagedKVCacheWrapper` and `BatchDecodeWithPagedKVCacheWrapper`.

Both are planned on the host and run on the pool as it lies.  Their LSE is to base 2.  A window has a left side only, counted
without the token itself (`window_left`).  Decode takes one query a sequence: it answers calls that have no more, and the
prefill wrapper the others, as serving engines dispatch; the threshold is declared.

Read in the source of version 0.7.4 (attention/prefill.cuh): a matrix product with ones sums each row of P after P was rounded.
"""

from __future__ import annotations

from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor

from oracle.contract import SCALES, Answer, Call, Precision, Record, contract_kernel

_WORKSPACE = 256 << 20  # bytes, twice what FlashInfer's documentation uses


@cache
def _wrapper(kind: str, device: torch.device) -> Any:
    """One wrapper of each kind, with a workspace of its own."""
    import flashinfer

    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
    if kind == "decode":
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=False)
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")


def _pages(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """FlashInfer's plan of the pool: offsets into the page ids, the ids, and how many tokens each last page holds."""
    size = call.k_cache.shape[1]
    lens = call.seqused_k[: call.live_seqs].cpu()
    counts = -(-lens // size)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
    table = call.page_table[: call.live_seqs].cpu()
    ids = torch.cat([table[i, : int(n)] for i, n in enumerate(counts)] or [table.new_empty(0)])
    return offsets, ids.int(), (lens - (counts - 1).clamp_(min=0) * size).int()


def _run(call: Call, return_lse: bool, kind: str) -> Answer:
    """FlashInfer over the live sequences."""
    out = call.q.new_empty(*call.q.shape[:2], call.v_cache.shape[3]) if call.out is None else call.out
    lse = torch.full(call.q.shape[:2], -inf, dtype=torch.float32, device=call.q.device)
    starts = call.cu_seqlens_q[: call.live_seqs + 1].cpu()
    live = int(starts[-1])
    if live:
        wrapper = _wrapper(kind, call.q.device)
        heads = (call.q.shape[1], call.k_cache.shape[2])
        shared = {
            "sm_scale": call.softmax_scale,
            "logits_soft_cap": call.softcap or None,
            "window_left": call.window_size[0],
            "q_data_type": call.q.dtype,
            "kv_data_type": call.k_cache.dtype,
        }
        if kind == "decode":
            wrapper.plan(*_pages(call), *heads, call.q.shape[2], call.k_cache.shape[1], **shared)
        else:
            dims = (call.q.shape[2], call.k_cache.shape[1])
            wrapper.plan(starts, *_pages(call), *heads, *dims, causal=call.causal, **shared)
        answer, row_lse = wrapper.run(call.q[:live].contiguous(), (call.k_cache, call.v_cache), return_lse=True)
        out[:live] = answer
        lse[:live] = row_lse
    return (out, lse) if return_lse else out


def _record(dtypes: tuple[str, ...], thresholds: tuple[int, ...] = ()) -> Record:
    return Record(
        dtypes=dtypes,
        head_dims=(64, 128, 256, 512),
        page_sizes=(1, 8, 16, 32, 64),
        groups=(1, 2, 4, 8),
        devices=("cuda",),
        thresholds=thresholds,
        lse_base="2",
        precision=Precision(row_sum="after"),
    )


# A window needs the causal rule there, and each of the two formats compiles modules of its own for every head dim.
_LACKS = ("sinks", *SCALES)


@contract_kernel(_record(("bf16",)), lacks=(*_LACKS, "causal"))
def prefill(call: Call, return_lse: bool) -> Answer:
    """Attention by FlashInfer's prefill wrapper."""
    return _run(call, return_lse, "prefill")


@contract_kernel(_record(("bf16",), thresholds=(2,)), lacks=(*_LACKS, "causal"))
def serving(call: Call, return_lse: bool) -> Answer:
    """Attention by FlashInfer's decode wrapper where each sequence has one query, else by its prefill wrapper."""
    starts = call.cu_seqlens_q[: call.live_seqs + 1]
    lens = call.seqused_k[: call.live_seqs]
    single = bool(((starts[1:] - starts[:-1]) == 1).all()) and bool((lens > 0).all())
    return _run(call, return_lse, "decode" if single else "prefill")
