"""A drift report for a terminal: what was decided, then one table, on one screen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oracle import drift_summary as summary
from oracle.checkpoints.decision import Ruling
from oracle.checkpoints.drifted import Attribution, Drift
from oracle.drift_numbers import count, number, visible

STYLES = {Ruling.ACCEPT: "bold green", Ruling.REJECT: "bold red", Ruling.INCONCLUSIVE: "bold yellow"}
LAYERS = 8  # shown of an attribution: those with the largest KL


def drift_text(drift: Drift) -> RenderableType:
    """The report for a terminal; the same report is the same text, and nothing in a name or a text is markup or control."""
    lines: list[RenderableType] = [_headline(drift), Text(f"measured {summary.measured(drift)}"), "", _comparison(drift)]
    if drift.decisions:
        lines += ["", *(_decision(drift, at) for at in range(len(drift.decisions)))]
    for attribution in drift.attributions:
        lines += ["", *_attribution(drift, attribution)]
    if drift.waypoints:
        lines += ["", _waypoints(drift)]
    if any(row.figures.worst for row in drift.rows):
        lines += ["", _worst(drift)]
    hashes = ", ".join(f"{key} {value}" for key, value in summary.identity(drift, summary.HASH))
    return Group(*lines, "", Text(f"{hashes}; again: {summary.again(drift)}", style="dim"))


def _headline(drift: Drift) -> Text:
    one = summary.leading(drift)
    style = "bold" if one is None else STYLES[one.ruling]
    name = "DRIFT" if one is None else one.ruling.upper()
    return Text.assemble((name, style), "  ", summary.headline(drift))


def _decision(drift: Drift, at: int) -> Text:
    one = drift.decisions[at]
    return Text.assemble((f"{one.ruling:12s}", STYLES[one.ruling]), f" {summary.pair(one)}: {visible(one.reason)}")


def _table(title: str, columns: Iterable[str], words: set[int]) -> Table:
    """A table whose columns hold numbers, but for those of `words`."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for at, column in enumerate(columns):
        if at in words:
            table.add_column(column, overflow="fold", header_style="dim")
        else:
            table.add_column("\n".join(column.rsplit(" ", 1)), no_wrap=True, justify="right", vertical="top", header_style="dim")
    return table


def _add(table: Table, cells: Iterable[str | Text], style: str = "") -> None:
    """One row; a string is text, and no markup of rich."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)


def _comparison(drift: Drift) -> Table:
    table = _table(f"measured from {visible(drift.reference)}", summary.COLUMNS, {0})
    for line in summary.comparison(drift):
        name = Text(line.cells[0])
        if line.note:
            name.append(f"\n  {line.note}", style="italic")
        _add(table, (name, *line.cells[1:]), "cyan" if line.note == summary.FLOOR else "")
    return table


def _attribution(drift: Drift, attribution: Attribution) -> Iterator[RenderableType]:
    table = _table(f"layer by layer: {visible(attribution.configuration)}", summary.LAYER_COLUMNS, {1, 4})
    for line in summary.layers(drift, attribution, LAYERS):
        _add(table, line.cells, "bold" if line.kept else "")
    yield table
    if (rest := len(attribution.swaps) - LAYERS) > 0:
        yield Text(f"and {count(rest, 'more layer')}, each with less", style="dim")
    yield Text(summary.attributed(drift, attribution))


def _waypoints(drift: Drift) -> Table:
    table = _table("waypoints, against the reference run whole", summary.WAYPOINT_COLUMNS, {0, 1, 6, 8})
    for one in drift.waypoints:
        fine = summary.within_line(one) and one.exact is not False
        _add(table, summary.waypoint(one), "" if fine else "yellow")
    return table


def _worst(drift: Drift) -> Table:
    table = _table("worst tokens", summary.WORST_COLUMNS, {0, 2, 3})
    for spot in summary.spots(drift):
        context = Text.assemble((visible("".join(spot.before)), "dim"), " ", (visible(spot.piece), "reverse"))
        _add(table, (visible(spot.configuration), number(spot.kl), spot.where, context))
    return table
