"""Batches that the TileLang kernels must get right, and the exact answers.

Every batch is hostile past its plan: plan arrays go on after the last sequence with numbers out of every range, page tables
with ids that do not exist, and pages of nobody, and slots after a sequence's last key, hold NaN or infinities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oracle.kernels.tilelang_families import Family

PAST = (-(10**7), 2**31 - 1, -1, 10**7)  # entries past the plan
LAYERS = 60  # that share a page in the layout "layers": four billion bytes lie between its first page and its last


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch: lengths of its sequences, mask, and how its tensors lie in memory."""

    name: str
    lengths: tuple[tuple[int, int], ...]  # (query tokens, keys) of each sequence
    window: tuple[int, int] = (-1, -1)
    causal: bool = True
    layout: str = "plain"  # "plain"; "hnd": heads before slots; "layers": K and V of many layers in one page
    kv_heads: int = 2
    gap: int = 0  # elements between the rows of q and of out


_MIXED = ((0, 5), (3, 0), (1, 1), (70, 70), (200, 1000), (0, 0), (17, 64), (1, 333), (130, 40), (64, 2048), (9, 129))
BATCHES = (
    Batch(name="mixed", lengths=_MIXED),
    Batch(name="window", lengths=_MIXED, window=(100, 0)),
    Batch(name="window of one", lengths=_MIXED, window=(0, 0)),
    Batch(name="both sides", lengths=_MIXED, window=(70, 33), causal=False),
    Batch(name="all keys", lengths=_MIXED, causal=False),
    Batch(name="one token", lengths=((1, 4097),), kv_heads=1),
    Batch(name="no keys", lengths=((5, 0), (0, 0))),
    Batch(name="many sequences", lengths=tuple((i % 7, 3 * i) for i in range(70))),
    Batch(name="heads first", lengths=_MIXED, layout="hnd", gap=24),
    Batch(name="many layers", lengths=_MIXED, layout="layers", kv_heads=4),
    Batch(name="gemma window", lengths=((500, 2500), (1500, 1500)), window=(1023, 0), kv_heads=4),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """A batch in memory: what the kernel is called with."""

    batch: Batch
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    plan: dict[str, Any]  # keyword arguments of the contract
    keys: list[tuple[Tensor, Tensor]]  # k and v of each sequence, (keys, kv_heads, dim)
    rows: int  # query tokens of the plan; q has more

    def run(self, kernel: Any) -> tuple[Tensor, Tensor]:
        """out and lse of the plan's rows.  Raises: ValueError where the kernel wrote past them."""
        out = torch.full_like(self.q, math.nan)
        got, lse = kernel(self.q, self.k_cache, self.v_cache, **self.plan, out=out, return_lse=True)
        if not bool(out[self.rows :].isnan().all()):
            raise ValueError(f"{self.batch.name}: rows past the plan were written")
        return got[: self.rows].contiguous(), lse[: self.rows].contiguous()


def _pool(batch: Batch, family: Family, page: int, pages: int, junk: float) -> tuple[Tensor, Tensor]:
    heads, dim = batch.kv_heads, family.head_dim

    def full(*shape: int) -> Tensor:
        return torch.full(shape, junk, device="cuda", dtype=torch.bfloat16)

    if batch.layout == "layers":
        far = -(-(2**31) // (LAYERS * 2 * page * heads * dim)) + pages
        whole = full(far, LAYERS, 2, page, heads, dim)
        return whole[:, LAYERS // 2, 0], whole[:, LAYERS // 2, 1]
    if batch.layout == "hnd":
        return full(pages, heads, page, dim).transpose(1, 2), full(pages, heads, page, dim).transpose(1, 2)
    return full(pages, page, heads, dim), full(pages, page, heads, dim)


def lay(batch: Batch, family: Family, page: int, *, junk: float = math.nan, salt: int = 0) -> Laid:
    """The batch with N(0, 1) inputs, the same for every `junk` (past the plan) and `salt` (which pages are whose)."""
    values, places = torch.Generator("cuda").manual_seed(7), torch.Generator("cuda").manual_seed(11 + salt)
    heads, dim, device = batch.kv_heads, family.head_dim, "cuda"

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=values)

    counts = [-(-keys // page) for _, keys in batch.lengths]
    k_cache, v_cache = _pool(batch, family, page, 2 * sum(counts) + 3 + salt, junk)
    ids = torch.randperm(k_cache.shape[0], device=device, generator=places).int()
    if sum(counts):
        at = int((ids == k_cache.shape[0] - 1).nonzero()[0, 0])
        ids[[0, at]] = ids[[at, 0]]  # the last page is always live
    past = torch.tensor(PAST, device=device, dtype=torch.int32)
    table = past[torch.randint(0, len(PAST), (len(counts) + 3, max(counts) + 2), device=device, generator=places)]
    keys = []
    for i, (_, n) in enumerate(batch.lengths):
        own, ids = ids[: counts[i]], ids[counts[i] :]
        table[i, : counts[i]] = own
        k, v = normal(n, heads, dim), normal(n, heads, dim)
        slot = torch.arange(n, device=device)
        k_cache[own.long()[slot // page], slot % page] = k
        v_cache[own.long()[slot // page], slot % page] = v
        keys.append((k, v))
    starts = [0]
    for q_len, _ in batch.lengths:
        starts.append(starts[-1] + q_len)
    rows, q_heads = starts[-1], heads * family.group
    q = torch.full((rows + 5, q_heads * dim + batch.gap), math.nan, device=device, dtype=torch.bfloat16)
    q = q[:, : q_heads * dim].view(rows + 5, q_heads, dim)
    q[:rows] = normal(rows, q_heads, dim)
    plan = {
        "cu_seqlens_q": torch.tensor([*starts, *PAST[:3]], device=device, dtype=torch.int32),
        "seqused_k": torch.tensor([*(n for _, n in batch.lengths), *PAST[:3]], device=device, dtype=torch.int32),
        "page_table": table,
        "softmax_scale": dim**-0.5,
        "causal": batch.causal,
        "window_size": batch.window,
        "num_seqs": len(batch.lengths),
    }
    return Laid(batch=batch, q=q, k_cache=k_cache, v_cache=v_cache, plan=plan, keys=keys, rows=rows)


def exact(laid: Laid) -> tuple[Tensor, Tensor]:
    """out (rows, q_heads, dim) and lse (rows, q_heads) in float64."""
    batch, q = laid.batch, laid.q[: laid.rows].double()
    group = q.shape[1] // batch.kv_heads
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, device=q.device, dtype=torch.float64)
    start = 0
    for (q_len, kv_len), (k, v) in zip(batch.lengths, laid.keys, strict=True):
        rows = slice(start, start + q_len)
        start += q_len
        if not q_len or not kv_len:
            continue
        pos = torch.arange(kv_len - q_len, kv_len, device=q.device)[:, None]
        key = torch.arange(kv_len, device=q.device)
        right = 0 if batch.causal else batch.window[1]
        seen = (key <= pos + right) if right >= 0 else torch.ones_like(key + pos, dtype=torch.bool)
        if batch.window[0] >= 0:
            seen &= key >= pos - batch.window[0]
        for head in range(q.shape[1]):
            s = q[rows, head] @ k[:, head // group].double().T * laid.plan["softmax_scale"]
            s = s.masked_fill(~seen, -math.inf)
            lse[rows, head] = s.logsumexp(1)
            out[rows, head] = torch.softmax(s, 1).nan_to_num(0.0) @ v[:, head // group].double()
    return out, lse
