"""The error bound: how far from the exact answer a kernel of a given arithmetic may land, element by element.

docs/numerics.md, section 2, derives every term.  B holds with overwhelming probability for natural inputs and is what `e`
is measured in; B_det is a theorem for any input, order, tile size and split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.formats import FORMATS, U32
from oracle.references.attention import Exact
from oracle.references.logits import lifted_lse, logit_errors, moved
from oracle.references.roundoff import MMA, WORST_CHAIN, Roundoff

TILE = 64  # keys between two rescales of the running output, for counting them
LAMBDA = 3.0  # standard deviations of P's rounding error times 0.4247: one in 5e11 elements beyond (numerics.md 2.4)


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
    n, n_row = keys[:, None, None], keys[:, None]
    out = x.out.abs()
    logits = logit_errors(x, r, softcap=softcap, head_dim=head_dim)
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

    spread_likely, _ = moved(x, logits.likely, logits.largest, logits.shift)
    spread_worst, growth = moved(x, logits.worst, logits.worst_largest, logits.shift)
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
    # exp's error is a smooth function of its argument: near-equal logits share it, and it does not average out
    b_lse = 1.05 * (logits.lse + lifted_lse(x, logits.largest) + r.eps_exp + 6 * n_row.sqrt() * U32 + tail)
    after = 3 * r.u_p * x.p2g + (r.a_p * n * inverse_l + 3 * integer * (n / 12).sqrt()).squeeze(-1)
    b_lse_det = 1.05 * (logits.worst + lifted_lse(x, logits.worst_largest) + logits.shift + r.eps_exp + n_row * U32 + tail)
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
