"""A second fp64 formulation of attention and of the bound's ingredients, dense: a check of the reference, not the reference.

All live keys of all sequences lie on one axis; who sees whom is a mask made from two tables of positions; p = exp(s - L) with
L from `torch.logsumexp`.  No blocks, no running maximum, no key ranges, no code shared with the reference.  Memory is
live_q x q_heads x keys x head_dim_v (and keys^2 for the ties) numbers, so: small cases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from oracle.contract import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """Output, LSE and ingredients of all R live rows, float64 on the CPU.  Symbols: docs/numerics.md, sections 2.1 and 2.6.

    Sums run over visible keys unless the comment names the sink, which is an atom of v = 0.  Where nothing is visible: zeros,
    lse -inf.
    """

    # (R, q_heads, head_dim_v)
    out: Tensor  # o = sum p_j v_j
    v1: Tensor  # sum p_j |v_j|
    v2: Tensor  # sqrt(sum p_j^2 v_j^2)
    v2g: Tensor  # V2 with equal p_j added before squaring (ties)
    d: Tensor  # sqrt(sum p_j (v_j - o)^2), keys and sink
    t: Tensor  # sum p_j s_j (v_j - o)
    w1: Tensor  # sum |v_j| / l
    # (R, q_heads)
    lse: Tensor  # natural log of the denominator, sink included
    a2: Tensor  # sqrt(sum p_j a_j^2), a_j = sigma |q| |k_j|
    b1: Tensor  # sum p_j sigma norm(q∘k_j)
    s1: Tensor  # sum p_j |s_j|
    s2: Tensor  # sqrt(sum p_j s_j^2)
    g1: Tensor  # sum p_j (m - s_j), keys and sink
    g2: Tensor  # sqrt(sum p_j (m - s_j)^2), keys and sink
    smax: Tensor  # max |s_j|, keys and sink
    span: Tensor  # m - min s_j, keys and sink
    kmax: Tensor  # max a_j
    p2: Tensor  # sqrt(sum p_j^2)
    p2g: Tensor  # P2 with equal p_j added before squaring


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """The plan as two tables: R live queries and N live keys, each with its sequence and position (int64)."""

    q_seq: Tensor  # (R,)
    q_pos: Tensor  # (R,) bottom-right aligned, negative where q_len > kv_len
    k_seq: Tensor  # (N,)
    k_pos: Tensor  # (N,)
    page: Tensor  # (N,) page id
    slot: Tensor  # (N,) place in the page

    def mask(self, call: Call) -> Tensor:
        """(R, N) bool: same sequence, not after the query when causal, inside the window."""
        ahead = self.k_pos[None, :] - self.q_pos[:, None]  # positions by which the key is ahead of the query
        seen = self.q_seq[:, None] == self.k_seq[None, :]
        left, right = (torch.inf if w < 0 else w for w in call.window_size)
        return seen & (ahead >= -left) & (ahead <= (min(right, 0) if call.causal else right))


def _tables(call: Call) -> _Tables:
    seqs = torch.arange(call.live_seqs)
    starts = call.cu_seqlens_q[: call.live_seqs + 1].cpu().long()
    q_lens, kv_lens = starts.diff(), call.seqused_k[: call.live_seqs].cpu().long()
    q_seq, k_seq = seqs.repeat_interleave(q_lens), seqs.repeat_interleave(kv_lens)
    k_pos = torch.arange(len(k_seq)) - (kv_lens.cumsum(0) - kv_lens)[k_seq]
    page_size = call.k_cache.shape[1]
    return _Tables(
        q_seq=q_seq,
        q_pos=torch.arange(len(q_seq)) - starts[1:][q_seq] + kv_lens[q_seq],
        k_seq=k_seq,
        k_pos=k_pos,
        page=call.page_table.cpu().long()[k_seq, k_pos // page_size],
        slot=k_pos % page_size,
    )


def _per_token(call: Call, scale: Tensor | float | None, seq: Tensor) -> Tensor:
    """A dequantisation scale of the contract for each query head of each token of `seq` (tokens,): (tokens, q_heads) float64."""
    q_heads, kv_heads = call.q.shape[1], call.k_cache.shape[2]
    values = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64).cpu()
    by_seq = values if values.dim() == 2 else values.expand(call.live_seqs, kv_heads)
    return by_seq[seq].repeat_interleave(q_heads // kv_heads, dim=1)


def second_opinion(call: Call, *, u_p: float) -> Second:
    """Everything in `Second`, for all live rows; `u_p` is the unit roundoff of P (ties are bins of log2 p of width u_p / 8).

    Shapes inside: r live rows, h query heads, j keys (the last one is the sink, of v = 0), c columns of v.
    """
    plan = _tables(call)
    q_heads, kv_heads, head_dim_v = call.q.shape[1], call.k_cache.shape[2], call.v_cache.shape[3]
    q = call.q[: len(plan.q_seq)].cpu().double()
    k = call.k_cache.cpu()[plan.page, plan.slot].double().repeat_interleave(q_heads // kv_heads, dim=1)
    v = call.v_cache.cpu()[plan.page, plan.slot].double().repeat_interleave(q_heads // kv_heads, dim=1)
    v = v * _per_token(call, call.v_scale, plan.k_seq)[:, :, None]
    sigma = call.softmax_scale * _per_token(call, call.q_scale, plan.k_seq)
    sigma = (sigma * _per_token(call, call.k_scale, plan.k_seq)).T[None]  # (1, h, j)
    s = sigma * torch.einsum("rhd,jhd->rhj", q, k)
    if call.softcap > 0:
        s = call.softcap * torch.tanh(s / call.softcap)
    a = sigma.abs() * torch.einsum("rh,jh->rhj", q.norm(dim=2), k.norm(dim=2))
    b = sigma.abs() * torch.einsum("rhd,jhd->rhj", q**2, k**2).sqrt()

    rows, keys = s.shape[0], s.shape[2]
    seen = plan.mask(call)[:, None, :].expand(rows, q_heads, keys)
    sink = torch.full((q_heads,), -torch.inf) if call.sinks is None else call.sinks.cpu()
    sink = sink.double()[None, :, None].expand(rows, q_heads, 1)
    atoms = torch.cat([s.masked_fill(~seen, -torch.inf), sink], dim=2)
    return _moments(atoms, a * seen, b * seen, torch.cat([v, v.new_zeros(1, q_heads, head_dim_v)]), u_p)


def _moments(atoms: Tensor, a: Tensor, b: Tensor, v: Tensor, u_p: float) -> Second:
    """Second of the logits, -inf where unseen (r, h, keys + 1), a and b (r, h, keys), v (keys + 1, h, c)."""
    here = atoms > -torch.inf
    s = atoms.masked_fill(~here, 0.0)
    m = atoms.amax(dim=2, keepdim=True)
    gap = (m - s).masked_fill(~here, 0.0)
    log_l = torch.logsumexp((-gap).masked_fill(~here, -torch.inf), dim=2, keepdim=True)  # L - m, so that sum p = 1 at any m
    log_p = (-gap - log_l).masked_fill(~here, -torch.inf)
    p, is_key = log_p.exp(), torch.arange(s.shape[2]) < s.shape[2] - 1
    p_key, p_v = p * is_key, torch.einsum("rhj,jhc->rhjc", p, v)
    out = p_v.sum(2)
    off = v.transpose(0, 1)[None] - out[:, :, None, :]  # (r, h, j, c)
    bins = torch.floor(log_p / torch.log(torch.tensor(2.0, dtype=torch.float64)) * 8 / u_p)
    tied = (bins[:, :, :, None] == bins[:, :, None, :]).double()
    share = tied / tied.sum(3, keepdim=True).sqrt()  # each of the k keys of a bin carries the bin's sum / sqrt(k)
    p_a = p[:, :, :-1]
    return Second(
        out=out,
        lse=(m + log_l).squeeze(2),
        v1=p_v.abs().sum(2),
        v2=p_v.norm(dim=2),
        v2g=torch.einsum("rhji,rhic->rhjc", share, p_v).norm(dim=2),
        d=(p[..., None] * off**2).sum(2).sqrt(),
        t=torch.einsum("rhj,rhjc->rhc", p_key * s, off),
        w1=torch.einsum("rhj,jhc->rhc", here.double(), v.abs()) * torch.where(here.any(2, True), (-log_l).exp(), 0.0),
        a2=(p_a * a**2).sum(2).sqrt(),
        b1=(p_a * b).sum(2),
        s1=(p_key * s.abs()).sum(2),
        s2=(p_key * s**2).sum(2).sqrt(),
        g1=(p * gap).sum(2),
        g2=(p * gap**2).sum(2).sqrt(),
        smax=s.abs().amax(2),
        span=gap.amax(2),
        kmax=pad(a, (0, 1)).amax(2),
        p2=p_key.norm(dim=2),
        p2g=torch.einsum("rhji,rhi->rhj", share, p_key).norm(dim=2),
    )
