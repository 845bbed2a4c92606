"""The error bound: how far from the exact answer a kernel of a given arithmetic may land, element by element.

docs/numerics.md, section 2, derives every term.  B holds with overwhelming probability for natural inputs and is what `e`
is measured in; B_det is a theorem for any input, order, tile size and split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.contract import Precision
from oracle.formats import FORMATS, U32
from oracle.references.attention import Exact

TILE = 64  # keys between two rescales of the running output, for counting them
MMA = 16  # products that one tensor-core instruction adds at once
TRUNCATIONS = 3.25  # places of a float32 accumulator that 16 products cost where one addend outweighs them (numerics.md 2.2)
TRUNCATIONS_FP22 = 8.5  # the same of an FP22 accumulator, which has no guard bits
U_FP22 = 2.0**-13
WORST_CHAIN = 1.13  # truncations per product where every addend is aligned and truncated (numerics.md 2.2)
LAMBDA = 3.0  # standard deviations of P's rounding error times 0.4247: one in 5e11 elements beyond (numerics.md 2.4)
QUANTISED = 6.0  # standard deviations of a logit's quantisation error: one in 5e8 rows beyond (numerics.md 2.8)
LIFTED = 10.0  # nats by which a pair of weights may part before the spread of v under p says too little
UNSEEN = 1e-280  # weight of all keys beside a sink below which their moments underflow float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Roundoff:
    """The constants of the bound: a promised `Precision` on given formats of q, of the output and of P."""

    u_out: float  # rounding of the output
    a_out: float  # absolute error of an output under the smallest normal
    u_p: float  # rounding of P before P.V
    a_p: float  # absolute error of a P under the smallest normal, largest P = 1
    p_step: float  # step of an integer P, largest P = 1; 0 where P is floating point
    u_product: float  # rounding of one product: 0 where both factors have 16 bits or fewer
    u_acc: float
    truncations: float  # places of a sum that adding 16 products to it costs
    eps_exp: float
    eps_tanh: float
    u_qk: float  # relative error of q and k quantised to a floating-point format inside the kernel, else 0
    qk_step: float  # largest step of q and k quantised inside, in units of the magnitude that sets their scale, else 0
    qk_block: int  # tokens of k (and rows of q) that share that scale
    u_v: float  # relative error of v quantised inside the kernel, else 0
    a_v: float  # its absolute error under the smallest normal, in units of the magnitude that sets the scale
    scales: int  # roundings that folding dequantisation scales into the logits adds
    sum_after: bool  # the row sum is taken over rounded P
    smooth_k: bool


def roundoff(precision: Precision, *, dtype: str, out_dtype: str, scaled: bool) -> Roundoff:
    """The constants for a kernel that promises `precision` on q of format `dtype`, giving `out_dtype`.

    `scaled` says that dequantisation scales are folded in.
    """
    out = FORMATS[out_dtype]
    p_name = dtype if precision.p_format == "input" else precision.p_format
    integer_p = p_name == "int8"
    p = FORMATS["fp32" if integer_p else p_name]
    a_p = p.smallest_normal if precision.flush_to_zero else p.smallest_subnormal / 2
    qk, v = precision.qk_format, precision.v_format
    return Roundoff(
        u_out=out.u,
        a_out=out.smallest_normal if precision.flush_to_zero else out.smallest_subnormal / 2,
        u_p=0.0 if integer_p else p.u,
        a_p=a_p / precision.p_scale,
        p_step=1 / 127 if integer_p else 0.0,
        u_product=U32 if dtype == "fp32" else 0.0,
        u_acc=precision.u_acc,
        truncations=TRUNCATIONS_FP22 if precision.u_acc >= U_FP22 else TRUNCATIONS,
        eps_exp=precision.eps_exp,
        eps_tanh=precision.eps_tanh,
        u_qk=FORMATS[qk].u if qk not in (None, "int8") else 0.0,
        qk_step=_subnormal_step(qk) if qk not in (None, "int8") else 1 / 127 if qk else 0.0,
        qk_block=precision.qk_block,
        u_v=FORMATS[v].u if v else 0.0,
        a_v=_subnormal_step(v) / 2 if v else 0.0,
        scales=2 if scaled else 0,
        sum_after=precision.row_sum == "after",
        smooth_k=precision.smooth_k,
    )


def _subnormal_step(format_name: str) -> float:
    """The step of a floating-point format's subnormals, its largest number being 1."""
    return FORMATS[format_name].smallest_subnormal / FORMATS[format_name].largest


def tie_width(r: Roundoff) -> float:
    """The unit roundoff by which equal weights are told apart."""
    return max(r.u_p, r.u_v, FORMATS["e4m3"].u if r.p_step else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Limits in the units of the output and of the LSE.  Rows without keys have 0: they are compared exactly."""

    b: Tensor  # (R, q_heads, head_dim_v): B, for natural inputs
    b_det: Tensor  # (R, q_heads, head_dim_v): worst case
    b_lse: Tensor  # (R, q_heads), row sum as promised
    b_lse_after: Tensor  # (R, q_heads), row sum over rounded P: accepted where undeclared, and said
    b_lse_det: Tensor  # (R, q_heads): worst case
    logit_share: Tensor  # (R, q_heads): share of B that the logits' error takes, median over the row


def bound(x: Exact, r: Roundoff, *, softcap: bool, head_dim: int) -> Bound:
    """B, B_det, B_lse of numerics.md 2.3 to 2.5 for the rows of `x`; `softcap` says whether logits were capped."""
    keys = x.keys.to(x.out.device)
    tanh = r.eps_tanh if softcap else 0.0
    n, n_row = keys[:, None, None], keys[:, None]
    out = x.out.abs()
    chain = r.truncations * head_dim / MMA + 2
    worst = WORST_CHAIN * head_dim
    linear = (3 + r.scales) * U32
    relative = QUANTISED * 0.4247 * 2**0.5 * r.u_qk
    uniform, quantised_worst = _quantised(r, head_dim, x.a2, x.k_peak, x.q_peak)
    uniform_top, worst_top = _quantised(r, head_dim, x.a_max, x.k_peak_max, x.q_peak_max)
    quantised, quantised_top = relative * x.b2 + uniform, relative * x.b_max + uniform_top
    u_acc_qk = 0.0 if r.qk_step and not r.u_qk else r.u_acc  # int8 products add up exactly in int32

    def logits(kappa: float, a: Tensor, g: Tensor, s: Tensor) -> Tensor:
        return (kappa * u_acc_qk + r.u_product) * a + linear * g + tanh * s

    shift = 4 * U32 * x.s_max  # moves all keys of a tile alike
    eta_worst = logits(worst, x.a2, x.g2, x.s2) + quantised_worst
    tops = (x.a_max, x.s_range, x.s_max)
    mass = x.mass.clamp(1e-300, 1.0)
    # beside a sink that leaves the keys no weight in float64, their moments are 0 and say nothing: there the largest error counts
    unseen = x.mass < UNSEEN

    def moved(eta: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """What logit errors of RMS `eta` move the output by, and the factor of second order, `largest` bounding them all."""
        exponent = 2 * (largest + shift)
        growth = torch.exp(exponent.clamp(max=100.0)).unsqueeze(-1)
        # the moments inside eta carry sqrt(sum p) of the keys already; a shift does not, and beside a sink sum p is small
        first = eta.unsqueeze(-1) * x.spread + shift.unsqueeze(-1) * torch.minimum(x.spread, x.v1 + out)
        # errors of several nats lift weights that float64 does not show in the spread: as far as the second key is close
        lifted = torch.exp((exponent + torch.log(n_row.clamp(min=1.0)) - x.gap).clamp(max=0.0)) * (exponent > LIFTED)
        return torch.minimum(torch.maximum(growth * first, 2 * x.v_max * lifted.unsqueeze(-1)), 2 * x.v_max), growth

    inverse_l = torch.exp(-(x.lse - x.top)).masked_fill(x.empty[:, None], 0.0).unsqueeze(-1)
    integer = r.p_step * inverse_l
    rest = r.u_product + 2 * r.eps_exp
    # keys of a bin round alike, but for the two sides of a midpoint: where their v cancel, that difference is what is left
    v2, v1 = torch.maximum(x.v2g, x.v2), x.v1
    if r.sum_after:  # P's rounding moves the row sum too: it acts through v - out, over a sum that may be less by u_p
        v2 = (v2**2 + (out * x.p2g.unsqueeze(-1)) ** 2).sqrt() / (1 - r.u_p)
        v1 = (v1 + out) / (1 - r.u_p)
    p_likely = LAMBDA * (((r.u_p**2 + r.u_v**2) ** 0.5 + rest) * v2 + integer * (n / 12).sqrt() * x.v_max)
    p_worst = (r.u_p + r.u_v + r.u_p * r.u_v + rest) * v1 + integer / 2 * n * x.v_max
    accumulated = WORST_CHAIN * n + 2 * torch.ceil(n / TILE) + 4
    steps = r.truncations * n / MMA + 2 * torch.ceil(n / TILE)
    # an accumulator has the subnormals of fp32 whatever the format of P, and v_scale may multiply what it holds
    underflow = FORMATS["fp32"].smallest_subnormal / 2 * x.v_scale.unsqueeze(-1)
    lost = r.a_p * n * inverse_l * r.sum_after  # of the row sum, where it takes P that underflowed
    absolute = r.a_p * x.w1 + lost * out + r.a_v * x.v_peak.unsqueeze(-1) + r.a_out
    absolute_worst = absolute + underflow * accumulated
    absolute = absolute + underflow * (LAMBDA * (n / 3).sqrt() + 4)  # n uniform roundings
    value_scale = U32 * (r.scales > 0) * out

    # beside a sink a moment under p carries sqrt(mass) of the keys
    top = logits(chain, *tops) + torch.where(unseen, quantised_top, quantised / mass.sqrt())
    spread_likely, _ = moved(logits(chain, x.a2, x.g2, x.s2) + quantised, top)
    farthest = (x.a_max / x.a2.clamp(min=1e-300)).clamp(1.0, 1e6)  # quantised_worst is a moment under p, this of all keys
    most = logits(worst, *tops) + torch.where(unseen, worst_top, quantised_worst * farthest)
    spread_worst, growth = moved(eta_worst, most)

    def lifted_lse(eta: Tensor) -> Tensor:
        """How far the unseen keys of such a row, each off by at most `eta`, can lift its LSE."""
        log_keys = torch.log(n_row.clamp(min=1.0)) - x.gap + eta
        return torch.logaddexp(torch.zeros_like(eta), log_keys) * unseen

    b = (1 + 2 * r.u_out) * (
        r.u_out * out
        + torch.minimum(p_likely, p_worst)
        + spread_likely
        + steps * r.u_acc * torch.minimum(x.prefix, x.v1)
        + 4 * r.u_acc * x.v1
        + (6 * n.sqrt() + 8) * U32 * out
        + value_scale
        + absolute
    )
    b_det = (1 + 2 * r.u_out) * (
        r.u_out * out
        + spread_worst
        + growth * (p_worst + accumulated * r.u_acc * x.v1 + (n + 8) * U32 * out + value_scale + absolute_worst)
    )
    lse_size = x.lse.abs().masked_fill(x.empty[:, None], 0.0)
    tail = 3 * U32 * (lse_size + x.s_max) + 2.0**-149
    # without guard bits every product may lose its last bits: half a place of the running sum each, which is half of s on its
    # way, or all of it where the first product outweighs the rest; and a row of one key averages over nothing but them
    one_sided = r.truncations * head_dim / MMA if r.truncations > TRUNCATIONS else worst / 4
    likely = u_acc_qk * (3 * worst**0.5 * x.b1 + one_sided * x.s1)
    likely = likely + 3 * r.u_product * x.b1 + linear * x.g1 + 4 * U32 * x.s_max
    of_keys = relative * x.b1 / mass + uniform / mass.sqrt()
    quantised_lse = torch.logaddexp(torch.log1p(-mass), torch.log(mass) + of_keys)  # beside a sink; of_keys without
    likely = likely + tanh * x.s1 + quantised_lse + lifted_lse(top)
    # exp's error is a smooth function of its argument: near-equal logits share it, and it does not average out
    b_lse = 1.05 * (likely + r.eps_exp + 6 * n_row.sqrt() * U32 + tail)
    after = 3 * r.u_p * x.p2g + (r.a_p * n * inverse_l + 3 * integer * (n / 12).sqrt()).squeeze(-1)
    b_lse_det = 1.05 * (eta_worst + lifted_lse(most) + shift + r.eps_exp + n_row * U32 + tail)
    b_lse_det = b_lse_det + 1.05 * r.sum_after * (r.u_p + (n * (r.a_p * inverse_l + integer / 2)).squeeze(-1))
    dead = x.empty
    return Bound(
        b=b.masked_fill(dead[:, None, None], 0.0),
        b_det=torch.maximum(b_det, b).masked_fill(dead[:, None, None], 0.0),
        b_lse=(b_lse + 1.05 * after if r.sum_after else b_lse).masked_fill(dead[:, None], 0.0),
        b_lse_after=(b_lse + 1.05 * after).masked_fill(dead[:, None], 0.0),
        b_lse_det=torch.maximum(b_lse_det, b_lse).masked_fill(dead[:, None], 0.0),
        logit_share=(spread_likely / b).median(-1).values.nan_to_num(0.0),
    )


def _quantised(r: Roundoff, head_dim: int, a: Tensor, k_peak: Tensor, q_peak: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits whose q and k are quantised inside, by a_j and the peaks that set the scales, as moments under p or of a key:
    QUANTISED standard deviations of what the integer steps make, and the most that the whole error can be."""
    both = k_peak * q_peak / a.clamp(min=1e-300)  # q's error times k's
    step, root = r.qk_step, head_dim**0.5
    uniform = step / 12**0.5 * (k_peak**2 + q_peak**2 + (step / 12**0.5 * root * both) ** 2).sqrt()
    worst = (2 + r.u_qk) * r.u_qk * a + step / 2 * root * (k_peak + q_peak + step / 2 * root * both)
    return QUANTISED * uniform, worst
