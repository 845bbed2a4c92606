"""The picture of a bench: how the time of a call grows with the context, beside the floor."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from oracle.bench import Bench, Row
from oracle.canvas import LIMIT_DASHES, Palette, Picture, axes, drawn, legend

WORD = 26  # characters of a kernel's name in the legend


def growth(bench: Bench) -> Picture:
    """Milliseconds of a call, by powers, over the context, for every family and batch: A, B and the floor."""
    groups = list(_groups(bench))

    def draw(figure: Figure, palette: Palette) -> None:
        ax = axes(figure, palette)
        for number, rows in enumerate(groups):
            _group(ax, palette, rows, number, len(groups))
        for colour, dashes, label in (
            (palette.candidate, "-", f"A = {_short(bench.a)}"),
            (palette.incumbent, "-", f"B = {_short(bench.b)}"),
            (palette.limit, LIMIT_DASHES, "floor at the rates measured"),
        ):
            ax.plot([], [], color=colour, linestyle=dashes, label=label)
        ax.set_yscale("log")
        contexts = sorted({row.context for row in bench.rows})
        ax.set_xticks(contexts, [f"{c:,}" for c in contexts])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
        ax.set_xlabel("tokens of context before the new ones")
        ax.set_ylabel("ms of a call")
        legend(ax, palette, columns=3)

    return drawn(draw, f"time of a call by context: {len(bench.rows)} cases", height=4.6)


def _group(ax: Axes, palette: Palette, rows: list[Row], number: int, of: int) -> None:
    marker = "osD^vP*X"[number % 8]
    x = np.array([row.context for row in rows], dtype=np.float64)
    for colour, name in ((palette.candidate, "a"), (palette.incumbent, "b")):
        found = [getattr(row, name).seconds for row in rows]
        middle, low, high = (np.array([1000 * getattr(e, end) for e in found]) for end in ("value", "low", "high"))
        ax.errorbar(x, middle, yerr=(middle - low, high - middle), fmt=marker, markersize=4, capsize=2.5, color=colour)
        ax.plot(x, middle, color=colour, linewidth=1.4, alpha=0.8)
    floor = np.array([1000 * row.floor_s for row in rows])
    ax.plot(x, floor, color=palette.limit, linewidth=1.1, linestyle=LIMIT_DASHES)
    if of > 1:
        text = f"{rows[-1].family} {rows[-1].shape}"
        ax.plot([], [], marker, color=palette.quiet, markersize=4, label=text)


def _groups(bench: Bench) -> Iterator[list[Row]]:
    """The rows of each family and batch, by context."""
    for key in dict.fromkeys((row.family, row.shape) for row in bench.rows):
        yield sorted((row for row in bench.rows if (row.family, row.shape) == key), key=lambda row: row.context)


def _short(name: str) -> str:
    return name if len(name) <= WORD else f"...{name[3 - WORD :]}"
