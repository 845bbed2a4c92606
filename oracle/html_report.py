"""A verdict and its evidence as one HTML file that needs nothing else: no network, no script, no font."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING

import tomli_w

from oracle import summary
from oracle.case_text import in_words
from oracle.cases import to_toml
from oracle.errors import InputError
from oracle.evidence import CaseErrors, Evidence
from oracle.places import edges, place
from oracle.verdict import Verdict

if TYPE_CHECKING:
    from oracle.canvas import Picture

LIBRARIES = ("jinja2", "matplotlib")  # of the extra `report`
FEW_ROWS = 16  # a case of fewer rows shows no pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Plate:
    """A picture with what is written round it."""

    title: str
    caption: str
    about: str
    light: str  # data URI
    dark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstCase:
    """One of the worst cases, as a row of a table."""

    name: str
    words: str
    e: float
    incumbent: float | None
    where: str
    edges: str
    replay: str  # commands for a shell: the case is saved, and judged again


def check_installed() -> None:
    """Raises InputError where a library that draws the report is missing."""
    if missing := [name for name in LIBRARIES if find_spec(name) is None]:
        raise InputError(f"--html: {missing[0]} is not installed; pip install 'attention-oracle[report]'")


def rendered(name: str, **values: object) -> str:
    """The template of that name with `values`, all text in them escaped.  Raises InputError where a library is missing."""
    check_installed()
    import jinja2

    templates = files("oracle").joinpath("templates")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda file: templates.joinpath(file).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(values)


def html_report(verdict: Verdict, evidence: Evidence) -> str:
    """The report.  The same verdict and evidence give the same text.  Raises InputError where a library is missing."""
    check_installed()
    return rendered(
        "report.html",
        verdict=verdict,
        headline=summary.headline(verdict),
        judged=summary.judged(verdict),
        in_short=summary.in_short(verdict),
        reasons=summary.reasons(verdict),
        figures=summary.figures(verdict),
        plates=list(_plates(verdict, evidence)),
        worst=[_worst(verdict.candidate, one) for one in evidence.worst],
        gaps=summary.not_covered(verdict),
        again=summary.again(verdict),
        setting=summary.setting(verdict),
    )


def _plates(verdict: Verdict, evidence: Evidence) -> Iterator[Plate]:
    """The pictures: where the errors lie in one case or two, and between them those of all cases."""
    from oracle import charts

    pictured = _pictured(verdict, evidence)
    for which, one in pictured:
        text = f"{which}. {_lies(one)} Sequences lie over one another, each from its own start."
        yield plate("Error by position", text, charts.by_position(one))
    if evidence.candidate.elements:
        text = (
            "All judged elements of out, of all cases. A correct kernel's lie left of the limit, and where the incumbent's lie."
        )
        yield plate("Distribution of the error", text, charts.distribution(evidence.candidate, evidence.incumbent))
    if rows := charts.row_by_row(evidence):
        text = "All judged rows of all cases. Above the diagonal, the candidate is farther from the exact answer."
        yield plate("Candidate against incumbent, row by row", text, rows)
    for which, one in pictured:
        if heat := charts.heat_map(one):
            text = f"{which}. The ring is at row {one.worst.row}, head {one.worst.head}; lines part sequences and kv heads."
            yield plate("Heads by rows", text, heat)


def _pictured(verdict: Verdict, evidence: Evidence) -> list[tuple[str, CaseErrors]]:
    """The cases that get pictures of their own, each with what it is; where the first has few rows, another shows more."""
    first = evidence.shown(verdict.findings)
    if first is None:
        return []
    named = any(f.case == first.case.name for f in verdict.findings[:1])
    pictured = [(f"Case {first.case.name}, {'which the first reason names' if named else 'the worst of all'}", first)]
    largest = max(evidence.worst, key=lambda one: len(one.rows))
    if len(first.rows) < FEW_ROWS <= len(largest.rows):
        pictured.append((f"Case {largest.case.name}, which of the worst has the most rows", largest))
    return pictured


def plate(title: str, caption: str, picture: Picture) -> Plate:
    """A picture with its title and caption."""
    return Plate(title=title, caption=caption, about=picture.about, light=_uri(picture.light), dark=_uri(picture.dark))


def _uri(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _lies(one: CaseErrors) -> str:
    """Where the worst element of a case lies, in words."""
    w = one.worst
    at = place(one.case, w.row)
    page, slot = divmod(max(at.position, 0), one.case.page_size)
    return (
        f"Its largest e of out is {w.units:.3g}, at row {w.row}: sequence {at.sequence}, query {at.query} of {at.q_len}, "
        f"position {at.position} of {at.kv_len}, page {page} slot {slot}; head {w.head}, column {w.column}. "
        f"Got {w.got:.6g}, exact {w.want:.6g}, limit {w.limit:.2g}."
    )


def _worst(kernel: str, one: CaseErrors) -> WorstCase:
    return WorstCase(
        name=one.case.name,
        words=in_words(one.case),
        e=one.worst.units,
        incumbent=None if one.incumbent is None else float(one.incumbent.max()),
        where=f"row {one.worst.row}, head {one.worst.head}, column {one.worst.column}",
        edges="; ".join(edges(one.case, place(one.case, one.worst.row))),
        replay=replay(kernel, one),
    )


def replay(kernel: str, one: CaseErrors) -> str:
    """Commands for a POSIX shell that save the case, naming its kernel, and judge it again."""
    file = shlex.quote(f"./{one.case.name.replace('/', '-')}.toml")
    text = f"# {tomli_w.dumps({'kernel': kernel})}{_lists_on_one_line(to_toml(one.case))}"
    end = "END"
    while end in text.splitlines():
        end += "D"
    return f"cat > {file} <<'{end}'\n{text}{end}\noracle replay {file}"


def _lists_on_one_line(toml: str) -> str:
    """The same TOML, its lists of numbers on a line each."""
    return re.sub(r"= \[\n(?: +-?\d+,\n)+\]", lambda found: f"= [{', '.join(re.findall('-?[0-9]+', found.group()))}]", toml)
