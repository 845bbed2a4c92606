"""A drift report as one HTML file that needs nothing else: no network, no script, no font."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from oracle import drift_summary as summary
from oracle.checkpoints.drifted import Attribution, Drift
from oracle.checkpoints.figures import Band
from oracle.drift_numbers import ends, number, percent, visible
from oracle.drift_passages import LEVELS, passages
from oracle.html_report import Plate, check_installed, plate, rendered

BandKind = Literal["by_position", "by_confidence"]
PICTURED: dict[BandKind, tuple[str, str]] = {
    "by_position": ("KL by position", "In bands of the position in a block: drift that grows with the context shows here."),
    "by_confidence": (
        "KL by the reference's confidence",
        "In bands of the probability that the reference gives to its best token.",
    ),
}
BANDS = {"by_position": "By position", "by_confidence": "By the reference's confidence", "by_document": "By document"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """One attribution, as picture, sentence and table."""

    plate: Plate
    sentence: str
    lines: list[summary.LayerLine]


@dataclass(frozen=True, slots=True, kw_only=True)
class BandRow:
    """One band, in every configuration."""

    label: str
    tokens: str
    cells: tuple[tuple[str, str, str], ...]  # KL, its interval, top-1


def drift_html(drift: Drift) -> str:
    """The report.  The same drift gives the same text.  Raises InputError where a library is missing."""
    check_installed()
    return rendered("drift.html", **_values(drift))


def _values(drift: Drift) -> dict[str, Any]:
    """What the template shows."""
    row = summary.shown(drift)
    decided = summary.leading(drift)
    return {
        "ruling": str(decided.ruling) if decided else "drift",
        "title": visible(decided.candidate if decided else drift.reference),
        "headline": summary.headline(drift),
        "measured": summary.measured(drift),
        "reference": visible(drift.reference),
        "columns": summary.COLUMNS,
        "comparison": summary.comparison(drift),
        "decisions": [(str(d.ruling), summary.pair(d), visible(d.reason)) for d in drift.decisions],
        "plates": list(_plates(drift)),
        "passages": [] if row is None else passages(drift, row),
        "shown": "" if row is None else visible(row.configuration),
        "levels": [f"above {level} %" for level in LEVELS],
        "attributions": [_layers(drift, a) for a in drift.attributions],
        "layer_columns": summary.LAYER_COLUMNS,
        "waypoints": [summary.waypoint(w) for w in drift.waypoints],
        "waypoint_columns": summary.WAYPOINT_COLUMNS,
        "spots": [_spot(spot) for spot in summary.spots(drift)],
        "worst_columns": summary.WORST_COLUMNS,
        "names": [_named(drift, at) for at in range(len(drift.rows))],
        "figures": _figures(drift),
        "bands": [table for table in (_bands(drift, of, title) for of, title in BANDS.items()) if table["rows"]],
        "ran": [_ran(drift, at) for at in range(len(drift.rows))],
        "identity": summary.identity(drift),
        "again": summary.again(drift),
        "setting": summary.setting(drift),
    }


def _plates(drift: Drift) -> Iterator[Plate]:
    """The pictures of all configurations; the first is of one of them, along the text."""
    from oracle import drift_charts as charts

    row = summary.shown(drift)
    if row is None:
        return
    about = f"{visible(row.configuration)}, every scored token, in the order of the text."
    yield plate("KL along the text", about, charts.along(drift, row))
    text = "The share of tokens at or above each KL. The floor's curve is what another, equally correct kernel does by itself."
    yield plate("Distribution of the KL", text, charts.distribution(drift))
    for which, (title, text) in PICTURED.items():
        if picture := charts.bands(drift, which):
            yield plate(title, text, picture)


def _layers(drift: Drift, a: Attribution) -> Layers:
    from oracle import drift_charts as charts

    title = f"Layer by layer: {visible(a.configuration)}"
    text = "One layer at a time swapped into the reference, all else as in the reference."
    picture = plate(title, text, charts.layers(drift, a))
    return Layers(plate=picture, sentence=summary.attributed(drift, a), lines=summary.layers(drift, a))


def _spot(spot: summary.Spot) -> dict[str, str]:
    return {
        "configuration": visible(spot.configuration),
        "kl": number(spot.kl),
        "where": spot.where,
        "before": visible("".join(spot.before)),
        "piece": visible(spot.piece),
    }


def _named(drift: Drift, at: int) -> str:
    row = drift.rows[at]
    return visible(row.configuration) + (" (the floor)" if row.floor else "")


def _figures(drift: Drift) -> list[tuple[str, list[tuple[str, str]]]]:
    """(what, (value, interval) of each configuration) of every figure."""
    whats: dict[str, list[tuple[str, str]]] = {}
    for row in drift.rows:
        for what, value, interval in summary.figures(row.figures):
            whats.setdefault(what, []).append((value, interval))
    return list(whats.items())


def _bands(drift: Drift, which: str, title: str) -> dict[str, Any]:
    """A table of bands; a configuration without a band that others have shows nothing there."""
    found: list[dict[str, Band]] = [{band.label: band for band in getattr(row.figures, which)} for row in drift.rows]
    rows = []
    for label in dict.fromkeys(label for bands in found for label in bands):
        those = [bands.get(label) for bands in found]
        cells = tuple(("", "", "") if b is None else _band(b) for b in those)
        tokens = next(f"{b.tokens:,}" for b in those if b is not None)
        rows.append(BandRow(label=visible(label), tokens=tokens, cells=cells))
    return {"title": title, "what": title.split()[-1], "rows": rows}


def _band(b: Band) -> tuple[str, str, str]:
    return number(b.kl.value), ends(b.kl), percent(b.agree1)


def _ran(drift: Drift, at: int) -> dict[str, Any]:
    """Which path each layer took, and how fast it all was."""
    row = drift.rows[at]
    calls = [(visible(path), f"{count:,}") for path, count in row.ran.items()]
    return {"name": _named(drift, at), "speed": f"{number(row.tokens_per_second)} tokens/s", "calls": calls}
