"""The figures of one kernel, family by family, gathered while it is judged."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oracle.cases import Case
from oracle.families import FAMILIES
from oracle.isolation.outcome import Returned
from oracle.lock import ALL
from oracle.measure import DIRECTIONS, Sums, slope
from oracle.trial import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was measured on one family, or on a group of cases of no family."""

    cases: int
    rows: int  # judged query rows
    digest: str  # SHA-256 over the bits of every live row, case by case
    figures: Mapping[str, float]  # by the names of `oracle.lock.FIGURES`


def group(case: Case) -> str:
    """The row of a lock that a case of the suite counts for: its family, or the first word of the shapes that it stands for."""
    if case.family.name in FAMILIES:
        return case.family.name
    return case.name.partition("/")[0].partition("-")[0]


class Ledger:
    """Give it to `accept` as `watch`; afterwards `measurements` has the figures."""

    def __init__(self, own: Collection[Case] = ()) -> None:
        """`own` are the user's cases, which no lock counts."""
        self._own = own
        self._groups: dict[str, _Group] = {}

    def __call__(self, answer: Answer) -> None:
        """The answer to one more case is counted."""
        if answer.prepared.case in self._own:
            return
        for name in (group(answer.prepared.case), ALL):
            self._groups.setdefault(name, _Group()).add(answer)

    def measurements(self) -> dict[str, Measurement]:
        """What was measured, by family, and under `ALL` of all cases together."""
        return {name: self._groups[name].measurement() for name in sorted(self._groups)}


@dataclass(slots=True)
class _Group:
    cases: int = 0
    rows: int = 0
    e2: float = 0.0
    elements: float = 0.0
    compared_e2: float = 0.0  # of 16-bit cases, as in door 2
    incumbent_e2: float = 0.0
    absolute: float = 0.0  # sum of |out - exact|
    counted: int = 0
    largest: dict[str, float] = field(default_factory=dict)
    sums: dict[str, Sums] = field(default_factory=dict)
    bits: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, answer: Answer) -> None:
        case, seen = answer.prepared.case, answer.seen
        mine, theirs = seen.candidate, seen.incumbent
        if mine is None:
            return
        self.cases += 1
        self.rows += len(answer.prepared.truth.rows)
        self.e2 += float(mine.cluster_e2.sum())
        self.elements += float(mine.cluster_elements.sum())
        if theirs is not None and case.dtype != "fp32":
            self.compared_e2 += float(mine.cluster_e2.sum())
            self.incumbent_e2 += float(theirs.cluster_e2.sum())
        self.absolute += mine.mean_abs * mine.elements
        self.counted += mine.elements
        found = {"max_e": mine.worst.units, "max_abs": mine.max_abs}
        if mine.worst_lse is not None:
            found["max_e_lse"] = mine.worst_lse.units
        for name, value in found.items():
            self.largest[name] = max(self.largest.get(name, 0.0), math.inf if math.isnan(value) else value)
        for name in DIRECTIONS:
            self.sums[name] = self.sums.get(name, Sums()) + mine.sums[name]
        self.bits.update(_bits(case, answer.returned))

    def measurement(self) -> Measurement:
        figures = self.largest | {
            "rms_e": math.sqrt(self.e2 / max(1.0, self.elements)),
            "mean_abs": self.absolute / max(1, self.counted),
        }
        if self.incumbent_e2 > 0:
            figures["ratio"] = math.sqrt(self.compared_e2 / self.incumbent_e2)
        figures |= {name: abs(slope(sums).beta) for name, sums in self.sums.items()}
        return Measurement(cases=self.cases, rows=self.rows, digest=self.bits.hexdigest(), figures=dict(sorted(figures.items())))


def _bits(case: Case, returned: Returned) -> bytes:
    """Of one answer, the digest over its live rows."""
    own = hashlib.sha256(case.name.encode())
    for tensor in (returned.out, returned.lse):
        if tensor is not None:
            own.update(_raw(tensor[: case.total_q]))
    return own.digest()


def _raw(tensor: Tensor) -> bytes:
    bits = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    return tensor.contiguous().view(bits).numpy().tobytes()
