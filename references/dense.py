"""Attention in fp32, dense, as a textbook writes it: the field's "within 0.002 of fp32" line, and a second opinion.

And the same with every step kept in the dtype of q: the yardstick of those who allow a kernel twice that error.  It reads the
plan by itself and shares nothing with the fp64 reference, so that a mistake in one shows against the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from oracle.contract import Call


@contextmanager
def ieee_fp32() -> Iterator[None]:
    """Inside, fp32 matrix products are fp32 whatever the process allows: neither TF32 on CUDA nor bf16 in oneDNN."""
    # torch makes the module `mkldnn.matmul` at run time, so mypy does not see it
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [b.fp32_precision for b in backends]
    try:
        for b in backends:
            b.fp32_precision = "ieee"
        yield
    finally:
        for b, precision in zip(backends, before, strict=True):
            b.fp32_precision = precision


def _scale(scale: Tensor | float | None, seq: int, kv_head: int) -> float:
    """The dequantisation scale of one sequence and kv head."""
    if scale is None:
        return 1.0
    if not isinstance(scale, Tensor):
        return float(scale)
    return float(scale if scale.dim() == 0 else scale[kv_head] if scale.dim() == 1 else scale[seq, kv_head])


def _visible(call: Call, q_len: int, kv_len: int) -> Tensor:
    """Which keys each query sees: (q_len, kv_len) bool.  The last query stands at the last key (bottom-right)."""
    device = call.q.device
    i = torch.arange(q_len, device=device)[:, None] + (kv_len - q_len)
    j = torch.arange(kv_len, device=device)[None, :]
    left, right = call.window_size
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if call.causal:
        seen &= j <= i
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    return seen


def dense_fp32(call: Call) -> tuple[Tensor, Tensor]:
    """Output and LSE of every live row, computed in fp32 with the whole softmax matrix materialised.

    The formula, the shapes and the rest are those of `dense`.
    """
    return dense(call, torch.float32)


def dense(call: Call, kept: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and LSE of every live row: fp32 arithmetic, scores, weights and output rounded to the dtype `kept`.

    out = softmax([s, sink])[:-1] v with s = softcap tanh(scale q.k / softcap); lse = ln of its denominator.  A row that sees
    no key has out 0, and lse = sink, or -inf without one.

    Shapes: out (live_q, q_heads, head_dim_v), lse (live_q, q_heads), both float32 on the device of q.
    """
    live_q, q_heads, device = int(call.cu_seqlens_q[call.live_seqs]), call.q.shape[1], call.q.device
    page_size, kv_heads, head_dim_v = call.v_cache.shape[1:]
    out = torch.zeros(live_q, q_heads, head_dim_v, device=device)
    lse = torch.full((live_q, q_heads), -torch.inf, device=device)
    for b in range(call.live_seqs):
        start, stop, kv_len = int(call.cu_seqlens_q[b]), int(call.cu_seqlens_q[b + 1]), int(call.seqused_k[b])
        q = call.q[start:stop].float()
        pages = call.page_table[b, : -(-kv_len // page_size)].to(device).long()
        k = call.k_cache[pages].flatten(0, 1)[:kv_len].float()
        v = call.v_cache[pages].flatten(0, 1)[:kv_len].float()
        hidden = ~_visible(call, stop - start, kv_len)
        for h in range(q_heads):
            g = h // (q_heads // kv_heads)
            scale = call.softmax_scale * _scale(call.q_scale, b, g) * _scale(call.k_scale, b, g)
            with ieee_fp32():
                s = scale * (q[:, h] @ k[:, g].T)  # (q_len, kv_len)
            if call.softcap > 0:
                s = call.softcap * torch.tanh(s / call.softcap)
            s = s.to(kept).float().masked_fill(hidden, -torch.inf)
            sink = s.new_full((stop - start, 1), -torch.inf if call.sinks is None else float(call.sinks[h]))
            atoms = torch.cat([s, sink], dim=1)  # no sink is a sink of -inf
            lse[start:stop, h] = torch.logsumexp(atoms, dim=1)
            p = torch.softmax(atoms, dim=1)[:, :-1].to(kept).float().masked_fill(hidden, 0.0)  # softmax of a row of -inf is NaN
            with ieee_fp32():
                out[start:stop, h] = (p @ (v[:, g] * _scale(call.v_scale, b, g))).to(kept).float()
    return out, lse
