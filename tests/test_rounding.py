"""Rounding to a narrow format: nearest, or toward zero, and nothing in between is a third value."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.formats import FORMATS
from oracle.references.rounding import (
    DTYPES,
    flush_to_zero,
    round_to,
    truncate_to_bf16,
    truncate_to_fp22,
    truncate_to_fp32,
)

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=200)

floats32 = st.floats(width=32, allow_nan=False)
floats64 = st.floats(allow_nan=False) | floats32  # hypothesis draws subnormals, infinities and both zeros
narrow = pytest.mark.parametrize("name", list(FORMATS))

# the function, the bits of its significand, the dtype of its argument
TRUNCATIONS: list[tuple[Callable[[Tensor], Tensor], int, torch.dtype]] = [
    (truncate_to_fp32, 24, torch.float64),
    (truncate_to_fp22, 14, torch.float32),
    (truncate_to_bf16, 8, torch.float32),
]
truncating = pytest.mark.parametrize(("truncate", "bits", "dtype"), TRUNCATIONS)


def rounded(x: float, name: str, dtype: torch.dtype = torch.float64) -> float:
    return float(round_to(torch.tensor([x], dtype=dtype), name)[0])


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, signs of zeros included."""
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


@narrow
@drawn
@given(x=floats64)
@example(x=1 + 2.0**-8 + 2.0**-40)  # by way of float32 this becomes a tie, and then 1
@example(x=-(2.0**-150))
def test_rounding_is_off_by_at_most_half_a_place(name: str, x: float) -> None:
    """|error| <= u 2^k <= u |x|, or half of the smallest subnormal; past the largest number, e4m3 saturates, others overflow."""
    f, got = FORMATS[name], rounded(x, name)
    if abs(x) > f.largest * (1 + f.u):
        assert abs(got) == (f.largest if name == "e4m3" else math.inf)
    elif abs(x) <= f.largest:
        assert abs(got - x) <= max(f.u * 2.0 ** (math.frexp(x)[1] - 1), f.smallest_subnormal / 2)
    assert math.copysign(1, got) == math.copysign(1, x)


@narrow
@drawn
@given(x=floats64, y=floats64)
def test_rounding_is_monotone(name: str, x: float, y: float) -> None:
    assert rounded(min(x, y), name) <= rounded(max(x, y), name)


@narrow
@drawn
@given(x=floats32)
def test_rounding_twice_is_rounding_once(name: str, x: float) -> None:
    """And float32 and float64 arguments of the same value round alike."""
    once = round_to(torch.tensor([x], dtype=torch.float32), name)

    assert same(round_to(once, name), once)
    assert same(round_to(torch.tensor([x], dtype=torch.float64), name), once.double())


@pytest.mark.parametrize("name", ["bf16", "fp16", "e4m3"])
def test_every_number_of_a_format_stays_and_ties_go_to_the_even_neighbour(name: str) -> None:
    """All finite numbers of the format, and the midpoints of all neighbours."""
    dtype = DTYPES[name]
    bits = torch.arange(2 ** (8 * dtype.itemsize - 1), dtype=torch.int64).to(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    values = bits.view(dtype).double()
    values = values[torch.isfinite(values)]
    midpoints = (values[:-1] + values[1:]) / 2
    even = torch.arange(len(midpoints)) % 2  # of two neighbours the one with the even bit pattern

    assert torch.equal(round_to(values, name), values)
    assert torch.equal(round_to(midpoints, name), torch.where(even == 0, values[:-1], values[1:]))
    assert torch.equal(round_to(-midpoints.float(), name).double(), -round_to(midpoints, name))


@narrow
def test_nan_stays_nan(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        assert math.isnan(rounded(math.nan, name, dtype))


@truncating
@drawn
@given(x=floats64)
@example(x=1e300)
@example(x=-1e300)
@example(x=-1e-300)
@example(x=1.5 * 2.0**-149)
@example(x=-(1 + 2.0**-24))
def test_truncation_goes_to_the_next_number_toward_zero(
    truncate: Callable[[Tensor], Tensor], bits: int, dtype: torch.dtype, x: float
) -> None:
    """Never larger in magnitude, less than one place away, of the same sign; overflow stops at the largest number."""
    value = torch.tensor([x], dtype=torch.float64).to(dtype)
    got = truncate(value)
    exact, result = float(value[0]), float(got[0])
    place = 2.0 ** (max(math.frexp(exact)[1], -125) - bits) if math.isfinite(exact) else 0.0

    assert got.dtype == torch.float32
    assert abs(result) <= abs(exact)
    assert math.copysign(1, result) == math.copysign(1, exact)
    assert same(truncate(got.to(dtype)), got)
    if abs(exact) >= 2.0**128:
        assert abs(result) == (abs(exact) if math.isinf(exact) else FORMATS["fp32"].largest)
    else:
        assert abs(exact - result) < max(place, 5e-324)


@truncating
@drawn
@given(x=floats64, y=floats64)
def test_truncation_is_monotone(truncate: Callable[[Tensor], Tensor], bits: int, dtype: torch.dtype, x: float, y: float) -> None:
    got = truncate(torch.tensor([min(x, y), max(x, y)], dtype=torch.float64).to(dtype))

    assert got[0] <= got[1]


@truncating
def test_truncation_keeps_nan(truncate: Callable[[Tensor], Tensor], bits: int, dtype: torch.dtype) -> None:
    assert math.isnan(truncate(torch.tensor([math.nan], dtype=dtype))[0])


@narrow
def test_flushing_removes_subnormals_only(name: str) -> None:
    smallest = FORMATS[name].smallest_normal
    x = torch.tensor([0.0, -0.0, smallest, -smallest, smallest * 0.75, -smallest / 2, 1.0], dtype=torch.float64)

    assert flush_to_zero(x, name).tolist() == [0.0, 0.0, smallest, -smallest, 0.0, 0.0, 1.0]
