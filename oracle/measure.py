"""Measuring one kernel's answer to one case: errors in units of the bound, and what the slopes need.

Nothing here decides.  A comparison that is not clearly true counts against the kernel: every test reads `err <= limit`,
never its negation, so a NaN cannot pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.contract import Call
from oracle.references.attention import Exact, attend
from oracle.references.bound import Bound, bound
from oracle.references.roundoff import Roundoff, tie_width

DIRECTIONS = ("gain", "temperature", "bias")
REFINE_ABOVE = 0.8  # rows nearer to the limit than this get V2g summed over all ties before they are believed
WEAKEST = 1e-3  # rms(g / B) of a direction under which inputs say nothing of it (a constant v has no temperature)
REFINE_ROWS = 256  # rows refined at most in one case
NEAR_TIE = 2.0**-16  # relative distance from the middle of two outputs that no kernel's arithmetic resolves
ONE_V = 2.0**-20  # spread of v over its mean, under softmax, that is fp64's own error


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The exact answer of a case at its judged rows, with the bound for a given contract."""

    exact: Exact
    bound: Bound
    roundoff: Roundoff
    rows: Tensor  # (R,) int64 packed query rows
    softcap: bool
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The element (or row) where a kernel is farthest from the exact answer, in units of its limit."""

    units: float  # |got - want| / limit; inf where got is not finite
    row: int  # packed query row
    head: int
    column: int  # -1 for the LSE
    got: float
    want: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over rows from which one slope and its standard error are made (docs/numerics.md, section 4.2)."""

    a: float = 0.0  # sum of a_r, a_r = sum over columns of err' g / B^2
    b: float = 0.0  # sum of b_r, b_r = sum over columns of g^2 / B^2
    aa: float = 0.0
    ab: float = 0.0
    bb: float = 0.0
    elements: int = 0
    narrow: float = 0.0  # sum of b_r over the deviation of the row's logits
    level: float = 0.0  # sum of the a_r of a kernel whose logits are all off by their own size, and by one sign
    weight: float = 0.0  # sum of the a_r of a kernel whose exp is twice too large for all keys, and right for the sink

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            a=self.a + other.a,
            b=self.b + other.b,
            aa=self.aa + other.aa,
            ab=self.ab + other.ab,
            bb=self.bb + other.bb,
            elements=self.elements + other.elements,
            narrow=self.narrow + other.narrow,
            level=self.level + other.level,
            weight=self.weight + other.weight,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """An error proportional to some direction: the size of the proportion, and how sure it is."""

    beta: float
    z: float  # beta over its standard error, rows as clusters
    effect: float  # |beta| rms(g / B): its size in units of the bound
    rows: float  # effective number of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one kernel's answer to one case measures."""

    elements: int
    not_finite: int  # elements not finite where the exact answer is
    worst: Worst
    worst_det: float  # largest error in units of the worst-case bound
    worst_own: float  # the same in units of B, the output's own rounding taken off both
    worst_lse: Worst | None  # None where the kernel gives no LSE
    worst_lse_after: float  # the same under a row sum over rounded P
    fits_after: bool  # short rows agree with a row sum over rounded P, to within the tight limit
    empty_rows_wrong: int  # rows without keys that are not exactly 0 (LSE -inf, or the sink)
    mean_abs: float
    max_abs: float
    cluster_e2: Tensor  # (clusters,) sum of e^2 over each (sequence, kv head)
    cluster_elements: Tensor  # (clusters,)
    sums: dict[str, Sums]  # by direction
    logit_share: float  # median share of the bound that logit errors take

    @property
    def rms(self) -> float:
        """RMS of e over all elements."""
        count = float(self.cluster_elements.sum())
        return math.sqrt(float(self.cluster_e2.sum()) / count) if count else 0.0


def tell(call: Call, rows: Tensor, roundoff: Roundoff) -> Truth:
    """The exact answer of `call` at `rows` (R,) int64, and the bound for a contract."""
    exact = _attend(call, rows, roundoff)
    softcap, head_dim = call.softcap > 0, call.q.shape[2]
    limits = bound(exact, roundoff, softcap=softcap, head_dim=head_dim)
    return Truth(exact=exact, bound=limits, roundoff=roundoff, rows=rows, softcap=softcap, head_dim=head_dim)


def _attend(call: Call, rows: Tensor, r: Roundoff, *, every_tie: bool = False) -> Exact:
    return attend(
        call,
        rows,
        tie_width(r),
        every_tie=every_tie,
        smooth_k=r.smooth_k,
        qk_block=r.qk_block,
        quantised_v=r.u_v > 0,
    )


def measure(truth: Truth, call: Call, out: Tensor, lse: Tensor | None) -> Measured:
    """Errors of `out` (R, q_heads, head_dim_v) and natural-log `lse` (R, q_heads) at the rows of `truth`.

    Raises ValueError for any other shape: one that broadcasts is no answer.
    """
    x, limits = truth.exact, truth.bound
    for name, result, like in (("out", out, x.out), ("lse", lse, x.lse)):
        if result is not None and result.shape != like.shape:
            raise ValueError(f"{name}: got shape {tuple(result.shape)}, want {tuple(like.shape)}")
    got, want = out.double(), x.out
    live = (~x.empty)[:, None, None].expand_as(want)
    finite = torch.isfinite(got)
    err = torch.where(finite, got - want, math.inf)
    b = refined(truth, call, got, limits.b)
    e = torch.where(live, err.abs() / b, 0.0)
    e = torch.where(torch.isnan(e), torch.where(err == 0, 0.0, math.inf), e)  # 0/0: a bound of 0 demands exactness
    e = torch.where(finite, e, math.inf)  # in rows without keys too
    e_det = torch.where(live, err.abs() / limits.b_det, 0.0)
    e_det = torch.where(torch.isnan(e_det), torch.where(err == 0, 0.0, math.inf), e_det)
    u_out, a_out = truth.roundoff.u_out, truth.roundoff.a_out
    rounding = (u_out * got.abs()).clamp(min=a_out)  # what the last step alone may have moved it by
    room = b - (1 + 2 * u_out) * (u_out * want.abs()).clamp(min=a_out)
    own = torch.where(live & (room > 0), (err.abs() - rounding).clamp(min=0.0) / room, 0.0)
    worst_lse, after, fits_after, lse_wrong = _lse(truth, lse)
    empty = x.empty
    empty_wrong = int((~(got[empty] == 0)).flatten(1).any(1).sum()) + lse_wrong if bool(empty.any()) else 0
    finite_err = err[finite & live]
    group = call.q.shape[1] // call.k_cache.shape[2]
    cluster = (x.plan.seq[:, None] * call.k_cache.shape[2] + torch.arange(call.q.shape[1])[None, :] // group).to(e.device)
    per_row = torch.where(torch.isfinite(e), e, 0.0).square().sum(-1)
    size = torch.where(live, 1.0, 0.0).sum(-1)
    index = torch.unique(cluster, return_inverse=True)[1].flatten()
    clusters = int(index.max()) + 1 if len(index) else 0
    return Measured(
        elements=want.numel(),
        not_finite=int((~finite).sum()),
        worst=_worst(truth, e, got, want, b),
        worst_det=float(e_det.max()) if e_det.numel() else 0.0,
        worst_own=float(own.max()) if own.numel() else 0.0,
        worst_lse=worst_lse,
        worst_lse_after=after,
        fits_after=fits_after,
        empty_rows_wrong=empty_wrong,
        mean_abs=float(finite_err.abs().mean()) if finite_err.numel() else 0.0,
        max_abs=float(finite_err.abs().max()) if finite_err.numel() else 0.0,
        cluster_e2=per_row.new_zeros(clusters).index_add_(0, index, per_row.flatten()),
        cluster_elements=size.new_zeros(clusters).index_add_(0, index, size.flatten()),
        sums=_sums(truth, out, live & finite),
        logit_share=float(limits.logit_share[~empty].median()) if bool((~empty).any()) else 0.0,
    )


def _worst(truth: Truth, units: Tensor, got: Tensor, want: Tensor, limit: Tensor) -> Worst:
    if units.numel() == 0:
        return Worst(units=0.0, row=-1, head=-1, column=-1, got=0.0, want=0.0, limit=0.0)
    at = int(units.flatten().argmax())
    columns = units.shape[2] if units.dim() == 3 else 1
    row, rest = divmod(at, units.shape[1] * columns)
    head, column = divmod(rest, columns)
    return Worst(
        units=float(units.flatten()[at]),
        row=int(truth.rows[row]),
        head=head,
        column=column if units.dim() == 3 else -1,
        got=float(got.flatten()[at]),
        want=float(want.flatten()[at]),
        limit=float(limit.flatten()[at]),
    )


def refined(truth: Truth, call: Call, got: Tensor, b: Tensor) -> Tensor:
    """`b` with V2g summed over all ties in the rows that need it: the quick form misses ties of values (numerics.md 2.6).

    Rows that B_det already condemns, and rows far inside the bound, keep what they have.
    """
    err = (got - truth.exact.out).abs()
    per_row = torch.where((err == 0) | truth.exact.empty[:, None, None], 0.0, err / b).amax((1, 2))
    rescuable = (err <= truth.bound.b_det).all(-1).all(-1)
    doubtful = ((per_row > REFINE_ABOVE) & rescuable).nonzero().flatten()
    doubtful = doubtful[torch.argsort(per_row[doubtful], descending=True)][:REFINE_ROWS]
    if not len(doubtful):
        return b
    r = truth.roundoff
    exact = _attend(call, truth.rows[doubtful.cpu()], r, every_tie=True)
    with_ties = b.clone()
    with_ties[doubtful] = torch.maximum(b[doubtful], bound(exact, r, softcap=truth.softcap, head_dim=truth.head_dim).b)
    return with_ties


def _lse(truth: Truth, lse: Tensor | None) -> tuple[Worst | None, float, bool, int]:
    """(worst row, worst under a row sum over rounded P, whether short rows show that sum, empty rows that are wrong)."""
    if lse is None:
        return None, 0.0, False, 0
    x, limits = truth.exact, truth.bound
    got, want = lse.double(), x.lse
    live = (~x.empty)[:, None].expand_as(want)
    sink_only = ~live & torch.isfinite(want)
    limit = torch.where(sink_only, 4 * 2.0**-24 * want.abs() + 2.0**-149, limits.b_lse)
    err = torch.where(torch.isfinite(got), (got - want).abs(), math.inf)
    counted = live | sink_only
    units = torch.where(counted, err / limit, 0.0)
    after = torch.where(live, err / limits.b_lse_after, torch.where(sink_only, err / limit, 0.0))
    wrong = int((~live & ~sink_only & ~(got == want)).any(1).sum())
    shown = live & torch.isfinite(x.lse_after)
    residual = (got - x.lse_after).abs()
    telling = shown & ((x.lse_after - want).abs() > 2 * limits.b_lse)  # rows where the two sums differ visibly
    agree = residual[telling] <= limits.b_lse[telling]
    fits = bool(agree.numel() >= 20 and float(agree.double().mean()) > 0.9)
    return _worst(truth, units, got, want, limit), float(after.max()) if after.numel() else 0.0, fits, wrong


def _sums(truth: Truth, out: Tensor, counted: Tensor) -> dict[str, Sums]:
    """Per direction, the sums over rows.  err' leaves out the rounding of the exact value to the output's format.

    Unless that rounding would bias a correct kernel: halfway between two outputs, as v of few bits under a scale lies, the
    exact value is rounded one way and the kernel's either way.  And where all keys have one v that is no output, a whole row,
    head or case shares one rounding, so its size is no evidence of anything: such elements do not count.
    """
    x, b = truth.exact, truth.bound.b
    low, nearest, high = ((x.out * factor).to(out.dtype).double() for factor in (1 - NEAR_TIE, 1.0, 1 + NEAR_TIE))
    counted = counted & ((x.spread > ONE_V * x.out.abs()) | (nearest == x.out)) & ~_narrow(truth).unsqueeze(-1)
    err = torch.where(counted, out.double() - torch.where(low == high, nearest, x.out), 0.0)
    inverse = torch.where(counted & (b > 0), 1.0 / b, 0.0)
    scaled = err * inverse
    steepness = torch.where(x.deviation > 0, 1.0 / x.deviation, 0.0)
    rms = x.s2 / x.mass.clamp(min=1e-300).sqrt()
    beside = (1 - x.mass).clamp(min=0.0)  # of the output: what a shift of all logits moves it by, a nat, beside a sink
    sums = {}
    for name, g in (("gain", x.out), ("temperature", x.slope), ("bias", b)):
        weight = g * inverse
        a, bb = (scaled * weight).sum(-1), (weight * weight).sum(-1)
        shifted = beside * (x.out * inverse * weight).abs().sum(-1)
        sums[name] = Sums(
            a=float(a.sum()),
            b=float(bb.sum()),
            aa=float((a * a).sum()),
            ab=float((a * bb).sum()),
            bb=float((bb * bb).sum()),
            elements=int(counted.sum()),
            narrow=float((bb * steepness).sum()),
            level=float((bb * steepness * rms if name == "temperature" else rms * shifted).sum()),
            weight=float(shifted.sum()),
        )
    return sums


def _narrow(truth: Truth) -> Tensor:
    """Rows (R, q_heads) of several keys that lie closer together than P's format tells apart: right under the row's maximum, all
    their P round up, in this row and in every other."""
    x = truth.exact
    return (x.within < truth.roundoff.u_p) & (x.p2 < 0.99 * x.mass)


def slope(sums: Sums) -> Slope:
    """The slope of pooled sums: beta = sum a / sum b, SE^2 = sum (a_r - beta b_r)^2 / (sum b)^2 (numerics.md 4.2)."""
    strength = math.sqrt(sums.b / max(1, sums.elements))  # rms(g / B)
    if not strength > WEAKEST:
        return Slope(beta=0.0, z=0.0, effect=0.0, rows=0.0)
    beta = sums.a / sums.b
    variance = max(0.0, sums.aa - 2 * beta * sums.ab + beta * beta * sums.bb)
    error = max(math.sqrt(variance) / sums.b, 1e-300)
    return Slope(
        beta=beta,
        z=beta / error if beta else 0.0,
        effect=abs(beta) * strength,
        rows=sums.b * sums.b / sums.bb,
    )
