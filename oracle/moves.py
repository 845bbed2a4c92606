"""What moved: a kernel as it is measured now, beside its lock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from oracle.lock import ALL, ERRORS, Figure, KernelLock, Row, rounded


class Kind(StrEnum):
    """How a fact moved."""

    VERDICT = "verdict"
    ROSE = "rose"
    FELL = "fell"  # below the band: the lock is stale
    BITS = "bits"
    MISSING = "not measured"
    NEW = "not locked"
    SUITE = "suite"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One fact that is not as the lock says."""

    kind: Kind
    what: str  # its dotted name in the lock
    text: str  # one sentence: which kernel, which figure, from what to what, the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What a kernel's comparison with its lock showed."""

    moves: tuple[Move, ...]
    notes: tuple[str, ...] = ()  # what was not compared, and why


def compare(name: str, locked: KernelLock, now: KernelLock, *, same_machine: bool, factor: float) -> Compared:
    """`now` beside `locked`; of `now`, only values count.  `factor` spreads are the width of a band.

    Bits are compared only on the same machine, versions and threads, and only there does a figure that fell make the lock stale;
    whether figures rose is asked everywhere.
    """
    where = f"kernel.{name}"
    moves = [*_verdict(name, where, locked, now)]
    if moves:
        return Compared(moves=tuple(moves))
    if locked.suite_sha256 != now.suite_sha256:
        text = f"{name}: its suite changed ({_size(locked)} then, {_size(now)} now), so no figure can be compared; `oracle lock`"
        return Compared(moves=(Move(kind=Kind.SUITE, what=f"{where}.suite_sha256", text=text),))
    moves += _skips(name, where, locked, now)
    for family in sorted({*locked.families, *now.families}):
        moves += _row(name, family, where, locked.families.get(family), now.families.get(family), factor)
    changed = [f for f in locked.families if f in now.families and locked.families[f].digest != now.families[f].digest]
    notes = []
    if not same_machine:
        notes.append(f"{name}: another machine or other versions than the lock's: figures were compared, bits were not")
        fell = [move for move in moves if move.kind is Kind.FELL]
        moves = [move for move in moves if move.kind is not Kind.FELL]
        notes += [
            f"{name}: {len(fell)} figures are below their bands here, which makes a lock stale only where it was made"
        ] * bool(fell)
    elif changed and locked.door == "bits":
        text = f"{name}: other bits than the lock's on {', '.join(changed)}, and its door is same bits"
        moves.append(Move(kind=Kind.BITS, what=f"{where}.family.{changed[0]}.digest", text=text))
    elif changed:
        held = "" if moves else ", within every band"
        notes.append(f"{name}: other bits than the lock's on {len(changed)} of {len(locked.families)} rows{held}")
    return Compared(moves=tuple(moves), notes=tuple(notes))


def unmeasured(name: str, why: str) -> Move:
    """A kernel of the lock that was not judged."""
    return Move(kind=Kind.MISSING, what=f"kernel.{name}", text=f"{name}: locked, and not measured: {why}")


def unlocked(name: str) -> Move:
    """A kernel that was judged and that no lock has."""
    return Move(kind=Kind.NEW, what=f"kernel.{name}", text=f"{name}: measured, and not locked: `oracle lock` adds it")


def _verdict(name: str, where: str, locked: KernelLock, now: KernelLock) -> Iterator[Move]:
    if now.verdict != locked.verdict:
        because = f" ({now.reason})" if now.reason else ""
        text = f"{name}: the verdict was {locked.verdict}, is {now.verdict}{because}"
        yield Move(kind=Kind.VERDICT, what=f"{where}.verdict", text=text)
    elif now.reason != locked.reason:
        text = f"{name}: rejected for {now.reason}, no longer for {locked.reason}"
        yield Move(kind=Kind.VERDICT, what=f"{where}.reason", text=text)
    elif locked.door == "bits" and now.door != "bits":
        text = f"{name}: door bits is lost: it has other bits than {now.against or 'the emulator'}, and passes by {now.door}"
        yield Move(kind=Kind.VERDICT, what=f"{where}.door", text=text)


def _skips(name: str, where: str, locked: KernelLock, now: KernelLock) -> Iterator[Move]:
    for reason, count in sorted(now.skipped.items()):
        before = locked.skipped.get(reason, 0)
        if count > before:
            text = f"{name}: skipped {count} cases ({reason}), {before} before"
            yield Move(kind=Kind.SKIPPED, what=f"{where}.skipped.{reason}", text=text)


def _row(name: str, family: str, where: str, locked: Row | None, now: Row | None, factor: float) -> Iterator[Move]:
    what = f"{where}.family.{family}"
    if locked is None:
        yield Move(kind=Kind.NEW, what=what, text=f"{name} on {family}: measured, and not locked: `oracle lock` adds it")
        return
    if now is None:
        yield Move(kind=Kind.MISSING, what=what, text=f"{name} on {family}: locked, and not measured")
        return
    for figure in sorted({*locked.figures, *now.figures}):
        before, after = locked.figures.get(figure), now.figures.get(figure)
        if before is None or after is None:
            gone = "is no longer measured" if after is None else "is measured, and not locked"
            yield Move(kind=Kind.MISSING, what=f"{what}.{figure}", text=f"{name} on {family}: {figure} {gone}")
        else:
            yield from _figure(name, family, what, figure, before, after.value, factor)


def _figure(name: str, family: str, what: str, figure: str, locked: Figure, value: float, factor: float) -> Iterator[Move]:
    ok = value <= locked.ceiling  # a NaN is not
    if not ok:
        change = f" ({value / locked.value - 1:+.1%})" if locked.value > 0 else ""
        text = f"{name} on {family}: {figure} rose from {locked.value:.6g} to {value:.6g}{change}, ceiling {locked.ceiling:.6g}"
        yield Move(kind=Kind.ROSE, what=f"{what}.{figure}_ceiling", text=text)
    elif figure in ERRORS and value < (floor := rounded(locked.value - factor * locked.spread)):
        change = f"{figure} fell from {locked.value:.6g} to {value:.6g}, below its band ({floor:.6g})"
        text = f"{name} on {family}: {change}: the lock is stale; `oracle lock` tightens it"
        yield Move(kind=Kind.FELL, what=f"{what}.{figure}", text=text)


def _size(kernel: KernelLock) -> str:
    return f"{kernel.families[ALL].cases} cases" if ALL in kernel.families else "none"
