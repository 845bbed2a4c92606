"""A verdict as GitHub-flavoured Markdown, short enough for the summary of a CI step.

Everything that a kernel or its author can put into a text stands in a code span: it can neither end a table, nor link, nor
mention anybody.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from oracle.summary import Gap, Told, again, figures, headline, judged, not_covered, reasons, setting
from oracle.verdict import Outcome, Verdict

SIGNS = {Outcome.ACCEPT: "✅", Outcome.REJECT: "❌", Outcome.INCONCLUSIVE: "❔", Outcome.NOT_COVERED: "❔"}
REASONS, ITEMS, WIDTH = 6, 12, 400  # reasons shown, items of a list, and characters of a text


def verdict_markdown(verdict: Verdict) -> str:
    """The verdict; the same verdict is the same text."""
    blocks = [
        f"## {SIGNS[verdict.outcome]} {verdict.outcome.upper()} {code(verdict.candidate)}",
        f"{headline(verdict, code)}\n\nJudged: {judged(verdict)}.",
        *_reasons(reasons(verdict)),
        *_figures(verdict),
        *(["\n".join(f"- note: {code(note)}" for note in verdict.notes)] if verdict.notes else []),
        "### Not covered",
        "\n".join(map(_gap, not_covered(verdict))),
        f"### Again\n\n{fenced(again(verdict))}\n\n{code(setting(verdict))}",
    ]
    return "\n\n".join(blocks) + "\n"


def code(text: str) -> str:
    """`text` as a code span on one line, at most WIDTH characters of it, whatever it holds."""
    line = " ".join(text.split())
    line = line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    space = " " if line[:1] == "`" or line[-1:] == "`" or not line else ""
    return f"{fence}{space}{line}{space}{fence}"


def fenced(text: str) -> str:
    """`text` as a code block of one line, whatever it holds."""
    fence = "`" * max(3, max(map(len, re.findall("`+", text)), default=0) + 1)
    return f"{fence}sh\n{' '.join(text.split())}\n{fence}"


def _reasons(told: list[Told]) -> Iterator[str]:
    lines = []
    for one in told[:REASONS]:
        where = f" on {code(one.smallest.case)}" if one.smallest.case else ""
        more = f" (and {one.more} more)" if one.more else ""
        lines.append(f"- **{one.reason}** ({one.meaning}){where}: {code(one.smallest.text)}{more}")
    if len(told) > REASONS:
        lines.append(f"- and {len(told) - REASONS} more reasons: {', '.join(one.reason for one in told[REASONS:])}")
    if lines:
        yield "### Reasons, each with its smallest evidence"
        yield "\n".join(lines)


def _figures(verdict: Verdict) -> Iterator[str]:
    rows = figures(verdict)
    if not rows:
        yield "No figures: it gave no result."
        return
    yield f"Against {code(verdict.incumbent)}:"
    yield "\n".join(["| measured | value | |", "|---|---|---|", *(f"| {' | '.join(map(_cell, row))} |" for row in rows)])


def _cell(text: str) -> str:
    """A text of ours in a table."""
    return text.replace("|", "\\|")


def _gap(gap: Gap) -> str:
    return f"- {gap.why}: {_few(gap.items)}"


def _few(items: Iterable[str]) -> str:
    texts = [code(item) for item in items]
    rest = len(texts) - ITEMS
    return ", ".join(texts[:ITEMS]) + (f" and {rest} more" if rest > 0 else "")
