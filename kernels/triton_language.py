"""Functions that the Triton kernels are made of, and the switch to Triton's interpreter.

On a machine without a GPU this module switches the interpreter on (`TRITON_INTERPRET=1`) before it imports Triton, and the
kernels then take CPU tensors.  A module that imports Triton imports this one first, therefore.  Triton's interpreter multiplies
the bit patterns of bf16 operands in `tl.dot` and truncates when it casts fp32 to bf16, so interpreted programs widen operands
to fp32 (exact) and round by hand.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The compiled functions below are written in Triton's language, which has no types that mypy knows.

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when functions are decorated, so before the import

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max, _sum_combine

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
FLOOR = tl.constexpr(-1e37)  # running maximum before the first key; finite, so that no difference of infinities arises
LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))


def device_function(fn: Callable[..., Any]) -> Any:
    """`fn` as a function that compiled programs may call.

    Interpreted, it stays a Python function: a call through `triton.jit` patches the whole language each time (0.2 ms).
    For the same reason kernels reduce by `total` and `largest` and not by `tl.sum` and `tl.max`.
    """
    return fn if INTERPRETED else triton.jit(fn)


@device_function
def largest(x, axis: tl.constexpr):
    """The largest element of x along an axis."""
    return tl.reduce(x, axis, _elementwise_max)


@device_function
def total(x, axis: tl.constexpr):
    """The sum of x along an axis."""
    return tl.reduce(x, axis, _sum_combine)


@device_function
def operand(x, dtype: tl.constexpr):
    """x, as loaded (e4m3 as uint8), as an operand of `tl.dot`: in dtype, or in fp32 where interpreted.  Exact."""
    if x.dtype == tl.uint8:
        x = x.to(tl.float8e4nv, bitcast=True)
    if not INTERPRETED:
        return x.to(dtype)
    elif x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@device_function
def dot(a, b):
    """a @ b, summed in fp32.  A row's bits do not depend on the number of rows of a, a multiple of 16, where interpreted."""
    if INTERPRETED:
        # BLAS picks the order of its sums by the shape of the product, so all tilings call it with 16 rows.
        rows, inner, columns = a.shape[0], a.shape[1], b.shape[1]
        a = tl.reshape(a, [rows // 16, 16, inner])
        b = tl.broadcast_to(b[None, :, :], [rows // 16, inner, columns])
        return tl.reshape(tl.dot(a, b, input_precision="ieee"), [rows, columns])
    else:
        return tl.dot(a, b, input_precision="ieee")


@device_function
def _bf16_bits(x):
    """fp32 bits of x rounded to bf16, to nearest, ties to even.  Right for all but NaNs with a payload of ones."""
    bits = x.to(tl.uint32, bitcast=True)
    odd = (bits >> 16) & 1
    return tl.add(tl.add(bits, 0x7FFF, sanitize_overflow=False), odd, sanitize_overflow=False)


@device_function
def rounded(x, dtype: tl.constexpr):
    """x rounded to dtype, to nearest, ties to even, as an operand of `tl.dot`."""
    if not INTERPRETED:
        return x.to(dtype)
    elif dtype == tl.bfloat16:
        return (_bf16_bits(x) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return x.to(dtype).to(tl.float32)


@device_function
def stored(x, dtype: tl.constexpr):
    """x rounded to dtype, to nearest, ties to even, to be stored."""
    if INTERPRETED and dtype == tl.bfloat16:
        return (_bf16_bits(x) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@device_function
def tanh(x):
    """tanh(x), relative error below 2^-20 for every x."""
    # (1 - e) / (1 + e) cancels near 0: with exp good to 2^-21 it is off by 1.6 * 2^-21 at 1/4, and more below.  There the
    # series to x^9 is off by 0.009 x^10 = 2^-27.
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    large = (1.0 - e) / (1.0 + e)
    y = tl.minimum(size * size, 0.0625)
    series = 1.0 + y * (-0.3333333333 + y * (0.1333333333 + y * (-0.0539682540 + y * 0.0218694885)))
    return tl.where(size < 0.25, x * series, tl.where(x < 0.0, -large, large))
