"""How a tensor core adds products to an accumulator, as ci/gpu/calibrate.py finds it: a model that is exact to the bit.

The products of a group and the accumulator are cut, toward zero, to multiples of 2^(E - fraction_bits), E being the largest
exponent among them, and added exactly; the sum is cut to a number of `result_bits` fraction bits.  Then comes the next group.
Needs torch alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Group = tuple[int, ...]  # positions of a contraction that are added at once
NOTHING = -(10**4)  # below every exponent: what 0 has for one


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The arithmetic of one instruction on one input format."""

    groups: tuple[Group, ...]  # in the order in which they are added
    fraction_bits: int  # kept below the largest exponent; 23 would be float32's own
    result_bits: int  # fraction bits of a sum
    of_factors: bool  # a product's exponent is the sum of its factors' (2.25 = 1.5 x 1.5 has 0), else that of its value
    smallest: int | None  # a subnormal factor has this exponent; None where it has that of its leading bit
    lowest: int  # the least exponent that products are aligned to; an accumulator other than 0 has -126 or more
    apart: int | None  # so many positions are summed from 0, and the sum is added to the accumulator as float32 adds


def exponents(x: Tensor) -> Tensor:
    """floor(log2 |x|) of a float64 tensor, int32; NOTHING for 0."""
    return torch.where(x == 0, NOTHING, torch.frexp(x).exponent - 1)


def power(e: Tensor) -> Tensor:
    """2^e in float64, exactly, for the integers of a normal result."""
    return ((e.to(torch.int64) + 1023) << 52).view(torch.float64)


def add_products(core: Core, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """c + a @ b^T as the core makes it.

    Shapes: a (P, M, K), b (P, N, K), c and the result (P, M, N); float64 tensors of values of the formats.
    """
    if core.apart is None:
        return _chain(core, core.groups, a, b, c)
    for start in range(0, a.shape[-1], core.apart):
        inside = tuple(g for g in core.groups if g[0] // core.apart == start // core.apart)
        c = (c + _chain(core, inside, a, b, torch.zeros_like(c))).float().double()
    return c


def _chain(core: Core, groups: tuple[Group, ...], a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    for group in groups:
        x, y = a[..., None, list(group)], b[:, None, :, list(group)]
        products = x * y
        if core.of_factors:
            e_x, e_y = exponents(x), exponents(y)
            if core.smallest is not None:
                e_x, e_y = (torch.where(e > NOTHING, e.clamp(min=core.smallest), e) for e in (e_x, e_y))
            exponent = torch.where(products == 0, NOTHING, e_x + e_y)
        else:
            exponent = exponents(products)
        own = torch.where(c == 0, NOTHING, exponents(c).clamp(min=-126))
        place = power(torch.maximum(exponent.amax(-1), own).clamp(min=core.lowest) - core.fraction_bits)
        c = _cut(((c / place).trunc() + (products / place[..., None]).trunc().sum(-1)) * place, core.result_bits)
    return c


def _cut(x: Tensor, bits: int) -> Tensor:
    """x toward zero to a number of so many fraction bits and float32's exponents; what is too large becomes infinite."""
    e = exponents(x).clamp(min=-126)
    place = power(e - bits)
    return torch.where(e > 127, x * torch.inf, (x / place).trunc() * place)
