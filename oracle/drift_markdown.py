"""A drift report as GitHub-flavoured Markdown, short enough for the summary of a CI step.

Everything that comes from a text, a tokenizer or a file's name stands in a code span: it can neither end a table, nor link, nor
mention anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from oracle import drift_summary as summary
from oracle.checkpoints.decision import Decision, Ruling
from oracle.checkpoints.drifted import Attribution, Drift
from oracle.drift_numbers import number, visible
from oracle.markdown import code, fenced

SIGNS = {Ruling.ACCEPT: "✅", Ruling.REJECT: "❌", Ruling.INCONCLUSIVE: "❔"}


def drift_markdown(drift: Drift) -> str:
    """The report; the same report is the same text."""
    one = summary.leading(drift)
    sign = "DRIFT" if one is None else f"{SIGNS[one.ruling]} {one.ruling.upper()}"
    blocks = [
        f"## {sign}: drift from {code(visible(drift.reference))}",
        f"{summary.headline(drift, code)}\n\nMeasured: {summary.measured(drift)}.",
        _table(summary.COLUMNS, map(_configuration, summary.comparison(drift)), {0}),
        *_decisions(drift),
        *(text for one in drift.attributions for text in _attribution(drift, one)),
        *_waypoints(drift),
        *_worst(drift),
        f"### Again\n\n{fenced(summary.again(drift))}\n\n{code(summary.setting(drift))}",
        "\n".join(f"- {code(key)}: {code(value)}" for key, value in summary.identity(drift)),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _configuration(line: summary.Line) -> list[str]:
    name, kl, times, *rest = _quoted(line.cells, {0}, strong=line.note == summary.FLOOR)
    return [name, kl, f"{times}, {line.note}" if line.note else times, *rest]


def _decisions(drift: Drift) -> Iterator[str]:
    if drift.decisions:
        yield "### Decisions"
        yield "\n".join(map(_decision, drift.decisions))


def _decision(d: Decision) -> str:
    return f"- {SIGNS[d.ruling]} {d.ruling}: {summary.pair(d, code)}: {code(visible(d.reason))}"


def _attribution(drift: Drift, a: Attribution) -> Iterator[str]:
    yield f"### Layer by layer: {code(visible(a.configuration))}"
    lines = summary.layers(drift, a)
    yield _table(summary.LAYER_COLUMNS, (_quoted(line.cells, {1, 4}, strong=line.kept) for line in lines), {1, 4})
    yield summary.attributed(drift, a, code)


def _waypoints(drift: Drift) -> Iterator[str]:
    if drift.waypoints:
        yield "### Waypoints, against the reference run whole"
        yield _table(summary.WAYPOINT_COLUMNS, (_quoted(summary.waypoint(w), {0, 1}) for w in drift.waypoints), {0, 1, 6, 8})


def _worst(drift: Drift) -> Iterator[str]:
    if spots := summary.spots(drift):
        yield "### Worst tokens"
        yield _table(summary.WORST_COLUMNS, map(_spot, spots), {0, 2, 3})


def _spot(spot: summary.Spot) -> tuple[str, ...]:
    before = visible("".join(spot.before))
    context = f"{_in_cell(before)} **{_in_cell(visible(spot.piece))}**" if before else f"**{_in_cell(spot.piece)}**"
    name = _in_cell(visible(spot.configuration))
    return name, number(spot.kl), _in_cell(spot.where), context


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]], words: set[int]) -> str:
    """A table whose columns hold numbers, but for those of `words`."""
    columns = list(columns)
    rule = ["---" if at in words else "--:" for at in range(len(columns))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows))


def _quoted(cells: Iterable[str], foreign: set[int], *, strong: bool = False) -> list[str]:
    """The cells, those of `foreign` as code; a strong row has its first one in bold."""
    texts = [_in_cell(cell) if at in foreign else cell for at, cell in enumerate(cells)]
    return [f"**{texts[0]}**", *texts[1:]] if strong else texts


def _in_cell(text: str) -> str:
    """`text` as a code span in a table; a backslash before a bar gets a space, or it would free the bar to end the cell."""
    return code(text.replace("\\|", "\\ |")).replace("|", "\\|")
