"""The pictures of a report: where the errors lie, how they are distributed, and beside the incumbent's."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import BoundaryNorm, Colormap, LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from oracle.canvas import LIMIT_DASHES, Palette, Picture, Scale, axes, drawn, legend, power, scale_of
from oracle.evidence import BINS, LOWEST, PER_OCTAVE, CaseErrors, Evidence, Histogram

KEY_TILE = 64  # keys a tile, whose edges are marked
MOST_EDGES = 48  # lines drawn for edges of one kind
MOST_POINTS = 2500  # points drawn as shapes; more are drawn as pixels
MOST_COLUMNS = 480  # columns of a map; more rows share one
SHADES = 12  # colours of a map to each side of the limit


def edges(first: int, last: int, size: int) -> tuple[list[int], int]:
    """(positions of edges from `first` to `last`, how many edges apart): all multiples of `size`, or every so many where
    there are more than MOST_EDGES."""
    start, stop = max(0, -(-first // size)), last // size
    step = max(1, -(-(stop - start + 1) // MOST_EDGES))
    return [edge * size for edge in range(-(-start // step) * step, stop + 1, step)], step


def by_position(one: CaseErrors) -> Picture:
    """The largest e of each judged row by its position in its sequence, with the edges of pages and of key tiles."""
    mine = _numpy(one.candidate)
    theirs = None if one.incumbent is None else _numpy(one.incumbent)
    scale = scale_of(mine, *([] if theirs is None else [theirs]))
    position, size = one.position.numpy(), one.case.page_size
    span = (int(position.min()) // size * size, -(-int(position.max() + 1) // size) * size)  # whole pages
    pages, every_page = edges(*span, size)
    tiles, every_tile = edges(*span, KEY_TILE)

    def draw(figure: Figure, palette: Palette) -> None:
        ax = axes(figure, palette)
        for edge in pages:
            ax.axvline(edge, color=palette.faint, linewidth=0.8, zorder=0)
        for edge in tiles:
            ax.axvline(edge, ymin=0.965, color=palette.quiet, linewidth=1.6, zorder=0)
        ax.axhline(1, color=palette.limit, linewidth=1.2, linestyle=LIMIT_DASHES, zorder=1, label="limit, e = 1")
        many = len(position) > MOST_POINTS
        if theirs is not None:
            (rings,) = ax.plot(position, scale.placed(theirs), "o", markersize=7, fillstyle="none", label="incumbent", zorder=2)
            rings.set(color=palette.incumbent, rasterized=many)
        (dots,) = ax.plot(position, scale.placed(mine), "o", markersize=4, label="candidate", zorder=3)
        dots.set(color=palette.candidate, rasterized=many)
        ax.plot([], [], color=palette.faint, linewidth=1.5, label=_every(every_page, "page edge", size))
        ax.plot([], [], color=palette.quiet, linewidth=1.6, label=_every(every_tile, "tile edge", KEY_TILE))
        scale.put(ax, "y")
        room = max(1.0, 0.015 * (span[1] - span[0]))
        ax.set_xlim(span[0] - room, span[1] + room)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("position of the query in its sequence, in keys")
        ax.set_ylabel("largest e of the row")
        legend(ax, palette, columns=5)

    return drawn(draw, f"error by position in the sequence: {len(position)} rows, page edges every {size} keys")


def _every(step: int, what: str, size: int) -> str:
    return f"{what}, every {size} keys" if step == 1 else f"{what}, one in {step}: every {size * step:,} keys"


def distribution(candidate: Histogram, incumbent: Histogram) -> Picture:
    """The share of all judged elements in each bin of log2 e, for both kernels."""
    one = 1 - LOWEST * PER_OCTAVE  # the bin whose lower edge is 1
    inner = [i for h in (candidate, incumbent) for i, count in enumerate(h.counts) if count and 0 < i <= BINS]
    first, last = min([*inner, one - 8]), max([*inner, one + 1])
    lost = bool(candidate.counts[-1] or incumbent.counts[-1])

    def shares(h: Histogram) -> NDArray[np.float64]:
        """Of the bins drawn: the first holds what lies under it as well, and one more what lies beyond all."""
        counts = [sum(h.counts[: first + 1]), *h.counts[first + 1 : last + 1], *([h.counts[-1]] if lost else [])]
        return np.array(counts, dtype=np.float64) / max(1, h.elements)

    def draw(figure: Figure, palette: Palette) -> None:
        ax = axes(figure, palette)
        bins = np.arange(first, last + 2 + lost)
        label = f"candidate, {candidate.elements:,} elements"
        ax.stairs(shares(candidate), bins, color=palette.candidate, alpha=0.22, fill=True)
        ax.stairs(shares(candidate), bins, color=palette.candidate, linewidth=1.8, label=label)
        if incumbent.elements:
            label = f"incumbent, {incumbent.elements:,} elements"
            ax.stairs(shares(incumbent), bins, color=palette.incumbent, linewidth=1.8, linestyle=(0, (3, 2)), label=label)
        ax.axvline(one, color=palette.limit, linewidth=1.2, linestyle=LIMIT_DASHES, label="limit, e = 1")
        ax.set_yscale("log")
        ax.set_ylim(top=1.0)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
        ax.yaxis.set_minor_locator(FixedLocator([]))
        apart = 2 * PER_OCTAVE * max(1, -(-(last - first) // (22 * PER_OCTAVE)))
        names = {first + 0.5: "less"} | ({last + 1.5: "NaN, inf"} if lost else {})
        names |= {i: power(LOWEST + (i - 1) // PER_OCTAVE) for i in range(first + 3, last + 2 - lost) if (i - one) % apart == 0}
        ax.set_xticks(list(names), list(names.values()))
        ax.set_xlim(first - 0.3, last + 1.3 + lost)
        ax.set_xlabel("e of the element: |out - exact| over its bound")
        ax.set_ylabel("share of elements")
        legend(ax, palette, columns=3)

    return drawn(
        draw, f"distribution of e: {candidate.elements:,} elements of the candidate, {incumbent.elements:,} of the incumbent"
    )


def row_by_row(evidence: Evidence) -> Picture | None:
    """The largest e of each judged row, candidate over incumbent; None where there is no incumbent to compare with."""
    pairs = [(_numpy(c.candidate), _numpy(c.incumbent)) for c in evidence.cases if c.incumbent is not None]
    if not pairs:
        return None
    mine, theirs = (np.concatenate(both) for both in zip(*pairs, strict=True))
    up, across = scale_of(mine), scale_of(theirs)

    def draw(figure: Figure, palette: Palette) -> None:
        ax = axes(figure, palette)
        ax.axline((1, 1), (2, 2), color=palette.quiet, linewidth=1, label="as accurate as the incumbent", zorder=1)
        ax.axhline(1, color=palette.limit, linewidth=1.2, linestyle=LIMIT_DASHES, label="limit, e = 1", zorder=1)
        ax.axvline(1, color=palette.limit, linewidth=1.2, linestyle=LIMIT_DASHES, zorder=1)
        (dots,) = ax.plot(across.placed(theirs), up.placed(mine), "o", markersize=4.5, markeredgewidth=0, alpha=0.6, zorder=2)
        dots.set(color=palette.candidate, label=f"{len(mine):,} rows", rasterized=len(mine) > MOST_POINTS)
        across.put(ax, "x")
        up.put(ax, "y")
        ax.set_xlabel("largest e of the row, incumbent")
        ax.set_ylabel("largest e of the row, candidate")
        legend(ax, palette, columns=3)

    return drawn(draw, f"largest e of each of {len(mine)} rows, candidate against incumbent", height=4.6)


def cells(by_head: Tensor) -> NDArray[np.float64]:
    """(q_heads, C) of a map (R, q_heads): C = R, or where that is over MOST_COLUMNS, the largest e of so many rows together."""
    rows, heads = by_head.shape
    together = -(-rows // MOST_COLUMNS)
    padded = np.concatenate([_numpy(by_head), np.zeros((-rows % together, heads))])
    grouped: NDArray[np.float64] = padded.reshape(-1, together, heads).max(1).T
    return grouped


def heat_map(one: CaseErrors) -> Picture | None:
    """The largest e of each judged row and head of a case, the worst ringed; None where its map was not kept."""
    if one.by_head is None:
        return None
    e = cells(one.by_head)
    heads, count = e.shape
    together = -(-len(one.rows) // MOST_COLUMNS)
    at = one.rows.tolist().index(one.worst.row) // together
    scale = scale_of(e.flatten())

    def draw(figure: Figure, palette: Palette) -> None:
        ax = axes(figure, palette)
        ramp, norm = _colours(palette, scale)
        shown = np.ma.masked_invalid(np.log2(e.clip(min=2.0 ** (scale.low - 1))))
        extent = (-0.5, count - 0.5, heads - 0.5, -0.5)
        image = ax.imshow(shown, cmap=ramp, norm=norm, aspect="auto", interpolation="none", extent=extent)
        for edge in range(one.case.family.group, heads, one.case.family.group):
            ax.axhline(edge - 0.5, color=palette.ink, linewidth=0.6)
        starts = [i for i in range(1, count) if one.sequence[i * together] != one.sequence[(i - 1) * together]]
        for edge in starts if len(starts) <= MOST_EDGES else []:
            ax.axvline(edge - 0.5, color=palette.ink, linewidth=0.6)
        for colour, width in ((palette.surface, 5.0), (palette.ink, 2.0)):  # readable on any cell
            ax.plot([at], [one.worst.head], "o", markersize=13, fillstyle="none", color=colour, markeredgewidth=width)
        ticks = list(range(0, count, -(-count // 14)))
        ax.set_xticks(ticks, [str(int(one.rows[i * together])) for i in ticks])
        ax.set_yticks(range(0, heads, -(-heads // 12)))
        ax.set_xlabel("query row" + (f", {together} a column" if together > 1 else ""))
        ax.set_ylabel("query head")
        powers = [*range(0, scale.low - 1, -max(1, -scale.low // 3)), *range(0, scale.high + 1, max(1, scale.high // 4))]
        bar = figure.colorbar(image, ax=ax, extend="min", pad=0.01, ticks=powers)
        bar.ax.set_yticklabels([power(p) for p in powers])
        bar.ax.tick_params(colors=palette.quiet)
        bar.ax.set_title("e", color=palette.quiet, fontsize=10)
        bar.minorticks_off()
        bar.outline.set_visible(False)
        if scale.lost:
            ax.plot([], [], "s", markersize=8, color=palette.lost, label="NaN or inf")
            legend(ax, palette, columns=1)

    about = f"heat map of e: {len(one.rows)} rows by {heads} heads; worst at row {one.worst.row} head {one.worst.head}"
    return drawn(draw, about, height=min(5.6, 2.2 + 0.075 * heads))


def _colours(palette: Palette, scale: Scale) -> tuple[Colormap, BoundaryNorm]:
    """Colours of log2 e: a ramp up to the limit, another beyond it, and one of its own for NaN and inf."""
    within = LinearSegmentedColormap.from_list("within", palette.within)(np.linspace(0, 1, SHADES + 1))
    beyond = LinearSegmentedColormap.from_list("beyond", palette.beyond)(np.linspace(0, 1, SHADES))
    ramp = ListedColormap(np.concatenate([within, beyond])).with_extremes(bad=palette.lost)
    bounds = [*np.linspace(scale.low, 0, SHADES + 1), *np.linspace(0, scale.high, SHADES + 1)[1:]]
    return ramp, BoundaryNorm(bounds, ramp.N, extend="min")


def _numpy(x: Tensor) -> NDArray[np.float64]:
    result: NDArray[np.float64] = x.double().numpy()
    return result
