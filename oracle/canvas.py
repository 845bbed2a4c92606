"""What the pictures of a report are drawn on: SVG without scripts or anything from elsewhere, for light and for dark pages.

The same picture has the same bytes.  NaN and inf are drawn as the worst there is, and never left out.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator
from numpy.typing import NDArray

FLOOR = 2.0**-10  # errors under it are drawn as "less"
LIMIT_DASHES = (0, (5, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """The colours of one page."""

    surface: str
    ink: str
    quiet: str  # axes and captions
    faint: str  # edges
    candidate: str
    incumbent: str
    limit: str
    within: tuple[str, str, str]  # e from nothing to 1
    beyond: tuple[str, str, str]  # e from 1 on
    lost: str  # NaN and inf


LIGHT = Palette(
    surface="#ffffff",
    ink="#1b1f24",
    quiet="#59636e",
    faint="#c3cad3",
    candidate="#1f5fd0",
    incumbent="#b4560a",
    limit="#c11d2c",
    within=("#f3f6fa", "#a9c8ef", "#1f5fd0"),
    beyond=("#f6b26b", "#d4372c", "#6e0b1e"),
    lost="#000000",
)
DARK = Palette(
    surface="#14181d",
    ink="#e6eaef",
    quiet="#9aa5b1",
    faint="#4a5563",
    candidate="#6ea8fe",
    incumbent="#f0a35e",
    limit="#ff6b74",
    within=("#1b2129", "#2b4f80", "#6ea8fe"),
    beyond=("#8f3b1f", "#ff5a4d", "#ffd6cf"),
    lost="#ff4dff",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture for both kinds of page."""

    light: str  # SVG
    dark: str
    about: str  # what it shows, for who cannot see it


Draw = Callable[[Figure, Palette], None]


def drawn(draw: Draw, about: str, *, height: float = 3.6) -> Picture:
    """What `draw` puts on a figure of 9.2 by `height` inches, for both kinds of page."""
    return Picture(light=_svg(draw, LIGHT, height), dark=_svg(draw, DARK, height), about=about)


def _svg(draw: Draw, palette: Palette, height: float) -> str:
    with matplotlib.rc_context(
        {
            "svg.hashsalt": "attention-oracle",  # ids of clip paths: the same every time
            "svg.fonttype": "none",  # text stays text
            "text.parse_math": False,
            "image.composite_image": False,  # a map's cells stay one pixel each: sharp at any size
        }
    ):
        figure = Figure(figsize=(9.2, height), facecolor=palette.surface, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure, palette)
        out = io.StringIO()
        figure.savefig(out, format="svg", dpi=144, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def axes(figure: Figure, palette: Palette) -> Axes:
    """The axes of the figure, in quiet colours."""
    ax = figure.add_subplot()
    ax.set_facecolor(palette.surface)
    ax.tick_params(colors=palette.quiet, length=3)
    for name, spine in ax.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(palette.quiet)
    for label in (ax.xaxis.label, ax.yaxis.label):
        label.set_color(palette.quiet)
    return ax


def legend(ax: Axes, palette: Palette, *, columns: int) -> None:
    """What the marks mean stands above the axes."""
    made = ax.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False, borderpad=0, handlelength=1.4, columnspacing=1.4
    )
    for text in made.get_texts():
        text.set_color(palette.ink)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How e lies on an axis, by powers of two: NaN and inf at its upper end, and what is under `low` at its lower end."""

    low: int  # powers of two
    high: int
    less: bool  # some values are under 2^low
    lost: bool  # some values are NaN or inf

    @property
    def ends(self) -> tuple[float, float]:
        """The values at the ends of the axis."""
        return 2.0 ** (self.low - self.less), 2.0 ** (self.high + self.lost)

    def placed(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Where the values are drawn: all of them are."""
        return np.nan_to_num(values, nan=math.inf, posinf=self.ends[1]).clip(*self.ends)

    def ticks(self, most: int = 9) -> dict[float, str]:
        """Value -> label."""
        step = max(1, -(-(self.high - self.low) // most))
        powers = [p for p in range(self.low, self.high + 1) if p % step == 0]
        ends = {self.ends[0]: "less"} if self.less else {}
        return ends | {2.0**p: power(p) for p in powers} | ({self.ends[1]: "NaN, inf"} if self.lost else {})

    def put(self, ax: Axes, axis: Literal["x", "y"]) -> None:
        """The axis has this scale."""
        at = ax.xaxis if axis == "x" else ax.yaxis
        (ax.set_xscale if axis == "x" else ax.set_yscale)("log", base=2)
        at.set_ticks(list(self.ticks()), list(self.ticks().values()))
        at.set_minor_locator(FixedLocator([]))
        margin = (self.ends[1] / self.ends[0]) ** 0.03
        (ax.set_xlim if axis == "x" else ax.set_ylim)(self.ends[0] / margin, self.ends[1] * margin)


def scale_of(*values: NDArray[np.float64]) -> Scale:
    """The scale that holds all values, and the limit 1."""
    every = np.concatenate(values)
    finite = every[np.isfinite(every)]
    inner = np.concatenate([[0.5, 1.0], finite[finite >= FLOOR]])
    low, high = math.floor(math.log2(inner.min())), math.ceil(math.log2(inner.max()) + 0.25)
    return Scale(low=low, high=high, less=bool((finite < 2.0**low).any()), lost=len(finite) < len(every))


def power(exponent: int) -> str:
    """A power of two as people write it."""
    if abs(exponent) > 10:
        return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"1/{2**-exponent}" if exponent < 0 else str(2**exponent)
