"""Dao-AILab's FlashAttention 2, 3 and 4 by `flash_attn_varlen_func`, whose signature the contract took.

All three read the page pool themselves.  Version 2 takes pages of 256 tokens and multiples; version 4 has sinks
(`learnable_sink`, in bfloat16, so they are not declared).  The LSE is natural, (heads, rows).  Versions 2 and 3 come as sources
to be compiled for hours and not as wheels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oracle.contract import SCALES, Answer, Call, DeclaredKernel, Precision, Record, contract_kernel


def _arguments(call: Call) -> dict[str, Any]:
    """What the three have in common, the rows and sequences past the plan cut off."""
    starts = call.cu_seqlens_q[: call.live_seqs + 1].contiguous()
    lens = call.seqused_k[: call.live_seqs].contiguous()
    return {
        "cu_seqlens_q": starts,
        "max_seqlen_q": max(1, int((starts[1:] - starts[:-1]).max())),
        "max_seqlen_k": max(1, int(lens.max())),
        "softmax_scale": call.softmax_scale,
        "causal": call.causal,
        "softcap": call.softcap,
        "seqused_k": lens,
    }


def _version_2(call: Call, q: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn import flash_attn_varlen_func

    given = _arguments(call)
    keys = call.seqused_k[: call.live_seqs].cumsum(0).int()
    given["cu_seqlens_k"] = keys.new_zeros(len(keys) + 1)
    given["cu_seqlens_k"][1:] = keys
    del given["seqused_k"]
    out, lse, _ = flash_attn_varlen_func(
        q,
        call.k_cache,
        call.v_cache,
        window_size=call.window_size,
        block_table=call.page_table[: call.live_seqs],
        return_attn_probs=True,
        **given,
    )
    return out, lse


def _version_3(call: Call, q: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import flash_attn_with_kvcache

    given = _arguments(call)
    given["cache_seqlens"] = given.pop("seqused_k")
    del given["max_seqlen_k"]
    out, lse, *_ = flash_attn_with_kvcache(
        q,
        call.k_cache,
        call.v_cache,
        page_table=call.page_table[: call.live_seqs],
        window_size=call.window_size,
        return_softmax_lse=True,
        **given,
    )
    return out, lse


def _version_4(call: Call, q: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn.cute import flash_attn_varlen_func

    left, right = (None if limit < 0 else limit for limit in call.window_size)
    out, lse = flash_attn_varlen_func(
        q,
        call.k_cache,
        call.v_cache,
        page_table=call.page_table[: call.live_seqs].contiguous(),
        window_size=(left, 0 if call.causal and left is not None else right),
        return_lse=True,
        **_arguments(call),
    )
    return out, lse


def _kernel(name: str, version: Callable[[Call, Tensor], tuple[Tensor, Tensor]], record: Record) -> DeclaredKernel:
    """The kernel `name`."""

    def run(call: Call, return_lse: bool) -> Answer:
        out = call.q.new_empty(*call.q.shape[:2], call.v_cache.shape[3]) if call.out is None else call.out
        lse = call.q.new_empty(call.q.shape[:2], dtype=torch.float32)
        live = int(call.cu_seqlens_q[call.live_seqs])
        if live:
            answer, row_lse = version(call, call.q[:live].contiguous())
            out[:live] = answer
            lse[:live] = row_lse.T
        return (out, lse) if return_lse else out

    run.__doc__ = f"Attention by FlashAttention {name[-1]}."
    return contract_kernel(record, lacks=("sinks", *SCALES), name=name)(run)


def _record(head_dims: tuple[int, ...], page_sizes: tuple[int, ...]) -> Record:
    return Record(head_dims=head_dims, page_sizes=page_sizes, devices=("cuda",), precision=Precision())


version_2 = _kernel("version_2", _version_2, _record((40, 64, 80, 96, 128, 256), (256,)))
version_3 = _kernel("version_3", _version_3, _record((64, 96, 128, 256), (1, 8, 16, 32, 64, 128, 256)))
version_4 = _kernel("version_4", _version_4, _record((64, 96, 128, 256), (64, 128)))
