"""A roofline as a table in plain words and numbers, as Markdown and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from oracle.bench_text import machine
from oracle.drift_numbers import count, ends, number, percent
from oracle.markdown import code, fenced
from oracle.report import plain
from oracle.roofline import Roofline, Row
from oracle.sheet import Sheet

VERSION = 1  # of the JSON form
COLUMNS = ("work", "layers", "ms", "share", "GFLOPs", "TFLOP/s", "of the product's")


def named(work: str, kind: str) -> str:
    """An account in words."""
    return f"{work} of {kind} layers" if kind else work


def headline(found: Roofline) -> str:
    """The account to look at first."""
    row = next(row for row in found.rows if (row.work, row.kind) == found.worst)
    rate = f" at {percent(row.of_products.value)} of the matrix product's rate" if row.flops else ", without products"
    return f"{named(*found.worst)}: {percent(row.share.value)} of the prefill{rate}; it has the most to give"


def sheet(found: Roofline) -> Sheet:
    """A row for each account, the largest first."""
    return Sheet(title=f"Prefill: {found.about}", columns=COLUMNS, rows=tuple(map(_cells, found.rows)))


def _cells(row: Row) -> tuple[str, ...]:
    rate = row.flops / row.seconds.value / 1e12 if row.flops and row.seconds.value else 0.0
    share = row.of_products
    return (
        row.work,
        f"{row.layers} {row.kind}" if row.kind else "-",
        f"{number(1000 * row.seconds.value)} {ends(row.seconds.mapped(lambda s: 1000 * s, 1000))}",
        percent(row.share.value),
        number(row.flops / 1e9) if row.flops else "-",
        number(rate) if row.flops else "-",
        f"{percent(share.value)} {ends(share.mapped(lambda s: 100 * s, 100))}" if row.flops else "-",
    )


def notes(found: Roofline) -> list[str]:
    """What was measured beside, how, and what ran."""
    env, accounts = found.environment, sum(row.seconds.value for row in found.rows)
    kernels = ", ".join(f"{target} in {kind} layers" for kind, target in found.kernels.items())
    return [
        f"matrix product {number(found.products_flops.value / 1e12)} TFLOP/s, in blocks between the prefills",
        f"{number(found.checked_flops / 1e9)} GFLOPs of products with weights, counted from the configuration; torch's profiler "
        "counts the same, account by account; attention counts the pairs that window and mask leave",
        f"a prefill takes {number(1000 * found.plain_s.value)} ms, {number(1000 * found.profiled_s.value)} ms under the "
        f"profiler, of which {number(1000 * accounts)} ms are in the table",
        f"medians of {count(env['rounds'], 'round')}, in brackets 95 % intervals",
        f"attention by {kernels}",
        machine(env),
        f"again: {env['command']}",
    ]


def roofline_markdown(found: Roofline) -> str:
    """The whole report; the same report is the same text."""
    table = sheet(found).markdown().replace(sheet(found).title, f"Prefill: {code(found.about)}", 1).rstrip()
    lines = "\n".join(f"- {note}" for note in notes(found)[:-1])
    return f"{table}\n\n{headline(found)}.\n\n{lines}\n\n{fenced(found.environment['command'])}\n"


def roofline_json(found: Roofline) -> dict[str, Any]:
    """The report as JSON."""
    whole: dict[str, Any] = plain(asdict(found))
    return {"format": VERSION} | whole
