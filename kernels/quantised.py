"""8-bit values: the scales and the codes of int8 and E4M3 quantisation, bit for bit, and what is done before them.

A scale is `peak / largest` in float32, `peak` the largest magnitude of the numbers that share it and `largest` 127 or 448; a
code is the float32 quotient `x / scale` rounded to nearest, ties to even, and saturated.  This is also the arithmetic of
`oracle.references.operands`, written again: neither knows the other.

SageAttention (thu-ml/SageAttention, csrc/fused/fused.cu) multiplies by the float32 quotient 127 / peak instead, and takes a
peak of 1e-7 at least; its Triton twin (sageattention/triton/quant_per_block.py) divides as here but rounds ties away from 0.
Their codes differ from these in single units, where the quotient is within 2^-16 of a midpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

EightBit = Literal["int8", "e4m3"]

LARGEST: dict[EightBit, float] = {"int8": 127.0, "e4m3": 448.0}
CODES: dict[EightBit, torch.dtype] = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
_EXPONENT = 0xFF << 23  # of a float32
_SMALLEST_EXPONENT = (127 - 6) << 23  # of e4m3's smallest normal, 2^-6: below it the distance of neighbours stays


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """Numbers as codes times scales; the codes are held as the float32 numbers that they stand for."""

    values: Tensor  # float32: whole numbers up to 127, or numbers of e4m3
    scale: Tensor  # float32, positive and finite; broadcasts against `values`
    format: EightBit

    @property
    def codes(self) -> Tensor:
        """The codes as a kernel stores them, torch.int8 or torch.float8_e4m3fn."""
        return self.values.to(CODES[self.format])


def quantise(x: Tensor, peak: Tensor, format_name: EightBit) -> Quantised:
    """float32 `x` in steps of `peak / largest`; `peak` (non-negative, float32) broadcasts against it, and 0 counts as 1."""
    largest = LARGEST[format_name]
    scale = torch.where(peak > 0, peak, 1.0) / largest
    ratio = (x / scale).clamp_(-largest, largest)
    return Quantised(values=ratio.round_() if format_name == "int8" else round_e4m3(ratio), scale=scale, format=format_name)


def round_e4m3(x: Tensor) -> Tensor:
    """float32 `x`, |x| <= 448, rounded to the nearest number of E4M3, ties to even: a new tensor.

    Bit for bit `x.to(torch.float8_e4m3fn).float()`, which takes the CPU several times as long.
    """
    # 1.5 x 2^20 times the power of two below x is a float32 whose neighbours are as far apart as e4m3's are at x
    binade = (x.view(torch.int32) & _EXPONENT).clamp_(min=_SMALLEST_EXPONENT).view(torch.float32).mul_(1.5 * 2**20)
    return (x + binade).sub_(binade).copysign_(x)  # a negative number that rounds to 0 becomes -0


def token_peaks(x: Tensor) -> Tensor:
    """The largest magnitude of each token and head of `x` (..., tokens, dim), float32: (..., tokens, 1)."""
    return x.abs().amax(-1, keepdim=True).float()


def block_peaks(peaks: Tensor, block: int) -> Tensor:
    """For each token, the largest of `peaks` (..., tokens, 1) in its block: the first `block` tokens, and so on; same shape."""
    tokens = peaks.shape[-2]
    padded = torch.nn.functional.pad(peaks, (0, 0, 0, -tokens % block))
    blocks = padded.reshape(*peaks.shape[:-2], -1, block)
    return blocks.amax(-1, keepdim=True).repeat_interleave(block, -2)[..., :tokens, :]


def mean_token(x: Tensor) -> Tensor:
    """The mean over the tokens of `x` (..., tokens, dim), summed in float64 and rounded to the format of `x`: (..., 1, dim).

    SageAttention takes it off the keys in that format too (sageattention/quant.py); any value would do, as long as it is the
    same for all keys.
    """
    return x.mean(-2, keepdim=True, dtype=torch.float64).to(x.dtype)


def rotate(x: Tensor) -> Tensor:
    """float32 `x` (..., dim) with its signs flipped at random places and turned by a normalised Hadamard transform.

    Scalar products stay the same but for rounding, and outliers are spread over all channels (incoherent processing: QuIP,
    arXiv 2307.13304; FlashAttention-3, arXiv 2407.08608).  Where dim is no power of two, the transform is block-diagonal, its
    blocks the largest power of two that divides dim.  Sums are taken pairwise, neighbours first, each rounded to float32.
    """
    dim = x.shape[-1]
    size = dim & -dim
    x = x * signs_of(dim).to(x.device)
    for half in (1 << bit for bit in range(size.bit_length() - 1)):
        first, second = x.reshape(*x.shape[:-1], dim // (2 * half), 2, half).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
    return x * (1.0 / sqrt(size))


@cache
def signs_of(dim: int) -> Tensor:
    """1 or -1 for each channel, (dim,) float32, always the same for a dim."""
    return torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(dim)).float().mul_(2).sub_(1)
