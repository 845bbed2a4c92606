"""8-bit codes and scales are those of the formula, bit for bit, and what comes before them keeps its promises.

The formula is computed again with Python's fractions and numpy's float32 division, one number at a time.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard
from torch import Tensor

from oracle.formats import FORMATS, U32
from oracle.kernels.quantised import (
    CODES,
    LARGEST,
    EightBit,
    block_peaks,
    mean_token,
    quantise,
    rotate,
    round_e4m3,
    token_peaks,
)
from oracle.references import operands

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=100)
both = pytest.mark.parametrize("name", ["int8", "e4m3"])

# what bf16 and fp16 hold, and what is left of it after a mean is taken off or a rotation: float32 down to 2^-138
numbers = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True).filter(lambda x: x == 0 or abs(x) >= 2.0**-138)
rows = st.lists(numbers, min_size=1, max_size=12)
plain_rows = st.lists(st.floats(-1000, 1000, width=16), min_size=2, max_size=12)


def e4m3_numbers() -> list[Fraction]:
    """The finite magnitudes of E4M3 by their codes 0 to 126: 4 bits of exponent with bias 7, 3 bits of fraction."""
    return [Fraction(8 * (c >= 8) + c % 8, 8) * Fraction(2) ** (max(c >> 3, 1) - 7) for c in range(127)]


MAGNITUDES = e4m3_numbers()


def code_by_hand(x: float, peak: float, name: EightBit) -> int:
    """The bits of the code of one number, as an int8 or as the byte of an E4M3 number."""
    largest = int(LARGEST[name])
    scale = np.float32(peak if peak > 0 else 1.0) / np.float32(largest)
    ratio = Fraction(float(np.float32(x) / scale))
    if name == "int8":
        return max(-largest, min(largest, round(ratio)))  # Python rounds halves to even
    size = min(abs(ratio), Fraction(largest))
    code = min(range(127), key=lambda c: (abs(MAGNITUDES[c] - size), c % 2))
    return code | (128 if np.signbit(np.float32(x)) else 0)


def bits(codes: Tensor) -> list[int]:
    """Codes as the integers of `code_by_hand`."""
    return (codes if codes.dtype == torch.int8 else codes.view(torch.uint8)).flatten().tolist()


@both
@drawn
@given(values=rows)
@example(values=[127.0, 0.5, 1.5, 2.5, -0.5, -1.5])  # ties of int8
@example(values=[448.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, -(2.0**-11)])  # ties of E4M3, among its subnormals too
@example(values=[0.0, -0.0])
def test_codes_are_those_of_the_formula(name: EightBit, values: list[float]) -> None:
    x = torch.tensor([values])
    got = quantise(x, token_peaks(x), name)
    peak = max(abs(v) for v in values)
    assert got.codes.dtype == CODES[name]
    assert bits(got.codes) == [code_by_hand(v, peak, name) for v in values]
    assert float(got.scale) == float(np.float32(peak or 1.0) / np.float32(LARGEST[name]))
    assert torch.equal(got.codes.float(), got.values)


def test_the_formula_tells_rounding_halves_away_from_rounding_them_to_even() -> None:
    assert [code_by_hand(v, 127.0, "int8") for v in (0.5, 1.5, 2.5, -2.5)] == [0, 2, 2, -2]
    assert bits(torch.tensor([0.5, 2.5]).add(0.5).to(torch.int8)) != [code_by_hand(v, 127.0, "int8") for v in (0.5, 2.5)]


@both
@drawn
@given(values=rows)
def test_codes_and_scales_are_those_of_the_reference(name: EightBit, values: list[float]) -> None:
    x = torch.tensor([values])
    expected, step = operands.quantise(x.double(), token_peaks(x).double(), name)
    got = quantise(x, token_peaks(x), name)
    assert torch.equal(got.values.double(), expected)
    assert torch.equal(got.scale.double(), step)


@drawn
@given(x=st.floats(-448, 448, width=32))
def test_rounding_to_e4m3_is_the_conversion_to_float8(x: float) -> None:
    values = torch.tensor([x])
    expected = values.to(torch.float8_e4m3fn).float()
    assert torch.equal(round_e4m3(values).view(torch.int32), expected.view(torch.int32))


def test_rounding_to_e4m3_is_right_at_every_number_every_midpoint_and_beside_them() -> None:
    grid = torch.tensor([float(m) for m in MAGNITUDES])
    points = torch.cat((grid, (grid[1:] + grid[:-1]) / 2))
    points = torch.cat((points, points.nextafter(torch.tensor(448.0)), points.nextafter(torch.tensor(0.0))))
    points = torch.cat((points, -points))
    got, expected = round_e4m3(points), points.to(torch.float8_e4m3fn).float()
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
    assert not torch.equal(torch.where(points > 2.0**-6, points, 0.0), got)  # it is not the identity


@both
@drawn
@given(values=rows.filter(lambda v: max(map(abs, v)) >= 2.0**-110))
def test_the_largest_magnitude_has_the_largest_code(name: EightBit, values: list[float]) -> None:
    x = torch.tensor([values])
    got = quantise(x, token_peaks(x), name)
    assert float(got.values.abs().max()) == LARGEST[name]


@both
def test_zeros_have_codes_of_zero_and_a_finite_scale(name: EightBit) -> None:
    got = quantise(torch.zeros(2, 3, 8), torch.zeros(2, 3, 1), name)
    assert not got.values.any()
    assert bool((got.scale > 0).all())
    assert bool(got.scale.isfinite().all())


@both
@drawn
@given(values=rows.filter(lambda v: max(map(abs, v)) >= 2.0**-110))
def test_a_number_is_off_by_at_most_half_a_step(name: EightBit, values: list[float]) -> None:
    """Half a step of the format at the quotient, and the quotient's own rounding: u32 of at most `largest`, and a little."""
    x = torch.tensor([values])
    got = quantise(x, token_peaks(x), name)
    quotient = x.double() / got.scale.double()
    f = FORMATS["e4m3"]
    half = torch.tensor(0.5) if name == "int8" else (quotient.abs() * f.u).clamp(min=f.smallest_subnormal / 2)
    assert bool(((got.values.double() - quotient).abs() <= half + 1.01 * U32 * LARGEST[name] * (1 + f.u)).all())


@both
@drawn
@given(values=plain_rows, power=st.integers(-40, 40))
def test_a_power_of_two_moves_the_scale_and_no_code(name: EightBit, values: list[float], power: int) -> None:
    x = torch.tensor([values])
    x = torch.where(x.abs() < 2.0**-14, 0.0, x)
    once, again = quantise(x, token_peaks(x), name), quantise(x * 2.0**power, token_peaks(x * 2.0**power), name)
    assert torch.equal(once.values, again.values)
    assert not x.any() or torch.equal(once.scale * 2.0**power, again.scale)


@both
@drawn
@given(seed=st.integers(0, 2**31))
def test_tokens_in_another_order_have_the_same_codes(name: EightBit, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, order = torch.randn(2, 9, 8, generator=generator), torch.randperm(9, generator=generator)
    once, again = quantise(x, token_peaks(x), name), quantise(x[:, order], token_peaks(x[:, order]), name)
    assert torch.equal(once.values[:, order], again.values)
    assert torch.equal(once.scale[:, order], again.scale)


@drawn
@given(heights=st.lists(st.floats(0, 100, width=32), min_size=1, max_size=20), block=st.integers(1, 8))
def test_a_block_has_its_largest_peak_and_no_other(heights: list[float], block: int) -> None:
    got = block_peaks(torch.tensor(heights)[None, :, None], block)
    assert got.shape == (1, len(heights), 1)
    assert got.flatten().tolist() == [max(heights[i // block * block : (i // block + 1) * block]) for i in range(len(heights))]


@drawn
@given(columns=st.lists(st.lists(st.integers(-255, 255), min_size=3, max_size=3), min_size=1, max_size=12))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mean_is_exact_but_for_one_rounding(dtype: torch.dtype, columns: list[list[int]]) -> None:
    x = torch.tensor(columns, dtype=dtype)
    exact = [float(Fraction(sum(c), len(columns))) for c in zip(*columns, strict=True)]
    assert torch.equal(mean_token(x), torch.tensor([exact], dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("dim", [8, 40, 64, 80, 96, 512])
def test_a_rotation_keeps_scalar_products_and_spreads_every_channel(dim: int) -> None:
    """An entry is off by at most (stages + 1) u of |x|, so a product by twice sqrt(dim) that, of |x| |y|."""
    size = dim & -dim
    x, y = torch.randn(2, 20, dim, generator=torch.Generator().manual_seed(dim))
    rx, ry = rotate(x).double(), rotate(y).double()
    limit = 2.1 * dim**0.5 * (size.bit_length() + 2) * U32 * x.double().norm(dim=-1) * y.double().norm(dim=-1)
    assert bool((((rx * ry).sum(-1) - (x.double() * y.double()).sum(-1)).abs() <= limit).all())
    spread = rotate(torch.eye(dim)).abs()
    blocks = torch.kron(torch.eye(dim // size), torch.ones(size, size))
    assert torch.allclose(spread, blocks * size**-0.5, rtol=2 * U32, atol=0)


@pytest.mark.parametrize("dim", [16, 48])
def test_a_rotation_is_hadamards_matrix_after_random_signs(dim: int) -> None:
    size = dim & -dim
    dense = torch.from_numpy(hadamard(size)).double() * size**-0.5
    matrix = torch.kron(torch.eye(dim // size, dtype=torch.float64), dense)
    turned = rotate(torch.eye(dim)).double()  # row c: signs[c] times row c of the matrix
    signs = (turned * matrix).sum(-1)
    assert set(signs.round().tolist()) == {-1.0, 1.0}
    assert torch.allclose(turned, signs.round()[:, None] * matrix, rtol=2 * U32, atol=0)
    assert torch.equal(rotate(torch.eye(dim)), rotate(torch.eye(dim)))
