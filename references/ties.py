"""Keys of equal weight: their rounding errors are equal too, so they add before they are squared.

docs/numerics.md, section 2.6: with P rounded to unit roundoff u_p, keys whose log2(p) round to the same bin of width u_p/8
round alike.  V2g = sqrt(sum over bins (sum p_j v_j)^2) and P2g, the same with v = 1, take the place of V2 and P2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

OCTAVES = 32  # weights under 2^-32 of the heaviest share the last bin: n of them weigh (n 2^-32)^2, nothing beside 1/n
COUNTED = 4  # a table of counts of up to so many bins a key is quicker than sorting the keys
ROWS_COUNTED = 16  # rows counted at once: their table stays in cache
STRUCTURAL = 1.2  # P2g/P2, ties of chance taken off, above which a row's ties are summed with their values


def grouped_norms(
    p: Tensor, log_p: Tensor, u_p: float, p2: Tensor, v2: Tensor, out: Tensor, values: Callable[[int], Tensor], *, every_tie: bool
) -> tuple[Tensor, Tensor]:
    """(P2g (heads, M), V2g (heads, M, dim_v)) of softmax rows p (heads, M, keys).

    `log_p` is ln(p) but for a constant of each row; it is overwritten.  `values(head)` gives v (keys, dim_v) float64.  Where
    the ties are structural (many keys with exactly equal weight) V2g is summed by groups; elsewhere the keys of a bin are
    together by chance, their v - out adds like independent numbers, and V2g^2 = V2^2 + out^2 (P2g^2 - P2^2).
    """
    if p.shape[-1] == 0:
        return p2.clone(), v2.clone()
    # relative to the heaviest key, however much a sink outweighs it, and rounded, so that keys as heavy lie mid-bin
    log_p.sub_(log_p.amax(-1, keepdim=True))
    bins = log_p.mul_(-8.0 / (u_p * math.log(2.0))).round_().clamp_(0.0, OCTAVES * 8.0 / u_p - 1)
    p2g, chance = _grouped_weights(bins, u_p)
    heaviest = p.amax(-1)
    p2g, chance = torch.maximum(p2g * heaviest, p2), chance * heaviest * heaviest
    v2g = (v2 * v2 + out * out * (p2g * p2g - p2 * p2).unsqueeze(-1)).sqrt_()
    structural = p2g * p2g - chance > STRUCTURAL**2 * p2 * p2
    if every_tie:
        structural = torch.ones_like(structural)
    for head in structural.any(1).nonzero().flatten().tolist():
        v = values(head)
        for row in structural[head].nonzero().flatten().tolist():
            v2g[head, row] = _grouped_values(bins[head, row], p[head, row], v)
    return p2g, v2g


def _grouped_weights(bins: Tensor, u_p: float) -> tuple[Tensor, Tensor]:
    """(P2g, what chance alone would add to P2g^2), the heaviest key at 1: sums over bins, and over neighbouring bins.

    In a smooth distribution of weights, two keys share a bin as often as they sit in neighbouring bins.
    """
    rows = bins.flatten(0, 1)
    widest = int(rows.max()) + 1
    squares, neighbours = _by_counting(rows, widest, u_p) if widest <= COUNTED * rows.shape[1] else _by_sorting(rows, u_p)
    return squares.sqrt_().view(bins.shape[:2]), neighbours.view(bins.shape[:2])


def _by_counting(bins: Tensor, widest: int, u_p: float) -> tuple[Tensor, Tensor]:
    """Sums over bins and over neighbouring bins of each row of `bins` (M, keys), from a table of counts: for long rows."""
    weight = torch.exp2(torch.arange(widest, dtype=torch.float64, device=bins.device) * (-u_p / 8.0))
    squares, neighbours = (bins.new_empty(bins.shape[0]) for _ in range(2))
    one = torch.ones(1, dtype=torch.float32, device=bins.device)
    for a in range(0, len(bins), ROWS_COUNTED):
        index = bins[a : a + ROWS_COUNTED].long()
        counts = torch.zeros(len(index), widest, dtype=torch.float32, device=bins.device)
        held = counts.scatter_add_(1, index, one.expand_as(index)).double().mul_(weight)
        squares[a : a + ROWS_COUNTED] = torch.linalg.vecdot(held, held)
        neighbours[a : a + ROWS_COUNTED] = torch.linalg.vecdot(held[:, 1:], held[:, :-1])
    return squares, neighbours


def _by_sorting(bins: Tensor, u_p: float) -> tuple[Tensor, Tensor]:
    """The same from runs of equal bins in sorted rows: for short rows, and for formats with more bins than keys."""
    order = _sorted(bins)
    n = order.shape[-1]
    new = torch.ones_like(order, dtype=torch.bool)
    new[..., 1:] = order[..., 1:] != order[..., :-1]
    flat = new.flatten()
    start = flat.nonzero().flatten()  # every row starts a run, so runs never cross rows
    length = torch.diff(start, append=start.new_tensor([flat.numel()])).double()
    code = order.flatten()[start]
    weight = length * torch.exp2(code.double() * (-u_p / 8.0))
    row = start // n
    sums = weight.new_zeros(len(bins))
    squares = sums.index_add(0, row, weight * weight)
    beside = (code[1:] == code[:-1] + 1) & (row[1:] == row[:-1])
    neighbours = sums.index_add(0, row[1:], torch.where(beside, weight[1:] * weight[:-1], 0.0))
    return squares, neighbours


def _sorted(bins: Tensor) -> Tensor:
    """The bins of each row in ascending order, int64."""
    if bins.device.type != "cpu":
        return torch.sort(bins.long(), dim=-1)[0]
    # numpy sorts without the permutation that torch.sort makes as well, and 16-bit integers by radix: 2 ns a key against 45
    numbers = bins.numpy()
    if numbers.max() < 2**16:
        return torch.from_numpy(np.sort((numbers - 2**15).astype(np.int16), axis=-1, kind="stable")).long() + 2**15
    return torch.from_numpy(np.sort(numbers.astype(np.int32 if numbers.max() < 2**31 else np.int64), axis=-1)).long()


def _grouped_values(bins: Tensor, p: Tensor, v: Tensor) -> Tensor:
    """sqrt(sum over bins (sum p_j v_j)^2), (dim_v,)."""
    group = torch.unique(bins, return_inverse=True)[1]
    sums = v.new_zeros(int(group.max()) + 1, v.shape[1]).index_add_(0, group, p.unsqueeze(-1) * v)
    return sums.square_().sum(0).sqrt_()
