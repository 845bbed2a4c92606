"""The pictures of a drift report: KL along the text, its distribution, by position and confidence, and layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from numpy.typing import NDArray

from oracle.canvas import DARK, LIGHT, LIMIT_DASHES, Palette, Picture, axes, drawn, legend
from oracle.checkpoints.drifted import Attribution, Drift, Row
from oracle.checkpoints.figures import Band, Estimate
from oracle.checkpoints.texts import Text

MOST_BINS = 240  # steps along the text
MOST_EDGES = 48  # lines drawn between documents
MOST_POINTS = 200  # of a curve
LONGEST = 36  # characters of a name
MOST_TOKENS = 0.9  # share of tokens that the picture of a distribution is about
LEAST = 1e-12  # nats: KL at or under it is drawn as "less"
OTHERS = {  # colours of the third configuration and on
    LIGHT: ("#14713d", "#7a3fb0", "#8a6d00", "#0d7f86", "#a3316f"),
    DARK: ("#58c98a", "#c39bf0", "#dcc04e", "#4cc5cc", "#f08abf"),
}

Values = NDArray[np.float64]


def along(drift: Drift, row: Row) -> Picture:
    """Mean and largest KL over stretches of the text, in its order, with the mean of the floor and the edges of documents."""
    mean, largest, edges = stretches(row, drift.text)
    floor = None if drift.floor is None or row.floor else stretches(drift.floor, drift.text)[0]
    scale = Nats(mean, largest, *([] if floor is None else [floor]))
    changed = (np.flatnonzero(np.diff(drift.text.document.numpy())) + 1).tolist()

    def draw(figure: Figure, palette: Palette) -> None:
        ax = axes(figure, palette)
        for edge in changed if len(changed) <= MOST_EDGES else []:
            ax.axvline(edge, color=palette.faint, linewidth=0.8, zorder=0)
        low = scale.ends[0]
        ax.stairs(scale.placed(largest), edges, baseline=low, fill=True, color=palette.candidate, alpha=0.25, label="largest")
        ax.stairs(scale.placed(mean), edges, baseline=None, color=palette.candidate, linewidth=1.6, label="mean")
        if floor is not None:
            ax.stairs(scale.placed(floor), edges, baseline=None, color=palette.quiet, linewidth=1.2, label="mean of the floor")
        if 0 < len(changed) <= MOST_EDGES:
            ax.plot([], [], color=palette.faint, linewidth=1.5, label="next document")
        scale.put(ax, "y")
        ax.set_xlim(edges[0], edges[-1])
        ax.set_xlabel("token of the text")
        ax.set_ylabel("KL, nats")
        legend(ax, palette, columns=4)

    return drawn(draw, f"KL along the text: {len(drift.text.token):,} tokens in {len(mean)} stretches")


def stretches(row: Row, text: Text) -> tuple[Values, Values, Values]:
    """(mean KL (S,), largest KL (S,), edges (S + 1,)) of S <= MOST_BINS stretches of the text; NaN counts as inf."""
    kl = _lost_is_inf(row.divergence.kl.cpu().numpy())
    edges = np.unique(np.linspace(0, len(kl), min(MOST_BINS, len(kl)) + 1).round().astype(np.int64))
    mean = np.add.reduceat(kl, edges[:-1]) / np.diff(edges)
    return mean, np.maximum.reduceat(kl, edges[:-1]), edges.astype(np.float64)


def distribution(drift: Drift) -> Picture:
    """The share of tokens whose KL is above a value, over the value, both by powers of ten, for every configuration."""
    curves = [exceeded(row) for row in drift.rows]
    scale = Nats(*(kl for kl, _ in curves), least=max(LEAST, min(float(kl[share >= MOST_TOKENS].max()) for kl, share in curves)))
    least = min(float(share.min()) for _, share in curves)

    def draw(figure: Figure, palette: Palette) -> None:
        ax = axes(figure, palette)
        for row, (kl, share), (colour, dashes) in zip(drift.rows, curves, _styles(drift.rows, palette), strict=True):
            (line,) = ax.step(scale.placed(kl), share, where="pre", linewidth=1.8, label=_name(row))
            line.set(color=colour, linestyle=dashes)
        scale.put(ax, "x")
        ax.set_yscale("log")
        ax.set_ylim(least / 1.5, 1.2)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.set_xlabel("KL of a token, nats")
        ax.set_ylabel("share of tokens at or above it")
        legend(ax, palette, columns=3)

    return drawn(draw, f"distribution of the KL of {len(drift.text.token):,} tokens, {len(curves)} configurations", height=4.4)


def exceeded(row: Row) -> tuple[Values, Values]:
    """(KL (P,) rising, share of tokens at or above it (P,)), at no more than MOST_POINTS ranks, dense at the largest."""
    kl = np.sort(_lost_is_inf(row.divergence.kl.cpu().numpy()))[::-1]
    ranks = np.unique(np.geomspace(1, len(kl), min(MOST_POINTS, len(kl))).round().astype(np.int64))
    return kl[ranks - 1][::-1], ranks[::-1] / len(kl)


def bands(drift: Drift, which: Literal["by_position", "by_confidence"]) -> Picture | None:
    """Mean KL with its 95 % interval in bands of the position or of the reference's confidence; None where there are none."""
    found: list[tuple[Band, ...]] = [getattr(row.figures, which) for row in drift.rows]
    labels = list(dict.fromkeys(band.label for those in found for band in those))
    if not labels:
        return None
    scale = Nats(*(_ends(band.kl) for those in found for band in those))
    what = {"by_position": "position in the block", "by_confidence": "probability of the reference's best token"}[which]

    def draw(figure: Figure, palette: Palette) -> None:
        ax = axes(figure, palette)
        styles = _styles(drift.rows, palette)
        for at, (row, those, (colour, dashes)) in enumerate(zip(drift.rows, found, styles, strict=True)):
            shift = 0.5 * ((at + 0.5) / len(found) - 0.5)  # side by side, none behind another
            x = [labels.index(band.label) + shift for band in those]
            middle, low, high = (
                scale.placed(np.array([getattr(band.kl, end) for band in those])) for end in ("value", "low", "high")
            )
            ax.errorbar(
                x, middle, yerr=(middle - low, high - middle), fmt="o", markersize=4, capsize=2.5, color=colour, label=_name(row)
            )
            ax.plot(x, middle, color=colour, linestyle=dashes, linewidth=1, alpha=0.6)
        scale.put(ax, "y")
        ax.set_xticks(range(len(labels)), [_plain(label) for label in labels])
        ax.set_xlabel(what)
        ax.set_ylabel("KL, nats: mean, 95 % interval")
        legend(ax, palette, columns=3)

    return drawn(draw, f"mean KL by {what}, {len(labels)} bands")


def layers(drift: Drift, attribution: Attribution) -> Picture:
    """The KL of each layer swapped alone, with its 95 % interval, from 0 and not by powers: they add up.  Beside it the floor."""
    swaps = attribution.swaps
    floor = None if drift.floor is None else drift.floor.figures.kl.value
    every = np.array([getattr(s.kl, end) for s in swaps for end in ("value", "high")] + ([] if floor is None else [floor]))
    right = 1.05 * float(every[np.isfinite(every) & (every > 0)].max(initial=LEAST))

    def placed(end: str) -> Values:
        ends: Values = np.array([getattr(s.kl, end) for s in swaps], dtype=np.float64)
        return np.nan_to_num(ends, nan=right, posinf=right, neginf=0).clip(0, right)

    def draw(figure: Figure, palette: Palette) -> None:
        ax = axes(figure, palette)
        colours = dict(zip(dict.fromkeys(s.kind for s in swaps), _colours(palette), strict=False))
        at = np.arange(len(swaps))
        value, low, high = (placed(end) for end in ("value", "low", "high"))
        lost = [not math.isfinite(s.kl.value) for s in swaps]
        shades = [palette.lost if gone else colours[s.kind] for s, gone in zip(swaps, lost, strict=True)]
        for patch, swap in zip(ax.barh(at, value, height=0.7, color=shades), swaps, strict=True):
            if swap.layer in attribution.kept:
                patch.set(facecolor=(patch.get_facecolor(), 0.35), edgecolor=palette.ink, linewidth=1.2)
        spread = (np.maximum(value - low, 0), np.maximum(high - value, 0))
        ax.errorbar(value, at, xerr=spread, fmt="none", ecolor=palette.ink, elinewidth=1, capsize=2.5)
        if floor is not None:
            x = floor if math.isfinite(floor) else right
            ax.axvline(x, color=palette.limit, linewidth=1.2, linestyle=LIMIT_DASHES, label="the floor")
        marks = {f"{kind} layer": (colour, colour) for kind, colour in colours.items()}
        marks |= {"kept as in the reference": (palette.surface, palette.ink)} if attribution.kept else {}
        marks |= {"NaN, inf": (palette.lost, palette.lost)} if any(lost) else {}
        for label, (fill, edge) in marks.items():
            ax.plot([], [], "s", markersize=8, color=fill, markeredgecolor=edge, label=label)
        ax.set_yticks(at, [str(s.layer) for s in swaps])
        ax.set_xlim(0, right)
        ax.set_ylim(len(swaps) - 0.4, -0.6)
        ax.set_xlabel("KL of the layer alone, nats: mean, 95 % interval")
        ax.set_ylabel("layer")
        legend(ax, palette, columns=5)

    return drawn(draw, f"KL of each of {len(swaps)} layers swapped alone", height=min(9.0, 1.6 + 0.24 * len(swaps)))


class Nats:
    """How KL lies on an axis, by powers of ten: NaN and inf at its upper end, what is not above `least` at its lower end."""

    def __init__(self, *values: Values, least: float = LEAST) -> None:
        every = np.concatenate(values)
        inner = every[np.isfinite(every) & (every > least)]
        low, high = (inner.min(), inner.max()) if len(inner) else (1e-3, 1.0)
        self.low, self.high = math.floor(math.log10(low)), math.ceil(math.log10(high) + 0.01)
        self.less = bool((every <= least).any())
        self.lost = not bool(np.isfinite(every).all())

    @property
    def ends(self) -> tuple[float, float]:
        """The values at the ends of the axis."""
        return 10.0 ** (self.low - self.less), 10.0 ** (self.high + self.lost)

    def placed(self, values: Values) -> Values:
        """Where the values are drawn: all of them are."""
        return np.nan_to_num(values, nan=math.inf, posinf=self.ends[1], neginf=self.ends[0]).clip(*self.ends)

    def ticks(self) -> dict[float, str]:
        """Value -> label."""
        step = -(-(self.high - self.low) // 9)
        ends = {self.ends[0]: "less"} if self.less else {}
        powers = {10.0**p: f"{10.0**p:g}" for p in range(self.low, self.high + 1, step)}
        return ends | powers | ({self.ends[1]: "NaN, inf"} if self.lost else {})

    def put(self, ax: Axes, axis: Literal["x", "y"]) -> None:
        """The axis has this scale."""
        at = ax.xaxis if axis == "x" else ax.yaxis
        (ax.set_xscale if axis == "x" else ax.set_yscale)("log")
        at.set_ticks(list(self.ticks()), list(self.ticks().values()))
        at.set_minor_locator(NullLocator())
        (ax.set_xlim if axis == "x" else ax.set_ylim)(*self.ends)


def _ends(e: Estimate) -> Values:
    return np.array([e.value, e.low, e.high])


def _lost_is_inf(kl: Values) -> Values:
    return np.nan_to_num(kl, nan=math.inf, posinf=math.inf, neginf=-math.inf)


def _colours(palette: Palette) -> tuple[str, ...]:
    return (palette.candidate, palette.incumbent, *OTHERS[palette])


def _styles(rows: Sequence[Row], palette: Palette) -> Iterator[tuple[str, str]]:
    """(colour, dashes) of each configuration; the floor is quiet, and where the colours are used up the dashes change."""
    colours, used = _colours(palette), 0
    for row in rows:
        if row.floor:
            yield palette.quiet, "--"
        else:
            yield colours[used % len(colours)], ("-", "-.", ":")[used // len(colours) % 3]
            used += 1


def _name(row: Row) -> str:
    name = _plain(row.configuration)
    name = name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."
    return f"{name} (the floor)" if row.floor else name


def _plain(text: str) -> str:
    """Signs that every font has: what a page's font lacks cannot be measured."""
    return "".join(c if c.isprintable() else " " for c in text).encode("ascii", "backslashreplace").decode()
