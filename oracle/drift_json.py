"""A drift report as JSON, and whether two of them may be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from oracle import drift_summary as summary
from oracle.checkpoints.drifted import Drift, Row
from oracle.report import plain

VERSION = 1  # of the JSON form; oracle/schema/drift.schema.json describes it


def drift_json(drift: Drift) -> dict[str, Any]:
    """The report as JSON, without what it holds of every single token; `oracle/schema/drift.schema.json` holds for it."""
    text = drift.text
    whole: dict[str, Any] = plain(
        {
            "format": VERSION,
            "reference": drift.reference,
            "tokens": len(text.token),
            "blocks": len(text.blocks),
            "documents": text.documents,
            "configurations": [_configuration(drift, row) for row in drift.rows],
            "decisions": [asdict(d) for d in drift.decisions],
            "attributions": [asdict(a) for a in drift.attributions],
            "waypoints": [asdict(w) | {"within_line": summary.within_line(w)} for w in drift.waypoints],
            "line": summary.LINE,
            "layers": drift.layers,
            "identity": dict(drift.identity),
            "environment": dict(drift.environment),
        }
    )
    return whole


def _configuration(drift: Drift, row: Row) -> dict[str, Any]:
    return {
        "configuration": row.configuration,
        "floor": row.floor,
        "times_floor": summary.times_floor(drift, row.figures.kl),
        "distinguishable": summary.distinguishable(drift, row),
        "figures": asdict(row.figures) | {"worst": [asdict(spot) for spot in summary.worst(drift, row)]},
        "ran": dict(row.ran),
        "tokens_per_second": row.tokens_per_second,
    }


def comparable(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Why two reports, as `drift_json` gives them, may not be compared, one reason each; [] where they may.

    They may where they have the same format and reference, and say the same of what was measured, which is not nothing.
    """
    if not a["identity"] and not b["identity"]:
        return ["identity: neither report says what it measured"]
    first, second = ({key: report[key] for key in ("format", "reference")} | dict(report["identity"]) for report in (a, b))
    return list(_differences(first, second))


def _differences(first: Mapping[str, object], second: Mapping[str, object]) -> Iterator[str]:
    for key in dict.fromkeys([*first, *second]):
        if key not in first or key not in second:
            yield f"{key}: only the {'first' if key in first else 'second'} report names it"
        elif first[key] != second[key]:
            yield f"{key}: {first[key]} against {second[key]}"
