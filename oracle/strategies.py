"""Hypothesis strategies: small calls over every option of the kernel contract, for property tests and fuzzing.

    @given(calls(dtypes=("bf16",), page_sizes=(16, 64), head_dims=(64,)))
    def test_my_kernel(call): ...

Hypothesis draws a few integers, sizes first, and one seed; the numbers come from the seed.  So drawing is fast, and shrinking
ends at one sequence of one token with every option off.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from oracle.case_strategies import cases, one_first
from oracle.contract import Call

__all__ = ["OPTIONS", "Bits", "batches", "calls", "cases", "page_tables"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}
OPTIONS = ("causal", "window_size", "softcap", "sinks", "q_scale", "k_scale", "v_scale", "num_seqs")  # that a call may set
TAILS = ("zero", "stale", "nan", "wild")  # what lies past the plan; "wild" is NaN with page ids and lengths out of every range
LAYOUTS = ("plain", "kv-in-page", "heads-first", "layers")  # how the page pool lies in memory
LOGITS = ("normal", "flat", "ties", "offset")  # flat: all 0; ties: few distinct keys; offset: a large common mean
SPREADS = (1.0, 0.1, 5.0, 30.0, 1e3, 1e4)  # standard deviation of the logits aimed at; 30 and above is nearly one-hot
VALUES = ("normal", "constant", "offset", "large")

Lengths: TypeAlias = tuple[tuple[int, int], ...]  # (q_len, kv_len) of each sequence
Shape: TypeAlias = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bits:
    """Numbers from a counter-based generator by integer and exact operations only: same seed, same bits, on any machine."""

    source: np.random.Philox

    def integers(self, high: int, *shape: int) -> NDArray[np.int64]:
        """Integers 0..high-1; the bias of the remainder (high / 2^64) does not matter here."""
        return (self.source.random_raw(int(np.prod(shape))) % np.uint64(high)).astype(np.int64).reshape(shape)

    def normal(self, *shape: int) -> Tensor:
        """Mean 0, variance 1, at most 6 (the sum of twelve uniform 16-bit integers), float64."""
        words = self.source.random_raw(3 * int(np.prod(shape))).reshape(-1, 3, 1)
        parts = (words >> np.array([0, 16, 32, 48], dtype=np.uint64)) & np.uint64(0xFFFF)
        total = parts.sum(axis=(1, 2)).astype(np.float64)
        return torch.from_numpy(((total - 12 * 32767.5) / 65536).reshape(shape))

    def permutation(self, n: int) -> NDArray[np.int64]:
        """0..n-1 in random order."""
        return np.argsort(self.source.random_raw(n), kind="stable").astype(np.int64)


def batches(*, max_seqs: int = 4, max_q: int = 6, max_kv: int = 40) -> st.SearchStrategy[Lengths]:
    """Lengths (q_len, kv_len) of one to `max_seqs` sequences: zeros, decode, prefill, and q_len > kv_len among them."""
    return st.lists(st.tuples(one_first(max_q), one_first(max_kv)), min_size=1, max_size=max_seqs).map(tuple)


@st.composite
def page_tables(draw: st.DrawFn, pages: Sequence[int], *, tail: str = "stale") -> tuple[Tensor, int]:
    """A page table for sequences of `pages[b]` pages, and the size of the pool.

    Ids are permuted over a pool with one to four pages that nobody owns.  Entries past `pages[b]` follow `tail`: 0, a page of
    someone or no one, or ids out of range.

    Shapes: table (batch, max_pages) int32, max_pages at least 1.
    """
    spare, columns = draw(st.integers(1, 4)), max([1, *pages]) + draw(st.integers(0, 2))
    bits = Bits(np.random.Philox(draw(st.integers(0, 2**32 - 1))))
    num_pages = sum(pages) + spare
    ids = bits.permutation(num_pages)
    past = {"zero": [0], "wild": [-1, 2**31 - 1, -(2**31), num_pages]}.get(tail, range(num_pages))
    table = np.array(past)[bits.integers(len(past), len(pages), columns)]
    for b, (start, n) in enumerate(zip(np.cumsum([0, *pages]), pages, strict=False)):
        table[b, :n] = ids[start : start + n]
    return torch.from_numpy(table.astype(np.int32)), num_pages


def _scale(bits: Bits, kind: str | None, batch: int, heads: int, live: int, tail: str) -> Tensor | float | None:
    """A dequantisation scale of `kind`, 0.25 to 8 and different everywhere; entries of dead sequences follow `tail`."""
    if kind is None:
        return None
    values = np.ldexp(1 + bits.integers(10, batch, heads) / 10, bits.integers(5, batch, heads) - 2)
    if kind == "float":
        return float(values[0, 0])
    scale = torch.from_numpy(values).float()
    if kind == "head":
        return scale[0].clone()
    scale[live:] = scale[live:] if tail in ("zero", "stale") else torch.nan
    return scale


def _plan(bits: Bits, lengths: Lengths, dead: int, tail: str) -> tuple[Tensor, Tensor]:
    """cu_seqlens_q and seqused_k, int32, with `dead` sequences past the plan: empty ones, or values that mean nothing."""
    cu = np.cumsum([0, *(q for q, _ in lengths)]).tolist()
    past_cu, past_kv = [cu[-1]] * dead, [0] * dead
    if tail == "wild":
        past_cu, past_kv = [-(2**31), 2**31 - 1][:dead], [2**31 - 1, -1][:dead]
    elif tail != "zero":
        past_cu, past_kv = bits.integers(cu[-1] + 1, dead).tolist(), bits.integers(64, dead).tolist()
    return torch.tensor(cu + past_cu, dtype=torch.int32), torch.tensor([kv for _, kv in lengths] + past_kv, dtype=torch.int32)


def _queries_and_keys(bits: Bits, q_shape: Shape, k_shape: Shape, kind: str, deviation: float) -> tuple[Tensor, Tensor]:
    """q and k, float64, such that q.k has the standard deviation `deviation`; where kind is offset, a tenth of it and a mean."""
    q, k = bits.normal(*q_shape), bits.normal(*k_shape)
    if kind == "ties":
        k = k[torch.from_numpy(bits.integers(min(3, len(k)), len(k)))]
    elif kind == "offset":
        q, k = 1 + q / 32, 1 + k / 32
    return q * (0.0 if kind == "flat" else deviation / math.sqrt(q_shape[-1])), k


def _values(bits: Bits, shape: Shape, kind: str) -> Tensor:
    """The values, float64."""
    v = bits.normal(*shape)
    return {"normal": v, "constant": torch.ones_like(v) * 0.75, "offset": 8 + v / 4, "large": 64 * v}[kind]


def _live_slots(lengths: Lengths, table: Tensor, page_size: int, num_pages: int) -> Tensor:
    """Which tokens of the pool the plan declares live: (num_pages x page_size,) bool."""
    live = torch.zeros(num_pages, page_size, dtype=torch.bool)
    for b, (_, kv_len) in enumerate(lengths):
        j = torch.arange(kv_len)
        live[table[b].long()[j // page_size], j % page_size] = True
    return live.flatten()


def _finish(x: Tensor, live: Tensor, tail: str, dtype: str) -> Tensor:
    """`x` rounded to `dtype`, saturating, after what is not live (dim 0) was overwritten as `tail` says."""
    if tail != "stale":
        x[~live] = 0.0 if tail == "zero" else torch.nan
    largest = torch.finfo(DTYPES[dtype]).max
    return x.clamp(-largest, largest).to(DTYPES[dtype])


def _lay_out(k: Tensor, v: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The same pools, (num_pages, page_size, kv_heads, dim), as views of memory laid out otherwise."""
    if layout == "kv-in-page":
        both = torch.cat([k, v], dim=3)
        return both[..., : k.shape[3]], both[..., k.shape[3] :]
    if layout == "heads-first":
        return k.transpose(1, 2).contiguous().transpose(1, 2), v.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "layers":
        return torch.stack([k, k], dim=1)[:, 1], torch.stack([v, v, v], dim=1)[:, 1]
    return k, v


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """What hypothesis has decided about a call; the rest follows from it and the bits."""

    lengths: Lengths
    heads: int  # of k and v
    group: int
    dims: tuple[int, int]  # head_dim, head_dim_v
    page_size: int
    dtypes: tuple[str, str]  # of q, of the cache
    tail: str
    layout: str
    dead: int  # sequences past num_seqs
    pad_rows: int  # query rows past the plan
    unit_scale: bool  # softmax_scale is 1 and not head_dim^-0.5
    kinds: tuple[str, float, str]  # of the logits, their deviation, of the values
    options: dict[str, Any]  # name -> value; scales: kind; sinks: the mean

    def call(self, table: Tensor, num_pages: int, bits: Bits) -> Call:
        """The call, with all numbers drawn from `bits`."""
        live_seqs, batch, given = len(self.lengths), len(self.lengths) + self.dead, dict(self.options)
        for name in ("q_scale", "k_scale", "v_scale"):
            given[name] = _scale(bits, given.get(name), batch, self.heads, live_seqs, self.tail)
        if given.get("sinks") is not None:
            given["sinks"] = (bits.normal(self.heads * self.group) + given["sinks"]).float()
        dim, dim_v = self.dims
        softmax_scale = 1.0 if self.unit_scale else dim**-0.5
        sigma = softmax_scale
        for name in ("q_scale", "k_scale"):
            sigma *= 1.0 if given[name] is None else float(torch.as_tensor(given[name]).nan_to_num().max())
        cu_seqlens_q, seqused_k = _plan(bits, self.lengths, self.dead, self.tail)
        live_q = sum(q for q, _ in self.lengths)
        tokens = num_pages * self.page_size
        q_shape, k_shape = (live_q + self.pad_rows, self.heads * self.group, dim), (tokens, self.heads, dim)
        q, k = _queries_and_keys(bits, q_shape, k_shape, self.kinds[0], self.kinds[1] / sigma)
        v = _values(bits, (tokens, self.heads, dim_v), self.kinds[2])
        live = _live_slots(self.lengths, table, self.page_size, num_pages)
        pools = [_finish(x, live, self.tail, self.dtypes[1]).view(num_pages, self.page_size, self.heads, -1) for x in (k, v)]
        k_cache, v_cache = _lay_out(pools[0], pools[1], self.layout)
        return Call(
            q=_finish(q, torch.arange(len(q)) < live_q, self.tail, self.dtypes[0]),
            k_cache=k_cache,
            v_cache=v_cache,
            cu_seqlens_q=cu_seqlens_q,
            seqused_k=seqused_k,
            page_table=table,
            softmax_scale=softmax_scale,
            num_seqs=live_seqs if self.dead else None,
            **given,
        )


_SCALES = st.sampled_from((None, "float", "head", "sequence"))
_OPTION: dict[str, st.SearchStrategy[Any]] = {
    "causal": st.sampled_from((True, False)),
    "window_size": st.tuples(st.integers(0, 13), st.integers(0, 5)).map(lambda w: (w[0] - 1, w[1] - 1)),
    "softcap": st.sampled_from((0.0, 50.0, 30.0, 1.0)),
    "sinks": st.sampled_from((None, 0.0, 30.0, -30.0)),  # mean of the sinks: amid the logits, above them, below them
    "q_scale": _SCALES,
    "k_scale": _SCALES,
    "v_scale": _SCALES,
}


@st.composite
def calls(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[str] = ("bf16", "fp16", "fp32"),
    cache_dtypes: Sequence[str] = ("e4m3",),
    head_dims: Sequence[int] = (4, 1, 8, 16),
    uneven_head_dims: bool = True,
    kv_heads: Sequence[int] = (1, 2, 3),
    groups: Sequence[int] = (1, 2, 3, 5),
    page_sizes: Sequence[int] = (4, 1, 2, 3, 5, 8, 16),
    max_seqs: int = 4,
    max_q: int = 6,
    max_kv: int = 40,
    options: Collection[str] = OPTIONS,
    tails: Sequence[str] = TAILS,
    layouts: Sequence[str] = LAYOUTS,
    logits: Sequence[str] = LOGITS,
    spreads: Sequence[float] = SPREADS,
) -> Call:
    """A call that keeps the contract: live inputs finite, |logit| below 2^20; `out` is left to the caller.

    Each sequence lists what to draw from, simplest first.  `cache_dtypes` are formats of k and v besides that of q.  `options`
    names the keyword arguments that may leave their default: a kernel without sinks wants calls without sinks.

    Shapes: as in `Call`; q_heads = kv_heads x group, batch up to max_seqs + 2 (num_seqs is set where some are dead), total_q
    with up to 3 rows past the plan, scales float, (kv_heads,) or (batch, kv_heads).

    Raises: ValueError for an unknown option.
    """
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ValueError(f"oracle/strategies.py: calls(options=...) got {unknown}, expected some of {OPTIONS}")

    def pick(values: Sequence[T]) -> T:
        return draw(st.sampled_from(values))

    lengths, heads, group = draw(batches(max_seqs=max_seqs, max_q=max_q, max_kv=max_kv)), pick(kv_heads), pick(groups)
    dim, page_size, dtype, tail = pick(head_dims), pick(page_sizes), pick(dtypes), pick(tails)
    dead = draw(st.integers(0, 2)) if "num_seqs" in options else 0
    drawn = _Drawn(
        lengths=lengths,
        heads=heads,
        group=group,
        dims=(dim, pick((dim, *head_dims)) if uneven_head_dims else dim),
        page_size=page_size,
        dtypes=(dtype, pick((dtype, *cache_dtypes))),
        tail=tail,
        layout=pick(layouts),
        dead=dead,
        pad_rows=draw(st.integers(0, 3)),
        unit_scale=draw(st.booleans()),
        kinds=(pick(logits), pick(spreads), pick(VALUES)),
        options={name: draw(strategy) for name, strategy in _OPTION.items() if name in options},
    )
    table, num_pages = draw(page_tables([-(-kv // page_size) for _, kv in lengths] + [0] * dead, tail=tail))
    return drawn.call(table, num_pages, Bits(np.random.Philox(draw(st.integers(0, 2**32 - 1)))))
