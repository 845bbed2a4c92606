"""What the errors of the logits amount to: of products and sums, scaling, softcap, and quantisation inside a kernel.

docs/numerics.md, sections 2.3 and 2.8, derives every term.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.formats import U32
from oracle.references.attention import Exact
from oracle.references.roundoff import MMA, TRUNCATIONS, WORST_CHAIN, Roundoff

QUANTISED = 6.0  # standard deviations of a logit's quantisation error: one in 5e8 rows beyond (numerics.md 2.8)
LIFTED = 10.0  # nats by which a pair of weights may part before the spread of v under p says too little
UNSEEN = 1e-280  # weight of all keys beside a sink below which their moments underflow float64


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitErrors:
    """Errors of the logits of each row, in nats, (R, q_heads).

    Moments are root mean squares under p, the sink's logit exact.
    """

    likely: Tensor  # their moment, for natural inputs
    largest: Tensor  # what no key of the row exceeds, for natural inputs
    worst: Tensor  # the moment at worst
    worst_largest: Tensor
    shift: Tensor  # what moves all keys of a tile alike
    lse: Tensor  # what they move the LSE by, for natural inputs, all keys being seen


def logit_errors(x: Exact, r: Roundoff, *, softcap: bool, head_dim: int) -> LogitErrors:
    """The errors of the logits of the rows of `x` under the constants `r`; `softcap` says whether logits were capped."""
    tanh = r.eps_tanh if softcap else 0.0
    chain = r.truncations * head_dim / MMA + 2
    worst = WORST_CHAIN * head_dim
    linear = (3 + r.scales) * U32
    relative = QUANTISED * 0.4247 * 2**0.5 * r.u_qk
    uniform, quantised_worst = _quantised(r, head_dim, x.a2, x.k_peak, x.q_peak)
    uniform_top, worst_top = _quantised(r, head_dim, x.a_max, x.k_peak_max, x.q_peak_max)
    quantised, quantised_top = relative * x.b2 + uniform, relative * x.b_max + uniform_top
    u_acc = 0.0 if r.qk_step and not r.u_qk else r.u_acc  # int8 products add up exactly in int32

    def rounded(kappa: float, a: Tensor, g: Tensor, s: Tensor) -> Tensor:
        return (kappa * u_acc + r.u_product) * a + linear * g + tanh * s

    eta_worst = rounded(worst, x.a2, x.g2, x.s2) + quantised_worst
    tops = (x.a_max, x.s_range, x.s_max)
    # beside a sink a moment under p carries sqrt(mass) of the keys
    mass = x.mass.clamp(1e-300, 1.0)
    seen = ~unseen(x)
    farthest = (x.a_max / x.a2.clamp(min=1e-300)).clamp(1.0, 1e6)  # quantised_worst is a moment under p, this of all keys

    # without guard bits every product may lose its last bits: half a place of the running sum each, which is half of s on its
    # way, or all of it where the first product outweighs the rest; and a row of one key averages over nothing but them
    one_sided = r.truncations * head_dim / MMA if r.truncations > TRUNCATIONS else worst / 4
    lse = u_acc * (3 * worst**0.5 * x.b1 + one_sided * x.s1)
    lse = lse + 3 * r.u_product * x.b1 + linear * x.g1 + 4 * U32 * x.s_max
    of_keys = relative * x.b1 / mass + uniform / mass.sqrt()
    quantised_lse = torch.logaddexp(torch.log1p(-mass), torch.log(mass) + of_keys)  # beside a sink; of_keys without
    return LogitErrors(
        likely=rounded(chain, x.a2, x.g2, x.s2) + quantised,
        largest=rounded(chain, *tops) + torch.where(seen, quantised / mass.sqrt(), quantised_top),
        worst=eta_worst,
        worst_largest=rounded(worst, *tops) + torch.where(seen, quantised_worst * farthest, worst_top),
        shift=4 * U32 * x.s_max,
        lse=lse + tanh * x.s1 + quantised_lse,
    )


def unseen(x: Exact) -> Tensor:
    """Rows beside a sink that leaves the keys no weight in float64, (R, q_heads) bool: their moments are 0 and say nothing."""
    return x.mass < UNSEEN


def moved(x: Exact, moment: Tensor, largest: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """What logit errors of this moment move the output by, and the factor of second order, none of them above `largest`."""
    n_row = x.keys.to(x.out.device)[:, None]
    exponent = 2 * (largest + shift)
    growth = torch.exp(exponent.clamp(max=100.0)).unsqueeze(-1)
    # the moment carries sqrt(sum p) of the keys already; a shift does not, and beside a sink sum p is small
    first = moment.unsqueeze(-1) * x.spread + shift.unsqueeze(-1) * torch.minimum(x.spread, x.v1 + x.out.abs())
    # errors of several nats lift weights that float64 does not show in the spread: as far as the second key is close
    lifted = torch.exp((exponent + torch.log(n_row.clamp(min=1.0)) - x.gap).clamp(max=0.0)) * (exponent > LIFTED)
    return torch.minimum(torch.maximum(growth * first, 2 * x.v_max * lifted.unsqueeze(-1)), 2 * x.v_max), growth


def lifted_lse(x: Exact, largest: Tensor) -> Tensor:
    """How far the keys of the `unseen` rows, each off by at most `largest`, can lift their LSE; 0 in other rows."""
    log_keys = torch.log(x.keys.to(x.out.device)[:, None].clamp(min=1.0)) - x.gap + largest
    return torch.logaddexp(torch.zeros_like(largest), log_keys) * unseen(x)


def _quantised(r: Roundoff, head_dim: int, a: Tensor, k_peak: Tensor, q_peak: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits whose q and k are quantised inside, by a_j and the peaks that set the scales, as moments under p or of a key:
    QUANTISED standard deviations of what the integer steps make, and the most that the whole error can be."""
    both = k_peak * q_peak / a.clamp(min=1e-300)  # q's error times k's
    step, root = r.qk_step, head_dim**0.5
    uniform = step / 12**0.5 * (k_peak**2 + q_peak**2 + (step / 12**0.5 * root * both) ** 2).sqrt()
    worst = (2 + r.u_qk) * r.u_qk * a + step / 2 * root * (k_peak + q_peak + step / 2 * root * both)
    return QUANTISED * uniform, worst
