"""What the pictures of a report are drawn from, gathered while the verdict is made.

Memory is bounded: one number a judged row of every case, a histogram with fixed bins, and a full (row x head) map only of the
worst cases and of the one that the first finding names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.cases import Case
from oracle.measure import Worst, refined
from oracle.pool import without_fill
from oracle.trial import Answer
from oracle.verdict import PRIORITY, Finding

WORST = 8  # cases that keep their map
LOWEST, HIGHEST, PER_OCTAVE = -16, 40, 2  # bins of log2 e
BINS = (HIGHEST - LOWEST) * PER_OCTAVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How many judged elements have which e.

    First those under 2^LOWEST, exact ones among them; then BINS bins of equal width in log2 e, each with its lower edge and the
    last of them without an upper one; then NaN and inf.
    """

    counts: tuple[int, ...] = (0,) * (BINS + 2)

    @property
    def elements(self) -> int:
        """All elements that were counted."""
        return sum(self.counts)

    def plus(self, e: Tensor) -> Histogram:
        """The histogram with the elements of `e`, of any shape, counted as well."""
        flat = e.double().flatten()
        place = torch.floor((torch.log2(flat) - LOWEST) * PER_OCTAVE).clamp(-1, BINS - 1)
        index = torch.where(torch.isfinite(flat), place, BINS).long() + 1
        more = torch.bincount(index, minlength=BINS + 2).tolist()
        return Histogram(counts=tuple(a + b for a, b in zip(self.counts, more, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CaseErrors:
    """The errors of one case, of R judged rows; e of a row is the largest over its heads and columns, inf for NaN."""

    case: Case
    rows: Tensor  # (R,) int64 packed query rows, ascending
    sequence: Tensor  # (R,) int64 that the row belongs to
    position: Tensor  # (R,) int64 in its sequence; negative where there are more queries than keys
    candidate: Tensor  # (R,) float64 e
    incumbent: Tensor | None  # (R,) float64 e; None where the incumbent gave no result
    worst: Worst  # the candidate's
    findings: tuple[Finding, ...]
    by_head: Tensor | None  # (R, q_heads) float64 e of the candidate; None where the map was not kept

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts the worst case last: those with findings after those without, then by the largest e."""
        return bool(self.findings), self.worst.units


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """The errors of a candidate and of its incumbent over all cases that have an answer."""

    cases: tuple[CaseErrors, ...] = ()  # in the order of the trial
    candidate: Histogram = Histogram()
    incumbent: Histogram = Histogram()

    @property
    def worst(self) -> tuple[CaseErrors, ...]:
        """The worst cases, each with its map, the worst first."""
        return tuple(sorted((c for c in self.cases if c.by_head is not None), key=lambda c: c.rank, reverse=True)[:WORST])

    def shown(self, findings: Iterable[Finding]) -> CaseErrors | None:
        """The case that the first of a verdict's findings names, or where it has no map, the worst; None without any answer."""
        names = {f.case for f in list(findings)[:1]}
        named = (c for c in self.cases if c.case.name in names and c.by_head is not None)
        return next(named, self.worst[0] if self.cases else None)


class Gathered:
    """A watch of `accept` that keeps the evidence of what it is given."""

    def __init__(self) -> None:
        """Nothing has been seen."""
        self._cases: list[CaseErrors] = []
        self._candidate = self._incumbent = Histogram()

    @property
    def evidence(self) -> Evidence:
        """What was seen so far."""
        return Evidence(cases=tuple(self._cases), candidate=self._candidate, incumbent=self._incumbent)

    def __call__(self, answer: Answer) -> None:
        """The answer is part of the evidence; one without any judged row shows nothing."""
        truth, measured = answer.prepared.truth, answer.seen.candidate
        if measured is None or not len(truth.rows):
            return
        mine = errors(answer, answer.returned.out[truth.rows])
        theirs = None if answer.incumbent is None else errors(answer, answer.incumbent)
        self._candidate = self._candidate.plus(mine)
        self._incumbent = self._incumbent if theirs is None else self._incumbent.plus(theirs)
        plan = truth.exact.plan
        self._cases.append(
            CaseErrors(
                case=answer.prepared.case,
                rows=plan.row,
                sequence=plan.seq,
                position=plan.pos,
                candidate=mine.amax((1, 2)),
                incumbent=None if theirs is None else theirs.amax((1, 2)),
                worst=measured.worst,
                findings=answer.seen.findings,
                by_head=mine.amax(2),
            )
        )
        kept = {*self.evidence.worst, _first(self._cases)}
        self._cases = [c if c.by_head is None or c in kept else replace(c, by_head=None) for c in self._cases]


def _first(cases: Iterable[CaseErrors]) -> CaseErrors | None:
    """The case with the finding that a verdict would name first, as `doors.ordered` sorts them."""
    found = [((PRIORITY[f.reason], f.size, -f.units), c) for c in cases for f in c.findings if c.by_head is not None]
    return min(found, key=lambda pair: pair[0])[1] if found else None


def errors(answer: Answer, out: Tensor) -> Tensor:
    """e of every judged element of `out` (R, q_heads, head_dim_v), as `measure` has it: float64, inf where out is not finite."""
    truth = answer.prepared.truth
    x, got = truth.exact, out.double()
    limit = refined(truth, without_fill(answer.prepared.laid), got, truth.bound.b)
    live, finite = (~x.empty)[:, None, None], torch.isfinite(got)
    err = torch.where(finite, (got - x.out).abs(), math.inf)
    e = torch.where(live, err / limit, 0.0)
    e = torch.where(torch.isnan(e), torch.where(err == 0, 0.0, math.inf), e)  # 0/0: a bound of 0 demands exactness
    return torch.where(finite, e, math.inf)
