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
WORST_CHAIN = 1.13  # truncations per product where every addend is aligned and truncated (numerics.md 2.2)
LAMBDA = 3.0  # standard deviations of P's rounding error times 0.4247: one in 1e10 elements beyond (numerics.md 2.4)
QUANTISED = 2.2  # standard deviations of a logit's quantisation error (numerics.md 2.8)


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
    eps_exp: float
    eps_tanh: float
    u_qk: float  # relative error of q and k quantised to a floating-point format inside the kernel, else 0
    qk_step: float  # step of q and k quantised to integers, in units of their largest magnitude, else 0
    u_v: float  # relative error of v quantised inside the kernel, else 0
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
    qk = precision.qk_format
    return Roundoff(
        u_out=out.u,
        a_out=out.smallest_normal if precision.flush_to_zero else out.smallest_subnormal / 2,
        u_p=0.0 if integer_p else p.u,
        a_p=a_p / precision.p_scale,
        p_step=1 / 127 if integer_p else 0.0,
        u_product=U32 if dtype == "fp32" else 0.0,
        u_acc=precision.u_acc,
        eps_exp=precision.eps_exp,
        eps_tanh=precision.eps_tanh,
        u_qk=FORMATS[qk].u if qk not in (None, "int8") else 0.0,
        qk_step=1 / 127 if qk == "int8" else 0.0,
        u_v=FORMATS[precision.v_format].u if precision.v_format else 0.0,
        scales=2 if scaled else 0,
        sum_after=precision.row_sum == "after",
        smooth_k=precision.smooth_k,
    )


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
    chain = head_dim / MMA + 2
    worst = WORST_CHAIN * head_dim
    linear = (3 + r.scales) * U32
    quantised = QUANTISED * (0.4247 * 2**0.5 * r.u_qk * x.b1 + r.qk_step / 12**0.5 * (x.k_peak**2 + x.q_peak**2).sqrt())
    u_acc_qk = 0.0 if r.qk_step else r.u_acc  # int8 products add up exactly in int32

    def logits(kappa: float, a: Tensor, g: Tensor, s: Tensor) -> Tensor:
        return (kappa * u_acc_qk + r.u_product) * a + linear * g + tanh * s + quantised

    shift = 4 * U32 * x.s_max  # moves all keys of a tile alike
    eta_worst = logits(worst, x.a2, x.g2, x.s2)
    eta_max = logits(worst, x.a_max, x.s_range, x.s_max) + shift
    growth = torch.exp(2 * eta_max.clamp(max=1.0)).unsqueeze(-1)

    def spread(eta: Tensor) -> Tensor:
        # the moments inside eta carry sqrt(sum p) of the keys already; a shift does not, and beside a sink sum p is small
        moved = eta.unsqueeze(-1) * x.spread + shift.unsqueeze(-1) * torch.minimum(x.spread, x.v1 + out)
        return torch.minimum(growth * moved, 2 * x.v_max)

    u_numerator = (r.u_p**2 + r.u_v**2) ** 0.5 + r.u_product + 2 * r.eps_exp
    inverse_l = torch.exp(-(x.lse - x.top)).masked_fill(x.empty[:, None], 0.0).unsqueeze(-1)
    integer = r.p_step * inverse_l
    p_likely = LAMBDA * (u_numerator * x.v2g + integer * (n / 12).sqrt() * x.v_max)
    p_worst = u_numerator * x.v1 + integer / 2 * n * x.v_max
    accumulated = WORST_CHAIN * n + 2 * torch.ceil(n / TILE) + 4
    steps = n / MMA + 2 * torch.ceil(n / TILE)
    # an accumulator has the subnormals of fp32 whatever the format of P, and v_scale may multiply what it holds
    underflow = FORMATS["fp32"].smallest_subnormal / 2 * x.v_scale.unsqueeze(-1)
    absolute = r.a_p * x.w1 + r.a_out + underflow * (LAMBDA * (n / 3).sqrt() + 4)  # n uniform roundings
    absolute_worst = r.a_p * x.w1 + r.a_out + underflow * accumulated
    value_scale = U32 * (r.scales > 0) * out

    spread_likely = spread(logits(chain, x.a2, x.g2, x.s2))
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
        + spread(eta_worst)
        + growth * (p_worst + accumulated * r.u_acc * x.v1 + (n + 8) * U32 * out + value_scale + absolute_worst)
    )
    lse_size = x.lse.abs().masked_fill(x.empty[:, None], 0.0)
    tail = 3 * U32 * (lse_size + x.s_max) + 2.0**-149
    likely = chain**0.5 * u_acc_qk * (3 * x.b1 + x.s1) + 3 * r.u_product * x.b1 + linear * x.g1 + 4 * U32 * x.s_max
    likely = likely + tanh * x.s1 + quantised
    # exp's error is a smooth function of its argument: near-equal logits share it, and it does not average out
    b_lse = 1.05 * (likely + r.eps_exp + 6 * n_row.sqrt() * U32 + tail)
    after = 1.05 * (3 * r.u_p * x.p2g + integer.squeeze(-1) * 3 * (n_row / 12).sqrt())
    b_lse_det = 1.05 * (eta_worst + shift + r.eps_exp + n_row * U32 + tail)
    b_lse_det = b_lse_det + 1.05 * r.sum_after * (r.u_p + integer.squeeze(-1) / 2 * n_row)
    dead = x.empty
    return Bound(
        b=b.masked_fill(dead[:, None, None], 0.0),
        b_det=torch.maximum(b_det, b).masked_fill(dead[:, None, None], 0.0),
        b_lse=(b_lse + after if r.sum_after else b_lse).masked_fill(dead[:, None], 0.0),
        b_lse_after=(b_lse + after).masked_fill(dead[:, None], 0.0),
        b_lse_det=torch.maximum(b_lse_det, b_lse).masked_fill(dead[:, None], 0.0),
        logit_share=(spread_likely / b).median(-1).values.nan_to_num(0.0),
    )
