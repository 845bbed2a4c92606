"""What the pages made of docs/gpu share: a report by name, a table in Markdown, a bar that is met or missed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "gpu"


def report(name: str) -> Facts:
    """One report of docs/gpu."""
    found: Facts = json.loads((DATA / f"{name}.json").read_text())
    return found


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    heads = list(columns)
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join(lines + [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows])


def bar_of(bar: float | None, ratios: Sequence[float]) -> str:
    """The bar, and by how much the median of the ratios misses it; "" where there is none."""
    if bar is None:
        return ""
    short = bar - statistics.median(ratios)
    return f"{bar}" if short <= 0 else f"{bar}: **missed by {short:.3f}**"
