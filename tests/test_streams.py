"""Random numbers have the same bits everywhere, look normal, and do not depend on one another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle import streams
from oracle.streams import Stream

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=50)

seeds = st.integers(0, 2**64)
names = st.text("ab/1 é", max_size=6)
COUNT = 1 << 20
SIGMA = 5.0  # standard errors that a moment may be off by


def sha256(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:16]


@pytest.fixture(scope="module")
def many() -> Tensor:
    """A million normal numbers, float64."""
    return Stream(0, "moments").normal(COUNT).double()


@pytest.mark.parametrize(
    ("draw", "digest"),
    [
        (lambda s: s.normal(100, 7), "f1047332679a5c5b"),
        (lambda s: s.uniform(100), "8a966a329d7d498a"),
        (lambda s: s.integers(-5, 1000, 100), "b3a2e56e60422b69"),
        (lambda s: s.permutation(100), "c6973d5a62a5d113"),
        (lambda s: s.choice((0.5, 2.0, 3.0), 100), "477b6041a85477a6"),
    ],
    ids=["normal", "uniform", "integers", "permutation", "choice"],
)
def test_the_same_bits_on_any_machine(draw: Callable[[Stream], Tensor], digest: str) -> None:
    """The digests were taken once."""
    assert sha256(draw(Stream(12, "pinned"))) == digest


@drawn
@given(seeds, names)
def test_equal_seed_and_name_give_equal_numbers(seed: int, name: str) -> None:
    one, two = Stream(seed, name), Stream(seed, name)

    assert torch.equal(one.normal(3, 5), two.normal(3, 5))
    assert torch.equal(one.integers(0, 9, 20), two.integers(0, 9, 20))


@drawn
@given(seeds, names, seeds, names)
@example(1, "1/a", 11, "/a")
@example(1, "a", 1, "b")
def test_another_seed_or_another_name_gives_other_numbers(seed: int, name: str, other_seed: int, other_name: str) -> None:
    same = (seed, name) == (other_seed, other_name)

    assert torch.equal(Stream(seed, name).uniform(8), Stream(other_seed, other_name).uniform(8)) == same


def test_streams_of_different_names_are_independent(many: Tensor) -> None:
    """The correlation of two streams is that of independent numbers: 0, to within n^-1/2."""
    for seed, name in ((0, "moments "), (1, "moments"), (0, "inputs/randn")):
        other = Stream(seed, name).normal(COUNT).double()
        assert abs(float((many * other).mean())) < SIGMA * COUNT**-0.5


@drawn
@given(st.integers(0, 40), st.integers(1, 9))
def test_a_chunk_boundary_does_not_change_the_stream(count: int, chunk: int) -> None:
    whole = Stream(3, "chunks").normal(count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_CHUNK", chunk)
        in_chunks = Stream(3, "chunks").normal(count)

    assert torch.equal(whole, in_chunks)


@drawn
@given(st.lists(st.integers(0, 9), max_size=4))
def test_what_is_drawn_in_parts_is_what_is_drawn_at_once(parts: list[int]) -> None:
    stream = Stream(3, "parts")

    assert torch.equal(torch.cat([torch.zeros(0), *(stream.normal(n) for n in parts)]), Stream(3, "parts").normal(sum(parts)))


@drawn
@given(st.lists(st.integers(0, 4), max_size=3))
def test_the_shape_is_the_one_asked_for(shape: list[int]) -> None:
    x, u = Stream(0, "shape").normal(*shape), Stream(0, "shape").uniform(*shape)

    assert (x.shape, x.dtype) == (torch.Size(shape), torch.float32)
    assert (u.shape, u.dtype) == (torch.Size(shape), torch.float64)


def test_normal_numbers_have_the_moments_of_a_normal_distribution(many: Tensor) -> None:
    """Mean 0, variance 1, skewness 0; kurtosis 2.85, that of the sum of eight uniform numbers, and nothing beyond 4.9."""
    kurtosis = 3 - 6 / 5 / 8

    assert abs(float(many.mean())) < SIGMA * COUNT**-0.5
    assert abs(float(many.square().mean()) - 1) < SIGMA * ((kurtosis - 1) / COUNT) ** 0.5
    assert abs(float(many.pow(3).mean())) < SIGMA * (15 / COUNT) ** 0.5
    assert abs(float(many.pow(4).mean()) - kurtosis) < SIGMA * (96 / COUNT) ** 0.5
    assert float(many.abs().max()) < 4.9


def test_neighbouring_numbers_of_a_stream_are_independent(many: Tensor) -> None:
    for lag in (1, 2, 3, 4, 8):
        assert abs(float((many[lag:] * many[:-lag]).mean())) < SIGMA * COUNT**-0.5


def test_normal_numbers_have_no_grid_coarser_than_float32(many: Tensor) -> None:
    """Nearly all of them differ: ties of logits come from the input class, not from the generator."""
    assert len(torch.unique(many)) > 0.95 * COUNT


def test_uniform_numbers_fill_the_unit_interval() -> None:
    u = Stream(0, "uniform").uniform(100_000)

    assert 0 <= float(u.min()) < 1e-4
    assert 1 - 1e-4 < float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < SIGMA * (1 / 12 / 100_000) ** 0.5


@drawn
@given(st.integers(-50, 50), st.integers(1, 60))
def test_integers_are_all_of_the_range_and_nothing_else(low: int, width: int) -> None:
    x = Stream(0, "integers").integers(low, low + width, 40 * width)

    assert x.dtype == torch.int64
    assert set(x.tolist()) == set(range(low, low + width))


@drawn
@given(st.integers(0, 300))
def test_a_permutation_holds_every_index_once(count: int) -> None:
    assert sorted(Stream(0, "permutation").permutation(count).tolist()) == list(range(count))


def test_choice_takes_every_option_and_nothing_else() -> None:
    assert set(Stream(0, "choice").choice((0.5, 2.0, -3.0), 100).tolist()) == {0.5, 2.0, -3.0}


def test_the_constants_are_exactly_rounded() -> None:
    """The scale of normal() comes from operations that IEEE 754 rounds correctly: a square root, never a power."""
    x = Stream(12, "pinned").normal(100).double().numpy()
    steps = x * np.sqrt(8 * (256**2 - 1) / 12 + 1 / 12) * 2.0**24

    assert np.abs(steps - np.round(steps)).max() <= np.abs(steps).max() * 2.0**-24
