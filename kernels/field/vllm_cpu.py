"""vLLM's paged attention for CPUs, `cpu_attention_with_kv_cache`: prefill and decode in one call, scheduled over threads.

vLLM keeps keys and values in a layout of its own, which its own `cpu_attn_reshape_and_cache` fills; here it is given the live
tokens, one block table for all sequences, and is asked once a call.  Its instruction sets (`isa`) are chosen as vLLM's back end
chooses them: by head size, block size and dtype.

Read in vLLM 0.32's source: P is in the format of q with 16-bit inputs, sums are fp32, and `sliding_window` counts the token
itself.  A sink joins the denominator.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from oracle.contract import SCALES, Call, Precision, Record, contract_kernel

if find_spec("vllm") is not None:  # importing it takes seconds, which must not count as the first call's
    from vllm import _custom_ops as ops

_BLOCK = 32  # "vec" and "amx" take blocks of 32 tokens, "vec16" of 16


def _isa(dtype: torch.dtype, head_dim: int) -> str:
    """As `vllm.v1.attention.backends.cpu_attn._get_attn_isa` chooses on x86 for blocks of 32."""
    if head_dim % 32:
        return "vec16"
    return "amx" if torch.cpu._is_amx_tile_supported() and dtype is torch.bfloat16 else "vec"


def _blocks(call: Call, isa: str) -> tuple[Tensor, Tensor, Tensor]:
    """The live tokens in vLLM's own cache: keys, values (blocks, kv_heads, 32, dim), and the table of blocks (batch, most)."""
    lens = call.seqused_k[: call.live_seqs].long()
    counts = -(-lens // _BLOCK)
    starts = counts.cumsum(0) - counts
    most = max(1, int(counts.max())) if len(counts) else 1
    table = (starts[:, None] + torch.arange(most)).clamp_(max=max(0, int(counts.sum()) - 1)).int()
    size = call.k_cache.shape[1]
    seq = torch.repeat_interleave(torch.arange(len(lens)), lens)
    token = torch.arange(len(seq)) - torch.repeat_interleave(lens.cumsum(0) - lens, lens)
    page = call.page_table[seq, token // size].long()
    k, v = (cache[page, token % size].contiguous() for cache in (call.k_cache, call.v_cache))
    blocks = max(1, int(counts.sum()))
    caches = [torch.zeros(blocks, x.shape[1], _BLOCK, x.shape[2], dtype=x.dtype) for x in (k, v)]
    ops.cpu_attn_reshape_and_cache(k, v, *caches, starts[seq] * _BLOCK + token, isa)
    return caches[0], caches[1], table


def _paged(call: Call, _: bool) -> Tensor:
    """Attention by vLLM's CPU kernel.  Rows before the first key, which vLLM never asks about, are 0 and not sent."""
    out = call.q.new_empty(*call.q.shape[:2], call.v_cache.shape[3]) if call.out is None else call.out
    isa = _isa(call.q.dtype, call.q.shape[2])
    starts = call.cu_seqlens_q[: call.live_seqs + 1]
    lens = call.seqused_k[: call.live_seqs].contiguous()
    live = int(starts[-1])
    rows = starts[1:] - starts[:-1]
    counts = torch.minimum(rows, lens) if call.causal else torch.where(lens > 0, rows, 0)
    skipped = torch.repeat_interleave(starts[1:] - counts, rows)
    sent = (torch.arange(live) >= skipped).nonzero()[:, 0]
    out[:live] = 0
    if not len(sent):
        return out
    begins = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    k, v, table = _blocks(call, isa)
    heads, kv_heads, dim = call.q.shape[1], call.k_cache.shape[2], call.q.shape[2]
    window = call.window_size[0] + 1 if call.window_size[0] >= 0 else -1
    scale, causal, softcap = call.softmax_scale, call.causal, call.softcap
    plan = ops.cpu_attn_get_scheduler_metadata(
        call.live_seqs, heads, kv_heads, dim, lens, call.q.dtype, begins, causal, window, isa, True
    )
    answer = torch.empty(len(sent), heads, v.shape[3], dtype=call.q.dtype)
    q = call.q[sent]
    ops.cpu_attention_with_kv_cache(q, k, v, answer, begins, lens, scale, causal, None, window, table, softcap, plan, call.sinks)
    out[sent] = answer
    return out


_RECORD = Record(
    dtypes=("bf16", "fp16", "fp32"),
    head_dims=(32, 64, 80, 96, 112, 128, 192, 256, 512),
    page_sizes=(16, 32, 64, 128),
    devices=("cpu",),
    precision=Precision(subtract_first=True, flush_to_zero=True),  # AVX-512's products of bfloat16 flush
)
_LACKS = (*SCALES, "return_lse")

paged = contract_kernel(_RECORD, lacks=(*_LACKS, "causal", "sinks"), name="paged")(_paged)
paged_sinks = contract_kernel(_RECORD, lacks=(*_LACKS, "causal"), name="paged_sinks")(_paged)
# Encoders: vLLM takes a window's left side for the right one too, and warns that softcap is not supported there.
encoder = contract_kernel(_RECORD, lacks=(*_LACKS, "window_size", "softcap", "sinks"), name="encoder")(_paged)
