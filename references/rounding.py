"""Rounding: number formats narrower than what they are computed in.

Tensors keep their dtype (float32 or float64); only their values move onto the grid of the format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.formats import FORMATS

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
}
FORMAT_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def round_to(x: Tensor, format_name: str) -> Tensor:
    """`x` rounded to the nearest number of the format, ties to even; same shape and dtype.

    Past the largest number, e4m3 saturates (it has no infinity) and the others become infinite.
    """
    if format_name == "e4m3":
        x = x.clamp(-FORMATS["e4m3"].largest, FORMATS["e4m3"].largest)
    if format_name != "fp32" and x.dtype == torch.float64:
        return _to_odd(x).to(DTYPES[format_name]).to(torch.float64)
    return x.to(DTYPES[format_name]).to(x.dtype)


def truncate_to_fp32(x: Tensor) -> Tensor:
    """float64 `x` rounded toward zero to float32: how a tensor core's accumulator rounds (docs/numerics.md, section 1).

    Finite values past the largest float32 become the largest; infinities and NaN stay.
    """
    nearest = x.to(torch.float32)
    outward = nearest.to(torch.float64).abs() > x.abs()
    # sign and magnitude: one less in the bits is one step toward zero, across binades and from infinity too
    return (nearest.view(torch.int32) - outward.to(torch.int32)).view(torch.float32)


def truncate_to_bf16(x: Tensor) -> Tensor:
    """float32 `x` with all but the leading 16 bits dropped: bf16 rounded toward zero.  Quiet NaN stays NaN."""
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32)


def truncate_to_fp22(x: Tensor) -> Tensor:
    """float32 `x` with the last 10 bits dropped: the e8m13 accumulator of Hopper's 8-bit tensor cores, toward zero."""
    return (x.view(torch.int32) & ~0x3FF).view(torch.float32)


def flush_to_zero(x: Tensor, format_name: str) -> Tensor:
    """`x` with 0 for everything below the smallest normal number of the format."""
    return torch.where(x.abs() < FORMATS[format_name].smallest_normal, torch.zeros_like(x), x)


def _to_odd(x: Tensor) -> Tensor:
    """float64 `x` as float32, rounded to odd: a second rounding to a format at least two bits narrower is then the only one."""
    down = truncate_to_fp32(x)
    inexact = down.to(torch.float64) != x
    return (down.view(torch.int32) | inexact.to(torch.int32)).view(torch.float32)
