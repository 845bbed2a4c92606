"""Faults that the suite has never seen: drawn at random from the parameter table of the covering array.

A fault strikes only where a value of one factor, or a pair of values of two, occurs in a call; there one row in a few, one
head or one lane of the output is wrong.  What slips through names the value or the pair that the suite lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from oracle.cases import Case
from oracle.contract import OPTIONAL, Record
from oracle.measure import measure
from oracle.pairs import FACTORS, PLACEMENT, factor_values
from oracle.pool import without_fill
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import emulate, record_of
from oracle.scope import Scope
from oracle.streams import Stream
from oracle.suite import build
from oracle.trial import prepare

EXTENTS = ("row", "head", "lane")
DAMAGES = ("large", "neighbour")
LARGE = 2.0**-4  # relative: a few units of the bound of 16-bit outputs, far below what any eye would see
ONE_ROW_IN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One fault."""

    when: tuple[tuple[str, Any], ...]  # factor and value, one or two
    extent: str  # of EXTENTS: what is wrong
    at: int  # which row, head or lane, modulo their number
    damage: str  # of DAMAGES: its numbers are a sixteenth too large, or those of the next row, head or lane

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.extent} {self.damage} when {' and '.join(f'{factor} = {value}' for factor, value in self.when)}"

    def strikes(self, case: Case) -> bool:
        """Whether the value or the pair occurs in `case`."""
        own = factor_values(case)
        return all(own[factor] == value for factor, value in self.when)

    def damaged(self, out: Tensor) -> Tensor:
        """`out` (rows, q_heads, head_dim_v) with the fault in it."""
        dim = EXTENTS.index(self.extent)
        wrong = torch.zeros_like(out, dtype=torch.bool)
        if self.extent == "row":
            every = max(1, min(ONE_ROW_IN, len(out)))
            wrong[torch.arange(len(out)) % every == self.at % every] = True
        else:
            wrong.select(dim, self.at % out.shape[dim]).fill_(True)
        other = out * (1 + LARGE) if self.damage == "large" else out.roll(-1, dim)
        return torch.where(wrong, other, out)


def draw(seed: int, count: int) -> list[HeldOut]:
    """`count` faults: every second one strikes at a single value, the others at a pair.  Same arguments, same faults."""
    table = FACTORS | PLACEMENT
    stream = Stream(seed, "held-out")
    pairs = list(combinations(table, 2))

    def pick(values: Sequence[Any]) -> Any:
        return values[int(stream.integers(0, len(values), 1))]

    faults = []
    for number in range(count):
        chosen = pick(pairs) if number % 2 else (pick(list(table)),)
        faults.append(
            HeldOut(
                when=tuple((factor, pick(table[factor])) for factor in chosen),
                extent=EXTENTS[number // 2 % len(EXTENTS)],
                at=int(stream.integers(0, 1 << 16, 1)),
                damage=pick(DAMAGES),
            )
        )
    return faults


def survivors(faults: Sequence[HeldOut], cases: Sequence[Case], record: Record) -> tuple[list[HeldOut], list[HeldOut]]:
    """(faults that change some output and keep e <= 1 on every case, faults that change none).

    The kernel on trial is a textbook one whose outputs are damaged where a fault strikes.  The next head in the place of the
    only one is no fault.
    """
    alive, harmless = list(faults), set(faults)
    for case in cases:
        struck = [fault for fault in alive if fault.strikes(case)]
        if not struck:
            continue
        prepared = prepare(case, record)
        truth, call = prepared.truth, without_fill(prepared.laid)
        out, _ = emulate(prepared.laid.call, Arithmetic(), truth.rows)
        for fault in struck:
            damaged = fault.damaged(out)
            if not torch.equal(damaged, out):
                harmless.discard(fault)
            if not measure(truth, call, damaged, None).worst.units <= 1.0:
                alive.remove(fault)
    return [fault for fault in alive if fault not in harmless], [fault for fault in alive if fault in harmless]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How many of the faults drawn a suite rejects."""

    drawn: int
    harmless: int  # that change no output of any case
    survivors: tuple[HeldOut, ...]

    @property
    def rejected(self) -> float:
        """Of the faults that change something."""
        faults = self.drawn - self.harmless
        return (faults - len(self.survivors)) / faults if faults else 0.0

    def __str__(self) -> str:
        faults = self.drawn - self.harmless
        left = "; ".join(fault.name for fault in self.survivors) or "nothing"
        return f"{self.rejected:.1%} of {faults} faults rejected ({self.harmless} more change no bit); slipped through: {left}"


def held_out_share(seed: int, count: int) -> Share:
    """The share of `count` faults, drawn with `seed`, that the default profile of a textbook kernel rejects.

    The suite is that of seed 0: one that the faults were not drawn for.
    """
    record = record_of(Arithmetic())
    suite = build(Scope(record=record, parameters=frozenset(OPTIONAL)), profile="default", seed=0)
    left, harmless = survivors(draw(seed, count), suite.cases, record)
    return Share(drawn=count, harmless=len(harmless), survivors=tuple(left))
