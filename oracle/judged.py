"""One case put to a kernel, outside any suite: what counts against the kernel, and what is only worth a look.

On inputs that a search has steered, an error beyond the bound for natural inputs proves nothing: only one beyond the worst case
does.  So `e > 1` with `e_det <= 1` is *inspect*, and so is the same of the LSE.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from oracle.cases import Case
from oracle.contract import Record
from oracle.trial import Prepared, Seen, Trial, prepare
from oracle.verdict import PRIORITY, Finding, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What one case showed of a kernel."""

    case: Case
    seen: Seen
    faults: tuple[Finding, ...]  # the most telling first
    inspect: tuple[Finding, ...]  # beyond the bound for natural inputs, within the worst case

    @property
    def reason(self) -> Reason | None:
        """Why the kernel is wrong, or None where nothing was found."""
        return self.faults[0].reason if self.faults else None

    @property
    def e(self) -> float:
        """Largest error in units of the bound; inf without a result."""
        return math.inf if self.seen.candidate is None else self.seen.candidate.worst.units

    @property
    def e_det(self) -> float:
        """Largest error in units of the worst-case bound; inf without a result."""
        return math.inf if self.seen.candidate is None else self.seen.candidate.worst_det

    @property
    def e_lse(self) -> float | None:
        """Largest error of the LSE in units of its bound, the row sum as it suits the kernel; None without an LSE."""
        m = self.seen.candidate
        return None if m is None or m.worst_lse is None else min(m.worst_lse.units, m.worst_lse_after)


def judge(trial: Trial, case: Case, record: Record) -> Judged:
    """What `case` shows of the kernel of `trial`: every fill, other page ids, canaries, the same call twice."""
    prepared = prepare(case, record)
    return sorted_out(prepared, trial.run(prepared))


def sorted_out(prepared: Prepared, seen: Seen) -> Judged:
    """The findings of `seen`, faults apart from what is only to be inspected."""
    inspect = tuple(f for f in seen.findings if _within_worst_case(prepared, seen, f))
    faults = sorted((f for f in seen.findings if f not in inspect), key=lambda f: PRIORITY[f.reason])
    return Judged(case=prepared.case, seen=seen, faults=tuple(faults), inspect=inspect)


def _within_worst_case(prepared: Prepared, seen: Seen, finding: Finding) -> bool:
    """Whether the finding is an error that a correct kernel can make on inputs chosen against it."""
    m = seen.candidate
    if m is None or not finding.units > 1.0:  # an error without a size, as of rows never written, is no rounding
        return False
    if finding.reason is Reason.ERROR:
        return finding.units <= m.worst.units and m.worst_det <= 1.0
    if finding.reason is Reason.LSE and m.worst_lse is not None and finding.units <= m.worst_lse.units:
        at = int((prepared.truth.rows == m.worst_lse.row).nonzero()[0])
        limit = float(prepared.truth.bound.b_lse_det[at, m.worst_lse.head])
        return abs(m.worst_lse.got - m.worst_lse.want) <= limit
    return False
