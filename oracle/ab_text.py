"""What a knob changes as a table in plain words and numbers, as Markdown and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from oracle.ab import Ab
from oracle.ab_tests import LEVEL, Change, Ruling
from oracle.bench_text import machine
from oracle.drift_numbers import count, ends, number, percent
from oracle.markdown import code, fenced
from oracle.report import plain
from oracle.sheet import Sheet

VERSION = 1  # of the JSON form
COLUMNS = ("quantity", "before", "after", "after / before", "ruling")


def headline(found: Ab) -> str:
    """Which quantities moved and by how much, which stayed, and which cannot be told."""
    parts = []
    for ruling in Ruling:
        those = [c for c in found.changes if c.ruling is ruling]
        if those:
            parts.append(_TOLD[ruling].format(", ".join(map(_named[ruling], those)), percent(found.margin)))
    return "; ".join(parts)


def _moved(c: Change) -> str:
    return f"{c.name} by {_signed(c.ratio.value)} [{_signed(c.ratio.low)}, {_signed(c.ratio.high)}]"


def _name(c: Change) -> str:
    return c.name


def _untold(c: Change) -> str:
    return c.name if c.repeats_to_decide is None else f"{c.name} (needs about {count(c.repeats_to_decide, 'repeat')})"


_TOLD = {
    Ruling.MOVED: "moved: {0}",
    Ruling.STAYED: "stayed within {1}: {0}",
    Ruling.CANNOT_TELL: "cannot tell: {0}",
}
_named = {Ruling.MOVED: _moved, Ruling.STAYED: _name, Ruling.CANNOT_TELL: _untold}


def sheet(found: Ab) -> Sheet:
    """A row for each quantity."""
    return Sheet(
        title=f"{found.knob} against {found.before}: {found.about}", columns=COLUMNS, rows=tuple(map(_cells, found.changes))
    )


def _cells(c: Change) -> tuple[str, ...]:
    needs = f", needs about {count(c.repeats_to_decide, 'repeat')}" if c.repeats_to_decide else ""
    return c.name, _amount(c, c.before), _amount(c, c.after), f"{number(c.ratio.value)} {ends(c.ratio)}", f"{c.ruling}{needs}"


def notes(found: Ab) -> list[str]:
    """What was produced, how it was decided, and on what."""
    t, env = found.tokens, found.environment
    apart = "all of them the same" if t.first_apart is None else f"{t.same} of them the same, the first other at {t.first_apart}"
    steady = "the same in every repeat" if t.steady else "not the same in every repeat"
    return [
        f"tokens produced: {t.before} before, {t.after} after, {apart}; {steady}",
        f"stayed: the ratio is shown to be less than {percent(found.margin)} off, by two one-sided t tests on log ratios at "
        f"{percent(LEVEL)} each; moved: its 95 % interval leaves 1 out; {count(env['repeats'], 'repeat')} of both sides in turn, "
        "one process; accounts of the prefill are taken under the profiler, all else without it",
        "time per output token: the median of the steps after the first, which both sides take in turns; its ratio: the median "
        "over neighbouring steps of both",
        f"peak memory is {env['peak_is']}: of the prompt and two tokens, as the time to first token, each side by itself",
        *([f"once the prompt is read, both sides call {env['decode']} there"] if env["decode"] else []),
        *(f"not measured: {text}" for text in found.unmeasured),
        machine(env),
        f"again: {env['command']}",
    ]


def ab_markdown(found: Ab) -> str:
    """The whole report; the same report is the same text."""
    title = f"{code(found.knob)} against {code(found.before)}: {code(found.about)}"
    table = sheet(found).markdown().replace(sheet(found).title, title, 1).rstrip()
    lines = "\n".join(f"- {note}" for note in notes(found)[:-1])
    return f"{table}\n\n{headline(found)}.\n\n{lines}\n\n{fenced(found.environment['command'])}\n"


def ab_json(found: Ab) -> dict[str, Any]:
    """The report as JSON."""
    whole: dict[str, Any] = plain(asdict(found))
    return {"format": VERSION} | whole


def _signed(ratio: float) -> str:
    change = 100 * (ratio - 1)
    return f"{'+' if change > 0 else ''}{number(change)} %"


def _amount(c: Change, value: float) -> str:
    return f"{number(value / 2**20)} MiB" if c.unit == "bytes" else f"{number(1000 * value)} ms"
