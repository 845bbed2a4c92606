"""The operations of an emulated kernel, each as the hardware would round it.

The operands of matrix products are float64 tensors of float32 values: a sum of products of 8 or 16-bit operands is exact before
it is rounded, unless its terms are more than about 2^28 apart, so the order in which BLAS adds does not show.  A function rounded
from float64 to float32 is correctly rounded but for one argument in about 2^29.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oracle.references.arithmetic import Accumulator, Arithmetic
from oracle.references.rounding import flush_to_zero, round_to, truncate_to_bf16, truncate_to_fp22, truncate_to_fp32

_SMALLEST_EXPONENT = -126  # of a normal float32
_IN_HAND = 2**17  # products that a core's cache holds, with what is made of them
_POLY3 = (1.0, 0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625)  # numerics.md 1


def accumulate(acc: Tensor, a: Tensor, b: Tensor, kind: Accumulator, arithmetic: Arithmetic) -> Tensor:
    """`acc + a @ b`, float32, as the accumulator `kind` makes it (see `Arithmetic`).

    Shapes: acc (batch, M, N) of float32 values, a (batch, M, K) and b (batch, K, N) float64.
    """
    if kind == "aligned":
        width = arithmetic.aligned_width
        for k in range(0, a.shape[-1], width):
            acc = _aligned_sum(acc, a[..., k : k + width], b[:, k : k + width], arithmetic.aligned_guard)
        return acc
    terms, round_sum = _ACCUMULATORS[kind]
    width = terms or a.shape[-1]
    for k in range(0, a.shape[-1], width):
        acc = round_sum(acc.to(torch.float64, copy=True).baddbmm_(a[..., k : k + width], b[:, k : k + width]))
    return acc


def _aligned_sum(acc: Tensor, a: Tensor, b: Tensor, guard: int) -> Tensor:
    """`acc + a @ b`, float32, all addends cut to multiples of the last place of the largest, `guard` bits below float32's."""
    batch, rows, width = a.shape
    few = max(1, _IN_HAND // (width * b.shape[-1]))  # rows at a time
    step = max(1, few // max(1, rows))  # and batches, where these are small
    out = torch.empty_like(acc, dtype=torch.float32)
    for i in range(0, batch, step):
        here = slice(i, i + step)
        for j in range(0, rows, few):
            part = (here, slice(j, j + few))
            out[part] = _aligned_part(acc[part], a[part], b[here], guard)
    return out


def _aligned_part(acc: Tensor, a: Tensor, b: Tensor, guard: int) -> Tensor:
    acc = acc.double()
    products = a[..., None] * b[:, None]  # (batch, M, K, N)
    largest = torch.maximum(torch.maximum(products.amax(2), products.amin(2).neg_()), acc.abs())
    last = _exponent(largest).clamp_(min=_SMALLEST_EXPONENT).sub_(23 + guard)  # place
    places = _power_of_two(-last)  # in 1
    cut = products.mul_(places[:, :, None]).to(torch.int32)  # toward zero; Arithmetic sees to it that their sum fits
    total = (acc * places).trunc_().add_(cut.sum(2, dtype=torch.int32))
    result = truncate_to_fp32(total.mul_(_power_of_two(last)))
    if math.isfinite(float(largest.amax())):
        return result
    return torch.where(largest.isfinite(), result, torch.baddbmm(acc, a, b).float())


def _exponent(x: Tensor) -> Tensor:
    """The e of 2^e <= x < 2^(e + 1), int64; x float64, positive and normal.  -1023 for 0, and anything for NaN."""
    return (x.view(torch.int64) >> 52).sub_(1023)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float64, exactly; the exponent int64, of a normal number."""
    return ((exponent + 1023) << 52).view(torch.float64)


# products added before the sum is rounded (None = all of them), and the rounding
_ACCUMULATORS: dict[Accumulator, tuple[int | None, Callable[[Tensor], Tensor]]] = {
    "rn": (None, lambda x: x.to(torch.float32)),
    "rz16": (16, truncate_to_fp32),
    "bf16": (None, lambda x: round_to(x.to(torch.float32), "bf16")),
    "fp22": (32, lambda x: truncate_to_fp22(x.to(torch.float32))),
}


def tree_sum(x: Tensor) -> Tensor:
    """The float32 sum of `x` (..., 2^n) over its last axis, by halves: the same additions whatever the shape of the rest."""
    while x.shape[-1] > 1:
        low, high = x.chunk(2, -1)
        x = low + high
    return x.squeeze(-1)


def exp2(x: Tensor, variant: str) -> Tensor:
    """2^x of a tensor of float32 values, as float32: "exact" correctly rounded, "poly3" FlashAttention-4's
    polynomial (section 1; results below 2^-126 are 0), "error-1e-3" off by a wave of that relative height."""
    if variant == "poly3":
        return _exp2_poly3(x.to(torch.float32))
    x = x.double()
    result = torch.exp2(x)
    if variant == "error-1e-3":
        part = (x - x.floor()).nan_to_num(0.0)  # of -inf: the result is 0 anyway
        result = result * (1 + 1e-3 * torch.sin(6 * math.pi * part))
    return result.to(torch.float32)


def _exp2_poly3(x: Tensor) -> Tensor:
    x = x.clamp(-127.0, 128.0)
    whole = x.floor()
    part = x - whole
    c0, c1, c2, c3 = _POLY3
    mantissa = ((c3 * part + c2) * part + c1) * part + c0
    return mantissa * ((whole.to(torch.int32) + 127) << 23).view(torch.float32)


def tanh(x: Tensor, variant: str) -> Tensor:
    """tanh of a tensor of float32 values, as float32: "exact" correctly rounded, "approx" off by up to 2^-11, relative, always
    the same for the same argument."""
    y = torch.tanh(x.double())
    return (y * (1 + 2.0**-11 * torch.sin(997.0 * y)) if variant == "approx" else y).to(torch.float32)


def round_p(p: Tensor, format_name: str, scale: float) -> Tensor:
    """float32 P, times `scale`, rounded to the format and divided by `scale` again; float32."""
    if format_name == "fp32":
        return p
    scaled = p * scale
    if format_name == "bf16-truncated":
        return truncate_to_bf16(scaled) / scale
    if format_name == "fp16-flushed":
        return flush_to_zero(round_to(scaled, "fp16"), "fp16") / scale
    return round_to(scaled, format_name) / scale
