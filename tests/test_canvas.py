"""A picture is for both kinds of page, the same every time, from nowhere else; every error has its place on a scale."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from oracle.canvas import DARK, FLOOR, LIGHT, Palette, axes, drawn, power, scale_of


def draw(figure: Figure, palette: Palette) -> None:
    ax = axes(figure, palette)
    ax.plot([0, 1], [0, 1], color=palette.candidate, label="<&> $x$")
    ax.plot([0, 1], [0, 1], color=palette.incumbent, rasterized=True)
    ax.legend()


PICTURE = drawn(draw, "two lines")


def test_the_same_picture_has_the_same_bytes() -> None:
    assert drawn(draw, "two lines") == PICTURE


@pytest.mark.parametrize(("svg", "palette"), [(PICTURE.light, LIGHT), (PICTURE.dark, DARK)])
def test_each_page_has_its_own_colours(svg: str, palette: Palette) -> None:
    assert palette.surface in svg and palette.candidate in svg


@pytest.mark.parametrize("svg", [PICTURE.light, PICTURE.dark])
def test_a_picture_takes_nothing_from_elsewhere(svg: str) -> None:
    root = ElementTree.fromstring(svg)
    references = [value for element in root.iter() for name, value in element.attrib.items() if name.endswith("href")]

    assert references and all(value.startswith(("#", "data:image/png;base64,")) for value in references)
    assert not re.findall(r"<script|<style[^>]*>[^<]*@import|url\((?!#)", svg)


def test_text_stays_text_and_is_no_formula() -> None:
    assert "<&> $x$" in [element.text for element in ElementTree.fromstring(PICTURE.light).iter()]


@given(st.lists(st.floats(min_value=0, allow_infinity=True) | st.just(math.nan), min_size=1, max_size=20))
def test_every_error_has_its_place(values: list[float]) -> None:
    """In order, all of them; NaN and inf at the upper end and nothing else; what is too small at the lower end."""
    e = np.array([min(v, 1e12) if math.isfinite(v) else v for v in values])
    scale = scale_of(e)
    placed = scale.placed(e)
    low, high = scale.ends

    assert placed.shape == e.shape and bool(((placed >= low) & (placed <= high)).all())
    assert ((placed == high) == ~np.isfinite(e)).all() or not scale.lost
    assert scale.lost == (not np.isfinite(e).all())
    assert low < 1 < high
    assert all(p == v for p, v in zip(placed, e, strict=True) if math.isfinite(v) and v >= 2.0**scale.low)
    assert all(v < 2.0**scale.low for p, v in zip(placed, e, strict=True) if p < 2.0**scale.low)


def test_the_ends_of_a_scale_say_what_lies_there() -> None:
    ticks = scale_of(np.array([0.0, 0.25, 8.0, math.nan])).ticks()

    assert (ticks[min(ticks)], ticks[max(ticks)]) == ("less", "NaN, inf")
    assert ticks[1.0] == "1"
    assert not {"less", "NaN, inf"} & set(scale_of(np.array([0.25, 8.0])).ticks().values())


def test_an_error_that_is_almost_nothing_widens_no_scale() -> None:
    assert 2.0 ** scale_of(np.array([1e-300, 0.5])).low >= FLOOR


@pytest.mark.parametrize(("exponent", "text"), [(-14, "2⁻¹⁴"), (-2, "1/4"), (0, "1"), (9, "512"), (20, "2²⁰")])
def test_a_power_of_two_is_written_as_people_write_it(exponent: int, text: str) -> None:
    assert power(exponent) == text
