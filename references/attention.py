"""The reference: attention in fp64 at chosen query rows, with every ingredient of the error bound.

Exact to fp64, blockwise over keys, in memory that does not grow with the number of rows of the call.  The same code runs on
the CPU and on CUDA.  What the ingredients mean and why they suffice: docs/numerics.md, section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.contract import Call
from oracle.references.plan import RowPlan, head_scales, row_plan, tokens
from oracle.references.ties import grouped_norms

SCORES = 2**24  # scores held at once; five fp64 buffers of this size are live, 128 MiB each
KEY_BLOCK = 4096  # keys converted to fp64 at once
PREFIX_BLOCK = 512  # keys between two looks at the running sum of P.V
SHORT = 16  # keys that any kernel takes in one tile, so that its P is exp(s - m) with the row's own m
HIDDEN = -1e30  # s - m of a hidden key: finite, so that 0 * it is 0, and its exp is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """The exact answer at R rows, and the moments of the softmax that bound a kernel's rounding error.

    p_j is the softmax over visible keys and the sink, s_j the scaled, soft-capped logit (a sink is one more atom with v = 0),
    a_j = sigma |q| |k_j|, sigma the softmax scale times q_scale and k_scale; v includes v_scale.  All float64.
    Per element (R, q_heads, head_dim_v); per row (R, q_heads); see docs/numerics.md, section 2.1.
    """

    plan: RowPlan
    out: Tensor  # sum p_j v_j
    lse: Tensor  # natural log of the denominator; -inf without key and sink
    empty: Tensor  # (R,) bool: no visible key
    v1: Tensor  # sum p_j |v_j|
    v2: Tensor  # sqrt(sum p_j^2 v_j^2)
    v2g: Tensor  # the same with the keys of equal p summed first
    spread: Tensor  # sqrt(sum p_j (v_j - out)^2)
    slope: Tensor  # sum over keys of p_j s_j (v_j - out): d out / d ln(scale)
    prefix: Tensor  # largest |partial sum of p_j v_j| from either end
    w1: Tensor  # sum |v_j| / l
    v_max: Tensor  # a bound on max |v_j|
    lse_after: Tensor  # LSE of a row sum over rounded p exp-ed from the row's own maximum; NaN for rows over SHORT keys
    top: Tensor  # m, the largest logit or the sink
    gap: Tensor  # m minus the second largest of logits and sink; inf where there is no second
    mass: Tensor  # sum of p_j over the keys: 1 without a sink
    within: Tensor  # standard deviation of the logits among the keys
    deviation: Tensor  # the same with the sink beside them: how far a change of the scale moves the weights
    a2: Tensor  # sqrt(sum p_j a_j^2)
    a_max: Tensor  # a bound on max a_j
    k_peak: Tensor  # sigma |q| sqrt(sum p_j max|k|^2), max over the tokens that share a quantisation scale with key j
    q_peak: Tensor  # a2 max|q| / |q|, max over the queries that share a quantisation scale
    v_peak: Tensor  # max|v| over all live keys and columns; 0 unless asked for
    b1: Tensor  # sum p_j sigma norm(q o k_j)
    b2: Tensor  # sqrt(sum p_j sigma^2 norm(q o k_j)^2)
    b_max: Tensor  # a bound on max sigma norm(q o k_j)
    k_peak_max: Tensor  # k_peak for the key of the largest
    q_peak_max: Tensor  # q_peak for the key of the largest a_j
    s1: Tensor  # sum over keys of p_j |s_j|
    s2: Tensor  # sqrt(sum over keys of p_j s_j^2)
    g1: Tensor  # sum p_j (m - s_j), m the largest logit
    g2: Tensor  # sqrt(sum p_j (m - s_j)^2)
    s_max: Tensor  # max |s_j|
    s_range: Tensor  # m - min s_j
    p2: Tensor  # sqrt(sum p_j^2)
    p2g: Tensor  # the same with equal p summed first
    v_scale: Tensor  # |v_scale|

    @property
    def keys(self) -> Tensor:
        """Visible keys of each row, (R,) float64."""
        return (self.plan.hi - self.plan.lo).double()


PER_ELEMENT = ("out", "v1", "v2", "v2g", "spread", "slope", "prefix", "w1", "v_max")
PER_ROW = (
    "lse",
    "lse_after",
    "top",
    "gap",
    "mass",
    "within",
    "deviation",
    "a2",
    "a_max",
    "k_peak",
    "q_peak",
    "v_peak",
    "b1",
    "b2",
    "b_max",
    "k_peak_max",
    "q_peak_max",
    "s1",
    "s2",
    "g1",
    "g2",
    "s_max",
    "s_range",
    "p2",
    "p2g",
    "v_scale",
)


def attend(
    call: Call,
    rows: Tensor,
    u_p: float,
    *,
    every_tie: bool = False,
    smooth_k: bool = False,
    qk_block: int = 1,
    quantised_v: bool = False,
) -> Exact:
    """The exact answer of `call` at the packed query rows `rows` (R,) int64, all heads, with the bound's ingredients.

    `u_p` is the unit roundoff of the format that P is rounded to: p closer than u_p/8 count as equal in `v2g` and `p2g`.
    Rows whose ties are no more than chance get `v2g` from `p2g` (docs/numerics.md, section 2.6) unless `every_tie`.
    `smooth_k` and `qk_block` describe quantisation inside a kernel: with the first, a_j is taken from k_j minus the mean key;
    the second is how many tokens share a scale; `quantised_v` asks for `v_peak`.  Tensors of the result are on the device of
    `call.q`.
    """
    plan = row_plan(call, rows)
    q_heads, kv_heads = call.q.shape[1], call.k_cache.shape[2]
    dim_v = call.v_cache.shape[3]
    device = call.q.device
    result = {name: torch.zeros(len(plan), q_heads, dim_v, dtype=torch.float64, device=device) for name in PER_ELEMENT}
    result |= {name: torch.zeros(len(plan), q_heads, dtype=torch.float64, device=device) for name in PER_ROW}
    group = q_heads // kv_heads
    for index, heads in _chunks(plan, group, kv_heads):
        chunk = _Chunk(call, plan.take(index), heads, smooth_k, qk_block)
        part = chunk.solve(u_p, every_tie=every_tie)
        if quantised_v:
            part["v_peak"] = chunk.v_peak()
        first, last = heads.start * group, heads.stop * group
        at = index.to(device)
        for name, value in part.items():
            result[name][at, first:last] = value
    return Exact(plan=plan, empty=(plan.hi == plan.lo).to(device), **result)


def _chunks(plan: RowPlan, group: int, kv_heads: int) -> Iterator[tuple[Tensor, range]]:
    """Rows of one sequence with overlapping key ranges, times a run of kv heads, within SCORES scores each."""
    order = torch.argsort(plan.seq * (1 << 40) + plan.hi, stable=True)
    lows, highs, seqs = plan.lo[order].tolist(), plan.hi[order].tolist(), plan.seq[order].tolist()
    start = 0
    while start < len(order):
        stop, low, seen = start, lows[start], 0
        while stop < len(order) and seqs[stop] == seqs[start]:
            low, high, seen = min(low, lows[stop]), highs[stop], seen + highs[stop] - lows[stop]
            count = stop - start + 1
            wasteful = count * (high - low) > 2 * seen + 4096  # rows of a window lie apart: their union is mostly masked
            if count > 1 and (wasteful or count * group * (high - low) > SCORES):
                break
            stop += 1
        scores = (stop - start) * group * max(1, highs[stop - 1] - min(lows[start:stop]))
        step = max(1, SCORES // scores)
        for head in range(0, kv_heads, step):
            yield order[start:stop], range(head, min(head + step, kv_heads))
        start = stop


class _Chunk:
    """Rows of one sequence times some kv heads.  Matrices are (heads, rows * group, keys)."""

    def __init__(self, call: Call, plan: RowPlan, heads: range, smooth_k: bool, qk_block: int) -> None:
        self.smooth_k, self.qk_block = smooth_k, qk_block
        self.seq = int(plan.seq[0])
        self.start, self.stop = int(plan.lo.min()), int(plan.hi.max())
        self.rows, self.heads = len(plan), len(heads)
        self.group = call.q.shape[1] // call.k_cache.shape[2]
        device = call.q.device
        self.call, self.slice = call, slice(heads.start, heads.stop)
        self.keys = int(call.seqused_k[self.seq])
        of_group = slice(heads.start * self.group, heads.stop * self.group)
        self.q = self._stack(call.q[plan.row.to(device)][:, of_group].double())
        self.q_peaks = self._stack(self._query_peaks(plan, of_group))
        self.lo = (plan.lo.to(device) - self.start).repeat_interleave(self.group)
        self.hi = (plan.hi.to(device) - self.start).repeat_interleave(self.group)

        def scale(which: Tensor | float | None) -> Tensor:
            return head_scales(which, call.live_seqs, call.k_cache.shape[2])[self.seq, self.slice].to(device).view(-1, 1)

        self.sigma = call.softmax_scale * scale(call.q_scale) * scale(call.k_scale)
        self.v_scale = scale(call.v_scale).unsqueeze(-1)
        self.sink: Tensor | None = None
        if call.sinks is not None:
            sink = call.sinks.double().view(-1, self.group)[self.slice]
            self.sink = sink.repeat(1, self.rows)

    def _blocks(self, size: int) -> Iterator[tuple[int, int]]:
        span = self.stop - self.start
        return ((a, min(a + size, span)) for a in range(0, span, size))

    def _load(self, cache: Tensor, a: int, b: int) -> Tensor:
        block = tokens(self.call, cache[:, :, self.slice], self.seq, self.start + a, self.start + b)
        return block.permute(1, 0, 2).to(torch.float64)

    def _scores(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Logits with -inf where hidden (heads, M, keys), sigma norm(q o k); per key |k| and max|k|; per row min and max."""
        shape = (*self.q.shape[:2], self.stop - self.start)
        s, qk = self.q.new_empty(shape), self.q.new_empty(shape)
        norms, peaks = (self.q.new_empty(self.heads, 1, shape[2]) for _ in range(2))
        centre = self._mean_key() if self.smooth_k else None
        shared = None if self.qk_block == 1 else self._block_peaks(centre)
        low = self.q.new_full(shape[:2], math.inf)
        high = self.q.new_full(shape[:2], -math.inf)
        q2 = self.q * self.q
        sigma, cap = self.sigma.unsqueeze(-1), self.call.softcap
        first, last = int(self.lo.max()), int(self.hi.min())
        for a, b in self._blocks(KEY_BLOCK):
            k = self._load(self.call.k_cache, a, b).transpose(1, 2)
            block = torch.bmm(self.q, k, out=s[:, :, a:b]).mul_(sigma)
            if cap:
                block.div_(cap).tanh_().mul_(cap)
            near = k if centre is None else k - centre
            norms[:, :, a:b] = near.norm(dim=1, keepdim=True)
            peaks[:, :, a:b] = near.abs().amax(1, keepdim=True) if shared is None else shared[:, :, a:b]
            torch.bmm(q2, k.mul_(k), out=qk[:, :, a:b]).sqrt_().mul_(sigma.abs())
            if first <= a and b <= last:
                low, high = torch.minimum(low, block.amin(-1)), torch.maximum(high, block.amax(-1))
            else:
                key = torch.arange(a, b, device=s.device)
                hidden = (key < self.lo[:, None]) | (key >= self.hi[:, None])
                low = torch.minimum(low, block.masked_fill(hidden, math.inf).amin(-1))
                block.masked_fill_(hidden, -math.inf)
                high = torch.maximum(high, block.amax(-1))
        return s, qk, norms, peaks, low, high

    def _mean_key(self) -> Tensor:
        """The mean of all live keys of the sequence, (heads, head_dim, 1)."""
        blocks = range(-self.start, self.keys - self.start, KEY_BLOCK)
        total = sum(self._load(self.call.k_cache, a, min(a + KEY_BLOCK, self.keys - self.start)).sum(1) for a in blocks)
        return torch.as_tensor(total).unsqueeze(-1) / max(1, self.keys)

    def _block_peaks(self, centre: Tensor | None) -> Tensor:
        """For each key, max|k| over the `qk_block` live tokens, counted from the sequence's start, that share its scale."""
        size = self.qk_block
        first, end = self.start // size * size, min(-(-self.stop // size) * size, self.keys)
        step = max(1, KEY_BLOCK // size) * size
        found = [self.q.new_zeros(self.heads, 1, 0)]
        for a in range(first - self.start, end - self.start, step):
            k = self._load(self.call.k_cache, a, min(a + step, end - self.start)).transpose(1, 2)
            height = (k if centre is None else k - centre).abs().amax(1, keepdim=True)
            height = torch.nn.functional.pad(height, (0, -height.shape[2] % size))
            found.append(height.view(self.heads, 1, -1, size).amax(3).repeat_interleave(size, 2))
        return torch.cat(found, 2)[:, :, self.start - first : self.stop - first]

    def _query_peaks(self, plan: RowPlan, heads: slice) -> Tensor:
        """max|q| over the query rows of each row's block and head, (rows, heads * group)."""
        size = self.qk_block
        first, last = (int(i) for i in self.call.cu_seqlens_q[self.seq : self.seq + 2])
        blocks, own = torch.unique((plan.row - first) // size, return_inverse=True)
        rows = (first + blocks[:, None] * size + torch.arange(size)).clamp(max=last - 1).to(self.call.q.device)
        peaks: Tensor = self.call.q[rows][:, :, heads].double().abs().amax((1, 3))
        return peaks[own.to(peaks.device)]

    def solve(self, u_p: float, *, every_tie: bool) -> dict[str, Tensor]:
        """Every field of `Exact` for these rows and heads: (rows, heads * group, ...)."""
        s, qk, norms, peaks, low, top = self._scores()
        if self.sink is not None:
            top, low = torch.maximum(top, self.sink), torch.minimum(low, self.sink)
        nothing = top == -math.inf
        m = top.masked_fill(nothing, 0.0)
        low = low.masked_fill(nothing, 0.0)
        gap = self._gap(s, m)
        e = s.sub_(m.unsqueeze(-1)).clamp_(min=HIDDEN)  # s - m, in the memory of s
        p = torch.exp(e)
        total = p.sum(-1)
        beside = torch.zeros_like(total)
        if self.sink is not None:
            beside = torch.exp(self.sink - m)
            total = total + beside
        after = self._sum_after(p, beside, m, u_p)
        inverse = 1.0 / total.masked_fill(nothing, 1.0)
        p.mul_(inverse.unsqueeze(-1))
        beside = beside * inverse
        pe = p * e
        from_sink = torch.zeros_like(m) if self.sink is None else self.sink - m
        mass = p.sum(-1)
        first_moment, second_moment = pe.sum(-1), _dot(pe, e)
        within, deviation = _deviations(mass, m, first_moment, second_moment)
        fields: dict[str, Tensor] = {
            "lse": (m + total.log()).masked_fill(nothing, -math.inf),
            "lse_after": after,
            "top": m,
            "gap": gap,
            "mass": mass,
            "within": within,
            "deviation": deviation,
            "g1": -(first_moment + beside * from_sink),
            "g2": (second_moment + beside * from_sink**2).sqrt(),
            "s2": (second_moment + 2 * m * first_moment + m * m * mass).clamp(min=0.0).sqrt(),
            "s_max": torch.maximum(top.abs(), low.abs()).masked_fill(nothing, 0.0),
            "s_range": m - low,
            "b1": _dot(p, qk),
            "b_max": qk.amax(-1) if e.shape[-1] else torch.zeros_like(m),
            "b2": _dot(p, qk.square_()).sqrt(),
            "v_scale": self.v_scale.abs().squeeze(-1).expand_as(m),
        }
        length = self.q.norm(dim=-1)
        size, q_ratio = length * self.sigma.abs(), self.q_peaks / length.clamp(min=1e-300)
        fields["a2"] = size * torch.bmm(p, (norms * norms).transpose(1, 2)).squeeze(-1).sqrt()
        fields["k_peak_max"] = size * (peaks.amax(-1) if e.shape[-1] else 0.0)
        fields["k_peak"] = size * torch.bmm(p, peaks.square_().transpose(1, 2)).squeeze(-1).sqrt()
        fields["q_peak"] = fields["a2"] * q_ratio
        fields["a_max"] = size * norms.amax(-1) if e.shape[-1] else torch.zeros_like(size)
        fields["q_peak_max"] = fields["a_max"] * q_ratio
        fields["s1"] = _dot(p, torch.add(e, m.unsqueeze(-1), out=qk).abs_())
        p_squared = torch.mul(p, p, out=qk)
        fields["p2"] = p_squared.sum(-1).sqrt()
        fields |= self._values(p, pe, p_squared, m, mass)
        fields["w1"] = fields["w1"] * inverse.unsqueeze(-1)
        fields["p2g"], fields["v2g"] = grouped_norms(
            p, e, u_p, fields["p2"], fields["v2"], fields["out"], self._all_values, every_tie=every_tie
        )
        for name in PER_ELEMENT:
            signed = name in ("out", "slope")
            fields[name] = fields[name] * (self.v_scale if signed else self.v_scale.abs())
        return {name: self._unstack(value) for name, value in fields.items()}

    def _gap(self, s: Tensor, m: Tensor) -> Tensor:
        """What separates the largest of logits `s` and sink from the second largest; inf where there is no second."""
        atoms = torch.cat((s.topk(min(2, s.shape[-1])).values, s.new_full((*m.shape, 2), -math.inf)), -1)
        if self.sink is not None:
            atoms = torch.cat((atoms, self.sink.unsqueeze(-1)), -1)
        return m - atoms.topk(2).values[..., 1]

    def v_peak(self) -> Tensor:
        """max|v| over the sequence's live keys, (rows, heads * group)."""
        blocks = range(-self.start, self.keys - self.start, KEY_BLOCK)
        peaks = [self._load(self.call.v_cache, a, min(a + KEY_BLOCK, self.keys - self.start)).abs().amax((1, 2)) for a in blocks]
        peak = torch.stack([self.q.new_zeros(self.heads), *peaks]).amax(0)[:, None] * self.v_scale.abs().squeeze(-1)
        return self._unstack(peak.expand(self.q.shape[:2]))

    def _all_values(self, head: int) -> Tensor:
        """v of one of these kv heads over the whole range of keys, (keys, head_dim_v), without v_scale."""
        return self._load(self.call.v_cache, 0, self.stop - self.start)[head]

    def _sum_after(self, w: Tensor, beside: Tensor, m: Tensor, u_p: float) -> Tensor:
        """m + ln(sum of the weights w rounded to the format of P), NaN for rows of more than SHORT keys or a wider format."""
        narrow = {2.0**-8: torch.bfloat16, 2.0**-11: torch.float16}.get(u_p)
        if narrow is None or self.stop > SHORT:
            return torch.full_like(m, math.nan)
        return m + (w.float().to(narrow).double().sum(-1) + beside).log()

    def _values(self, p: Tensor, pe: Tensor, p_squared: Tensor, m: Tensor, mass: Tensor) -> dict[str, Tensor]:
        """The moments that need v, without v_scale."""
        shape = (*p.shape[:2], self.call.v_cache.shape[3])
        out, v1, v2, square, tilt, w1 = (p.new_zeros(shape) for _ in range(6))
        largest, smallest = p.new_zeros(shape), p.new_zeros(shape)
        v_max = p.new_zeros(shape[0], 1, shape[2])
        for a, b in self._blocks(KEY_BLOCK):
            v = self._load(self.call.v_cache, a, b)
            for c in range(a, b, PREFIX_BLOCK):
                d = min(c + PREFIX_BLOCK, b)
                out.baddbmm_(p[:, :, c:d], v[:, c - a : d - a])
                torch.maximum(largest, out, out=largest)
                torch.minimum(smallest, out, out=smallest)
            tilt.baddbmm_(pe[:, :, a:b], v)
            size = v.abs_()
            v1.baddbmm_(p[:, :, a:b], size)
            v_max = torch.maximum(v_max, size.amax(1, keepdim=True))
            first, last = (self.lo - a).clamp(0, b - a), (self.hi - a).clamp(0, b - a)
            if int(first.max()) == 0 and int(last.min()) == b - a:
                w1 += size.sum(1, keepdim=True)
            else:
                sums = torch.nn.functional.pad(size.cumsum(1), (0, 0, 1, 0))
                w1 += sums[:, last] - sums[:, first]
            size.mul_(size)
            square.baddbmm_(p[:, :, a:b], size)
            v2.baddbmm_(p_squared[:, :, a:b], size)
        # |partial sums| from the front are at most max(largest, -smallest); from the back, out - partial
        prefix = torch.stack((largest, -smallest, out - smallest, largest - out)).amax(0)
        slope = tilt + m.unsqueeze(-1) * out - out * (pe.sum(-1) + m * mass).unsqueeze(-1)
        spread = (square - out * out).clamp(min=0.0).sqrt()
        return {"out": out, "v1": v1, "v2": v2.sqrt_(), "spread": spread, "slope": slope, "prefix": prefix, "w1": w1,
                "v_max": v_max.expand(shape)}  # fmt: skip

    def _stack(self, value: Tensor) -> Tensor:
        """(rows, heads * group, ...) as (heads, rows * group, ...)."""
        rest = value.shape[2:]
        return value.view(self.rows, self.heads, self.group, *rest).transpose(0, 1).reshape(self.heads, -1, *rest)

    def _unstack(self, value: Tensor) -> Tensor:
        rest = value.shape[2:]
        value = value.reshape(self.heads, self.rows, self.group, *rest).transpose(0, 1)
        return value.reshape(self.rows, self.heads * self.group, *rest)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The dot products of the last dimension of two (heads, M, keys), without their product in memory."""
    return torch.bmm(a.flatten(0, 1).unsqueeze(1), b.flatten(0, 1).unsqueeze(2)).view(a.shape[:2])


def _deviations(mass: Tensor, m: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The standard deviation of s among the keys, and the root of its square + (1 - mass) mean^2; given sum p, m, sum p (s - m)
    and sum p (s - m)^2 of the keys.

    The second part is what a change of the scale moves between the keys and a sink, which is not scaled.
    """
    mean = first / mass.clamp(min=1e-300)
    variance = (second / mass.clamp(min=1e-300) - mean * mean).clamp(min=0.0) * (mass > 0)
    beside = (1 - mass).clamp(min=0.0) * (m + mean) ** 2 * (mass > 0)
    return variance.sqrt(), (variance + beside).sqrt()
