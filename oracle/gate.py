"""The gate: is every kernel as its lock, and its row in the kernel table, say?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oracle.accept import Asked
from oracle.cases import read_cases
from oracle.constants import constants
from oracle.kernels.table import KERNELS, KernelRow, unavailable
from oracle.ledger import Ledger
from oracle.lock import KernelLock, Lock
from oracle.locking import lock_name, measured, same_machine
from oracle.loosened import Complaint
from oracle.moves import Kind, Move, compare, unlocked, unmeasured
from oracle.trial import Watch
from oracle.verdict import Outcome, Verdict

Judge = Callable[[Asked, Watch], Verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A kernel that the gate is to judge."""

    name: str  # as the lock has it: the kernel's, as commands take it
    asked: Asked
    row: KernelRow | None  # of a shipped kernel
    file: str  # the lock that has it, by name; "" = none
    locked: KernelLock | None
    absent: str  # why this machine cannot run it, "" where it can


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the gate found of one kernel."""

    entry: Entry
    verdict: Verdict | None  # None where it was not run
    problem: str = ""  # what is not as the kernel table expects
    moves: tuple[Move, ...] = ()  # what is not as the lock says
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Nothing about it is red."""
        return not self.problem and not self.moves


def moved_constants(locks: Mapping[str, Lock]) -> dict[str, list[Complaint]]:
    """By file name, constants of the bound and of the doors that are not as a lock says."""
    here = constants()
    found: dict[str, list[Complaint]] = {}
    for name, lock in locks.items():
        for constant in sorted({*here, *lock.bound}):
            was, now = lock.bound.get(constant), here.get(constant)
            if was != now:
                text = f"bound.{constant} is {now} in this oracle, and {was} in the lock: `oracle lock --reason TEXT`"
                found.setdefault(f"{name}.toml", []).append(Complaint(what=f"bound.{constant}", text=text))
    return found


def roster(
    locks: Mapping[str, Lock],
    device: str,
    *,
    cases: Path | None = None,
    names: Sequence[str] = (),
    against: str = "",
    profile: str = "",
) -> list[Entry]:
    """Every kernel that is locked, and the shipped ones where a lock says so or there is none; or the kernels of these `names`.

    `against` and `profile` are those of the latter, where they are not to be as they were.  Other projects' kernels, of which the
    table expects nothing, are not shipped.
    """
    homes = {name: (file, kernel, lock) for file, lock in locks.items() for name, kernel in lock.kernels.items()}
    ship = not locks or any(lock.header["shipped"] for lock in locks.values())
    shipped = [name for name, row in KERNELS.items() if row.expect] if ship else []
    entries = []
    for name in names or [*shipped, *(name for name in homes if name not in shipped)]:
        row = KERNELS.get(name)
        file, kernel, lock = homes.get(name, ("", None, None))
        asked = Asked(
            candidate=name,
            against=against or (kernel.against if kernel else row.against if row else ""),
            device=device,
            profile=profile or (kernel.profile if kernel else row.profile if row and device == "cpu" else ""),
            seed=lock.header["seed"] if lock else 0,
            cases=cases,
        )
        absent = unavailable(row, device) if row else ""
        entries.append(Entry(name=name, asked=asked, row=row, file=file, locked=kernel, absent=absent))
    return entries


def judge(entry: Entry, locks: Mapping[str, Lock], run: Judge) -> Judged:
    """The verdict on one kernel, beside what was expected of it."""
    if entry.absent:
        moves = (unmeasured(entry.name, entry.absent),) if entry.locked else ()
        return Judged(entry=entry, verdict=None, moves=moves)
    ledger = Ledger(read_cases(entry.asked.cases) if entry.asked.cases else ())
    verdict = run(entry.asked, ledger)
    problem = check(entry.row, verdict) if entry.row else ""
    if entry.locked is None:
        moves = (unlocked(entry.name),) if locks else ()
        return Judged(entry=entry, verdict=verdict, problem=problem, moves=moves)
    if (home := lock_name(verdict)) != entry.file:
        text = f"{entry.name}: locked in {entry.file}.toml, and is now one of {home}.toml: `oracle lock`"
        move = Move(kind=Kind.MISSING, what=f"kernel.{entry.name}", text=text)
        return Judged(entry=entry, verdict=verdict, problem=problem, moves=(move,))
    now = measured(entry.asked, verdict, ledger, entry.locked.reason)
    lock = locks[entry.file]
    compared = compare(
        entry.name,
        entry.locked,
        now,
        same_machine=same_machine(lock, verdict.environment),
        factor=float(lock.header["factor"]),
    )
    return Judged(entry=entry, verdict=verdict, problem=problem, moves=compared.moves, notes=compared.notes)


def allow_better(judged: Sequence[Judged]) -> list[Judged]:
    """The same, figures that fell no longer counted against a kernel."""
    return [replace(j, moves=tuple(m for m in j.moves if m.kind is not Kind.FELL)) for j in judged]


def check(row: KernelRow, verdict: Verdict) -> str:
    """What is not as the kernel table expects, in one line, or ""."""
    got = verdict.outcome
    if not row.expect:
        return ""
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
