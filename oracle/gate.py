"""The gate: does a shipped kernel get the verdict that its row in the kernel table expects?"""

from __future__ import annotations

from oracle.kernels.table import KernelRow
from oracle.verdict import Outcome, Verdict


def check(row: KernelRow, verdict: Verdict) -> str:
    """What is not as expected, in one line, or ""."""
    got = verdict.outcome
    if row.expect == "accept":
        if got is not Outcome.ACCEPT:
            return f"expected accept, got {got}{_because(verdict)}"
        if row.door and verdict.environment["device"] == "cpu" and verdict.door != row.door:
            return f"expected through door {row.door}, went through {verdict.door}"
        return ""
    if got is not Outcome.REJECT:
        return f"expected reject ({row.reason}), got {got}"
    if row.reason not in map(str, verdict.reasons):
        return f"expected to be rejected for {row.reason}, was for {', '.join(verdict.reasons)}"
    return ""


def _because(verdict: Verdict) -> str:
    return f": {verdict.findings[0].text}" if verdict.findings else ""
