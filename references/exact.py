"""One row of one head in mpmath at 50 digits: output, LSE and every ingredient of the error bound, by their definitions.

This is what the references are checked against, so it is written in loops over Python numbers, reads the plan by itself and
shares no code with them.  Small cases only: about 10 ms for 40 keys of 16 dimensions.  Needs mpmath (extra `test`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import mpmath
import torch
from torch import Tensor

from oracle.contract import Call

MP = mpmath.mp.clone()  # a context of its own: the precision of the global one is left alone
MP.dps = 50

Mpf: TypeAlias = Any  # mpmath has no types
Numbers: TypeAlias = list[Mpf]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactRow:
    """One (row, head): lists are per output column, (head_dim_v,).  Sums run over visible keys unless the comment names the sink.

    s_j is the exact logit, scaled and soft-capped; a_j = sigma |q| |k_j| with sigma = softmax_scale q_scale k_scale; v_j the
    dequantised value; the sink is one more atom of logit `sink` and v = 0; m = max s, l = sum exp(s - m), p_j = exp(s_j - m) / l,
    all over keys and sink.  Symbols as in docs/numerics.md, sections 2.1 and 2.6.  Where nothing is visible: zeros, lse -inf.
    """

    keys: int  # visible keys
    out: list[float]  # o = sum p_j v_j
    lse: float  # L = m + ln l, natural log, sink included
    v1: list[float]  # sum p_j |v_j|
    v2: list[float]  # sqrt(sum p_j^2 v_j^2)
    v2g: list[float]  # V2 with equal p_j added before squaring (ties)
    d: list[float]  # sqrt(sum p_j (v_j - o)^2), keys and sink
    t: list[float]  # sum p_j s_j (v_j - o): the direction of a temperature error
    w1: list[float]  # sum |v_j| / l
    a2: float  # sqrt(sum p_j a_j^2)
    b1: float  # sum p_j sigma norm(q∘k_j)
    s1: float  # sum p_j |s_j|
    s2: float  # sqrt(sum p_j s_j^2)
    g1: float  # sum p_j (m - s_j), keys and sink
    g2: float  # sqrt(sum p_j (m - s_j)^2), keys and sink
    smax: float  # max |s_j|, keys and sink
    span: float  # m - min s_j, keys and sink
    kmax: float  # max a_j
    p2: float  # sqrt(sum p_j^2)
    p2g: float  # P2 with equal p_j added before squaring
    tie_margin: float  # least distance to the edge of a bin of a key with company: below the error of log2 p, v2g may differ
    ties_by_chance: bool  # unequal keys lie within a bin of each other: v2g depends on where the bins begin


def _one(scale: Tensor | float | None, seq: int, kv_head: int) -> Mpf:
    """The dequantisation scale of one sequence and kv head."""
    if scale is None:
        return MP.mpf(1)
    if not isinstance(scale, Tensor):
        return MP.mpf(scale)
    return MP.mpf(float(scale if scale.dim() == 0 else scale[kv_head] if scale.dim() == 1 else scale[seq][kv_head]))


def _vector(values: Tensor) -> Numbers:
    """The numbers of a vector, exactly."""
    return [MP.mpf(x) for x in values.double().tolist()]


def _sequence(call: Call, row: int) -> int:
    """The sequence that the packed query `row` belongs to.  Raises ValueError where the plan does not declare it live."""
    ends = call.cu_seqlens_q.tolist()[1 : call.live_seqs + 1]
    for seq, end in enumerate(ends):
        if 0 <= row < end:
            return seq
    raise ValueError(f"references/exact.py: row {row} is not live (live rows: 0 to {max(ends, default=0) - 1})")


def visible_keys(call: Call, row: int) -> list[int]:
    """Positions of the keys that the packed query `row` sees, by the words of the contract, one key at a time."""
    seq = _sequence(call, row)
    first, end = call.cu_seqlens_q.tolist()[seq : seq + 2]
    kv_len = int(call.seqused_k[seq])
    position = kv_len - (end - first) + (row - first)
    left, right = call.window_size
    return [
        key
        for key in range(kv_len)
        if not (call.causal and key > position)
        and not (left != -1 and position - key > left)
        and not (right != -1 and key - position > right)
    ]


def _root_sum_squares(values: Iterable[Mpf]) -> Mpf:
    return MP.sqrt(MP.fsum(x * x for x in values))


def _bins(p: Numbers, u_p: float) -> tuple[dict[int, list[int]], float, bool]:
    """Keys by floor(log2(p_j) 8 / u_p), tie_margin, and ties_by_chance."""
    groups: dict[int, list[int]] = {}
    arguments = [MP.log(x, 2) * 8 / MP.mpf(u_p) for x in p]
    margin, by_chance = 0.5, False
    for j, x in enumerate(arguments):
        groups.setdefault(int(MP.floor(x)), []).append(j)
        distances = [abs(x - y) for i, y in enumerate(arguments) if i != j]
        by_chance |= any(0 < y <= 1 for y in distances)
        if any(y < 1 for y in distances):
            margin = min(margin, float(abs(x - MP.nint(x))))
    return groups, margin, by_chance


def exact_row(call: Call, row: int, head: int, *, u_p: float) -> ExactRow:
    """Query head `head` of the packed query `row`, correct to the last digit of a double.

    `u_p` is the unit roundoff of P: the ties of v2g and p2g are bins of log2 p of width u_p / 8 (docs/numerics.md, section 2.6).

    Raises: ValueError where `row` is not live.
    """
    seq = _sequence(call, row)
    page_size, kv_heads, head_dim_v = call.v_cache.shape[1:]
    kv_head = head // (call.q.shape[1] // kv_heads)
    sigma = MP.mpf(call.softmax_scale) * _one(call.q_scale, seq, kv_head) * _one(call.k_scale, seq, kv_head)
    v_scale = _one(call.v_scale, seq, kv_head)
    q = _vector(call.q[row, head])
    s: Numbers = []
    a: Numbers = []
    b: Numbers = []
    v: list[Numbers] = []
    for key in visible_keys(call, row):
        page, slot = int(call.page_table[seq, key // page_size]), key % page_size
        k = _vector(call.k_cache[page, slot, kv_head])
        logit = sigma * MP.fdot(q, k)
        if call.softcap > 0:
            cap = MP.mpf(call.softcap)
            logit = cap * MP.tanh(logit / cap)
        s.append(logit)
        a.append(abs(sigma) * _root_sum_squares(q) * _root_sum_squares(k))
        b.append(abs(sigma) * _root_sum_squares(x * y for x, y in zip(q, k, strict=True)))
        v.append([x * v_scale for x in _vector(call.v_cache[page, slot, kv_head])])
    sink = [] if call.sinks is None else [MP.mpf(float(call.sinks[head]))]
    return _moments(s, sink, a, b, v, head_dim_v, u_p)


def _moments(s: Numbers, sink: Numbers, a: Numbers, b: Numbers, v: list[Numbers], head_dim_v: int, u_p: float) -> ExactRow:
    """ExactRow of the logits s (keys), the sink (none or one), the majorants a and b (keys), the values v (keys, head_dim_v)."""
    keys, atoms = range(len(s)), s + sink
    m = max(atoms, default=MP.mpf(0))
    l = MP.fsum(MP.exp(x - m) for x in atoms)  # noqa: E741 - the name in the formulas
    p = [MP.exp(x - m) / l for x in s]
    p_all = [MP.exp(x - m) / l for x in atoms]
    gap = [m - x for x in atoms]
    groups, tie_margin, ties_by_chance = _bins(p, u_p)
    columns = range(head_dim_v)
    o = [MP.fsum(p[j] * v[j][c] for j in keys) for c in columns]
    v_all = v + [[MP.mpf(0)] * head_dim_v] * len(sink)
    return ExactRow(
        keys=len(s),
        out=[float(x) for x in o],
        lse=float(m + MP.log(l)) if atoms else float("-inf"),
        v1=[float(MP.fsum(p[j] * abs(v[j][c]) for j in keys)) for c in columns],
        v2=[float(_root_sum_squares(p[j] * v[j][c] for j in keys)) for c in columns],
        v2g=[float(_root_sum_squares(MP.fsum(p[j] * v[j][c] for j in g) for g in groups.values())) for c in columns],
        d=[float(MP.sqrt(MP.fsum(x * (y[c] - o[c]) ** 2 for x, y in zip(p_all, v_all, strict=True)))) for c in columns],
        t=[float(MP.fsum(p[j] * s[j] * (v[j][c] - o[c]) for j in keys)) for c in columns],
        w1=[float(MP.fsum(abs(v[j][c]) for j in keys) / l) if atoms else 0.0 for c in columns],
        a2=float(MP.sqrt(MP.fsum(p[j] * a[j] ** 2 for j in keys))),
        b1=float(MP.fsum(p[j] * b[j] for j in keys)),
        s1=float(MP.fsum(p[j] * abs(s[j]) for j in keys)),
        s2=float(MP.sqrt(MP.fsum(p[j] * s[j] ** 2 for j in keys))),
        g1=float(MP.fsum(x * y for x, y in zip(p_all, gap, strict=True))),
        g2=float(MP.sqrt(MP.fsum(x * y**2 for x, y in zip(p_all, gap, strict=True)))),
        smax=float(max((abs(x) for x in atoms), default=0)),
        span=float(max(gap, default=0)),
        kmax=float(max(a, default=0)),
        p2=float(_root_sum_squares(p)),
        p2g=float(_root_sum_squares(MP.fsum(p[j] for j in g) for g in groups.values())),
        tie_margin=tie_margin,
        ties_by_chance=ties_by_chance,
    )


UNDERFLOW = 1e-150  # squares of less vanish in fp64, and no output of a kernel is that small


def slack(u: float, keys: int, head_dim: int, kmax: float, smax: float) -> float:
    """Relative error of every p_j, and absolute error of L, in an arithmetic of unit roundoff `u`, to first order.

    A logit is wrong by at most (d + 8) u (a_j + |s_j|), a sum over n keys by n u; the 4 is for numerator and denominator, and
    for the few roundings that an ingredient adds.
    """
    return 4 * u * (keys + (head_dim + 8) * (1 + kmax + smax))


def sensitivities(x: ExactRow) -> dict[str, list[float]]:
    """By field: how far a relative error of 1 in every p_j, with the same absolute error in s_j, may move it."""
    s = 1 + x.smax
    mean = [v + abs(o) for v, o in zip(x.v1, x.out, strict=True)]
    spread = [d + m for d, m in zip(x.d, mean, strict=True)]  # o moves by V1, and D with it (triangle inequality)
    return {
        "out": mean, "lse": [1.0], "v1": x.v1, "v2": x.v2, "v2g": x.v1, "d": spread, "t": [s * y for y in spread], "w1": x.w1,
        "a2": [x.a2], "b1": [x.b1], "s1": [s], "s2": [s], "g1": [1 + x.span], "g2": [1 + x.span], "smax": [s],
        "span": [1 + x.span], "kmax": [x.kmax], "p2": [x.p2], "p2g": [1.0],
    }  # fmt: skip


def disagreement(x: ExactRow, got: Mapping[str, Tensor], *, head_dim: int, u_p: float) -> dict[str, float]:
    """Largest error of each field of `got` (float64, the row and head of `x`), in units of what fp64 may be wrong by.

    NaN counts as inf.  v2g and p2g are left out where a tied key lies so near the edge of a bin that fp64 cannot tell its side.
    """
    limit = slack(torch.finfo(torch.float64).eps / 2, x.keys, head_dim, x.kmax, x.smax)
    on_edge = x.tie_margin <= limit * 8 / u_p / math.log(2)
    worst: dict[str, float] = {}
    for name, units in sensitivities(x).items():
        if name in got and not (on_edge and name in ("v2g", "p2g")):
            want = getattr(x, name)
            pairs = zip(got[name].reshape(-1).tolist(), want if isinstance(want, list) else [want], units, strict=True)
            errors = [0.0 if g == w else abs(g - w) / (limit * unit + UNDERFLOW) for g, w, unit in pairs]
            worst[name] = max((e if e == e else math.inf for e in errors), default=0.0)
    return worst


def sample_pairs(rows: int, heads: int, *, count: int) -> list[tuple[int, int]]:
    """At most `count` (row, head), spread evenly, the first and the last among them."""
    every = rows * heads
    chosen = sorted({round(i * (every - 1) / (count - 1)) for i in range(count)}) if every else []
    return [divmod(i, heads) for i in chosen]
