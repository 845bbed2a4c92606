"""A bench as tables in plain words and numbers, as Markdown and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from oracle.bench import Bench, Row, Timed
from oracle.checkpoints.clusters import Estimate
from oracle.drift_numbers import count, ends, number, percent
from oracle.markdown import code, fenced
from oracle.report import plain
from oracle.sheet import Sheet

VERSION = 1  # of the JSON form
PROTOCOL = (
    "in every round a block of matrix products, one of copies, one of A and one of B, the next round in the reverse order; of "
    "each block the median call, the first quarter left out; medians over the rounds, in brackets 95 % bootstrap intervals"
)
COLUMNS = ("family", "batch", "context", "A, ms", "B, ms", "A/B time", "floor, ms", "floor/A", "floor/B", "floor by")
RATES = (
    "family",
    "batch",
    "context",
    "kernel",
    "TFLOP/s",
    "of the product's",
    "GB/s",
    "of the copy's",
    "first call, ms",
    "max e",
)


def headline(bench: Bench) -> str:
    """What A takes of B's time, over all cases."""
    ratios = [row.ratio for row in bench.rows]
    slowest, fastest = max(ratios, key=lambda r: r.value), min(ratios, key=lambda r: r.value)
    span = _interval(fastest) if len(ratios) == 1 else f"{_interval(fastest)} to {_interval(slowest)}"
    faster, slower = sum(r.high < 1 for r in ratios), sum(r.low > 1 for r in ratios)
    told = f"faster in {faster}, slower in {slower}, not to be told apart in {len(ratios) - faster - slower}"
    return f"A = {bench.a} takes {span} of the time of B = {bench.b}; of {count(len(ratios), 'case')} {told}"


def sheets(bench: Bench) -> list[Sheet]:
    """Times beside the floor, and rates beside the ceilings."""
    return [
        Sheet(title="Time of a call", columns=COLUMNS, rows=tuple(map(_times, bench.rows))),
        Sheet(
            title="Rates of useful work",
            columns=RATES,
            rows=tuple(_rates(row, timed) for row in bench.rows for timed in (row.a, row.b)),
        ),
    ]


def notes(bench: Bench) -> list[str]:
    """What was measured beside, what was left out, and how."""
    products, copy = ([getattr(row, name) for row in bench.rows] for name in ("products_flops", "copy_bytes"))
    env, buffers = bench.environment, [row.buffers for row in bench.rows]
    return [
        f"matrix product {_span(products, 1e12)} TFLOP/s in {env['dtype']}, copy {_span(copy, 1e9)} GB/s, in the same rounds; "
        "the floor is the larger of FLOPs over the one and bytes over the other, FLOPs of live query-key pairs only",
        *(f"not timed: {count(n, 'case')}, {why}" for why, n in Counter(why for _, why in bench.skipped).items()),
        f"protocol: {PROTOCOL}; {env['rounds']} rounds, blocks of {env['block_s']:g} s; calls rotate through "
        f"{min(buffers)} to {max(buffers)} buffers (cache {env['cache_bytes'] / 2**20:g} MiB, {env['cache_from']})",
        machine(env),
        f"again: {env['command']}",
    ]


def machine(env: Mapping[str, Any]) -> str:
    """What it ran on, from the environment of a report."""
    return f"{env['device']}, {env['cpu_capability']}, {count(env['threads'], 'thread')}, torch {env['torch']}"


def bench_markdown(bench: Bench) -> str:
    """The whole bench; the same bench is the same text."""
    parts = [f"## {code(bench.a)} against {code(bench.b)}", headline(bench) + "."]
    parts += [sheet.markdown().replace("## ", "### ", 1).rstrip() for sheet in sheets(bench)]
    parts += ["\n".join(f"- {note}" for note in notes(bench)[:-1]), fenced(bench.environment["command"])]
    return "\n\n".join(parts) + "\n"


def bench_json(bench: Bench) -> dict[str, Any]:
    """The bench as JSON, every round's times included."""
    whole: dict[str, Any] = plain(asdict(bench))
    return {"format": VERSION} | whole


def _times(row: Row) -> tuple[str, ...]:
    return (
        row.family,
        row.shape,
        f"{row.context:,}",
        *(number(1000 * timed.seconds.value) for timed in (row.a, row.b)),
        _interval(row.ratio),
        number(1000 * row.floor_s),
        *(percent(timed.of_floor.value) for timed in (row.a, row.b)),
        row.bound_by,
    )


def _rates(row: Row, timed: Timed) -> tuple[str, ...]:
    seconds, share = timed.seconds.value, timed.of_products
    return (
        row.family,
        row.shape,
        f"{row.context:,}",
        timed.kernel,
        number(row.flops / seconds / 1e12),
        f"{percent(share.value)} {ends(share.mapped(lambda x: 100 * x, 100))}",
        number(row.nbytes / seconds / 1e9),
        percent(timed.of_copy.value),
        number(1000 * timed.first_s),
        f"{timed.max_e:.2f}",
    )


def _interval(e: Estimate) -> str:
    return f"{number(e.value)} {ends(e)}"


def _span(values: list[float], unit: float) -> str:
    low, high = number(min(values) / unit), number(max(values) / unit)
    return low if low == high else f"{low} to {high}"
