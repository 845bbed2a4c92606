"""PyTorch's SDPA over whole pages: the slots of the last page past the sequence are there, and masked.

So are caches of a fixed length read, transformers' StaticCache among them.  A hidden key has weight 0, and torch multiplies: 0
times what an unused slot holds is NaN where that is NaN or inf (PyTorch's issue 101967), and a score is hidden by adding -inf,
which makes NaN of one that is inf.  The record does not say so, for that is what the gate is to find.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from oracle.contract import SCALES, Call, Precision, Record, contract_kernel


@contract_kernel(
    Record(head_dims=(64, 80, 96, 128, 256), devices=("cpu",), precision=Precision(subtract_first=True)),
    lacks=("causal", "window_size", "softcap", "sinks", *SCALES, "return_lse"),
)
def sdpa(call: Call, _: bool) -> Tensor:
    """Attention by torch's SDPA, a boolean mask hiding what is not to be seen."""
    size = call.k_cache.shape[1]
    out = call.q.new_empty(*call.q.shape[:2], call.v_cache.shape[3]) if call.out is None else call.out
    offsets = call.cu_seqlens_q[: call.live_seqs + 1].tolist()
    for seq, kv_len in enumerate(call.seqused_k[: call.live_seqs].tolist()):
        end = offsets[seq + 1]
        first = max(offsets[seq], end - kv_len)
        out[offsets[seq] : first] = 0  # rows before the first key, about which torch says nothing
        if first == end:
            continue
        pages = call.page_table[seq, : -(-kv_len // size)].long()
        q = call.q[first:end].transpose(0, 1).contiguous()[None]
        k, v = (cache[pages].flatten(0, 1).transpose(0, 1)[None] for cache in (call.k_cache, call.v_cache))
        seen = torch.arange(k.shape[2]) <= torch.arange(kv_len - (end - first), kv_len)[:, None]
        answer = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=call.softmax_scale, enable_gqa=True)
        out[first:end] = answer[0].transpose(0, 1)
    return out
