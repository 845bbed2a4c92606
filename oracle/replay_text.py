"""What a search and a replay have shown, as text: five lines a fault, and the numbers round its worst element."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from oracle.case_text import five_lines, in_words
from oracle.fuzz import Found, Searched
from oracle.judged import Judged
from oracle.replay import Around, Replayed
from oracle.verdict import Finding


def found_text(kernel: str, found: Found, path: Path) -> str:
    """A fault in five lines, and what is to be known about how it was found."""
    notes = [f"found after {found.after} examples, shrunk in {found.shrunk_in} more"]
    if not found.finished:
        notes.append("shrinking was cut short: a smaller case may show it too")
    if found.alone is False:
        notes.append("it shows only after other calls: in a fresh process this case alone is fine")
    return "\n".join([*five_lines(kernel, found.judged, _replay(path)), "", *notes])


def inspect_text(kernel: str, judged: Judged, count: int, path: Path) -> str:
    """The largest error that is no fault, in five lines, under what it means."""
    head = f"inspect: {count} examples with e > 1 and e_det <= 1, which a correct kernel can reach on inputs chosen against it"
    return "\n".join([f"{head}; the largest:", *five_lines(kernel, judged, _replay(path))])


def searched_text(searched: Searched) -> str:
    """One line: how much was searched, and the largest errors."""
    largest = f"max e {searched.max_e:.3g}, max e_det {searched.max_e_det:.3g}, max e_lse {searched.max_e_lse:.3g}"
    state = "interrupted" if searched.interrupted else "something found" if searched.found else "nothing found"
    count = len(searched.cases)
    return f"{state}: {count} {'example' if count == 1 else 'examples'} in {searched.seconds:.0f} s; {largest}"


def _replay(path: Path) -> str:
    return f"oracle replay {path}"


def replayed_text(one: Replayed) -> str:
    """One case again: expected, got, errors, neighbours and edges."""
    head = f"{one.file.path}  {one.kernel}"
    if one.judged is None:
        return f"SKIPPED  {head}: {one.refused}"
    return "\n".join([f"{_outcome(one.judged)}  {head}", *_body(one, one.judged)])


def _outcome(judged: Judged) -> str:
    return "WRONG" if judged.faults else "INSPECT" if judged.inspect else "FINE"


def _body(one: Replayed, judged: Judged) -> Iterator[str]:
    findings = (*judged.faults, *judged.inspect)
    if findings:
        yield from five_lines(one.kernel, judged, _replay(one.file.path))[:-1]
    else:
        yield f"called   {in_words(judged.case)}"
    yield f"errors   {_errors(judged)}"
    yield from (f"also     {_also(finding)}" for finding in findings[1:])
    if one.around is not None:
        yield from _table(one.around)


def _errors(judged: Judged) -> str:
    if judged.seen.candidate is None:
        return "none measured: it gave no result"
    lse = "not given" if judged.e_lse is None else f"{judged.e_lse:.3g}"
    return f"max e {judged.e:.3g} (limit 1), max e_det {judged.e_det:.3g}, max e_lse {lse}; {judged.seen.calls} calls"


def _also(finding: Finding) -> str:
    return f"{finding.reason}: {finding.text}"


def _table(around: Around) -> Iterator[str]:
    """Rows by columns: got, expected and e in each cell; the element itself is marked."""
    what = f"head {around.head}, rows by columns" if around.head >= 0 else "LSE, rows by heads"
    word = "column" if around.head >= 0 else "head"
    yield f"around   {what}: got / expected / error in units of its limit"
    cells = [[_cell(around, i, j) for j in range(len(around.columns))] for i in range(len(around.rows))]
    header = [f"{word} {column}" for column in around.columns]
    widths = [max(len(row[j]) for row in [header, *cells]) for j in range(len(header))]
    label = max(len(f"row {row}") for row in around.rows)
    yield f"  {'':{label}}  {'  '.join(f'{text:>{width}}' for text, width in zip(header, widths, strict=True))}".rstrip()
    for row, texts in zip(around.rows, cells, strict=True):
        line = "  ".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))
        yield f"{'>' if row == around.at[0] else ' '} {f'row {row}':{label}}  {line}".rstrip()


def _cell(around: Around, i: int, j: int) -> str:
    mark = "*" if (around.rows[i], around.columns[j]) == around.at else ""
    return f"{mark}{float(around.got[i, j]):.4g} / {float(around.want[i, j]):.4g} / {float(around.units[i, j]):.2g}"
