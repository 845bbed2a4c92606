"""Whether a lock demands less than it did: every fact that was loosened, and the waivers that permit it.

Text files are compared with text files: nothing is measured, and torch is not loaded.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import tomli_w

from oracle.errors import InputError
from oracle.lock import FIGURES, KernelLock, Lock, Waiver, from_text, waiver_data

REMOVED = "removed"
DOORS = ("", "drift", "accuracy", "bits")  # each as strict as those before it, or stricter
PROFILES = ("quick", "default", "deep")
SIZES = ("cases", "input_classes", "mutants", "rows", "seeds")  # of the header: the suite's


@dataclass(frozen=True, slots=True, kw_only=True)
class Loosened:
    """One fact that demands less than it did."""

    what: str  # its dotted name
    was: Any
    now: Any  # REMOVED where it is gone

    @property
    def text(self) -> str:
        """One sentence."""
        return f"{self.what} went from {self.was} to {self.now}" if self.now != REMOVED else f"{self.what} was removed"

    @property
    def blank(self) -> str:
        """The waiver that would permit it, to be filled in."""
        waiver = Waiver(what=self.what, was=self.was, now=self.now, why="", link="https://", expires="")
        return "[[waiver]]\n" + tomli_w.dumps(waiver_data(waiver))


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """What keeps a lock from being accepted beside the one that was."""

    what: str  # dotted name of the fact in the lock, "" where it is the whole file
    text: str
    blank: str = ""  # the waiver to fill in, where one would do


def loosened(base: Lock, now: Lock) -> list[Loosened]:
    """Every fact of `now` that demands less than in `base`."""
    found = [*_smaller("header", base.header, now.header, SIZES)]
    for name, value in base.bound.items():
        if now.bound.get(name) != value:
            found.append(Loosened(what=f"bound.{name}", was=value, now=now.bound.get(name, REMOVED)))
    for name, kernel in base.kernels.items():
        where = f"kernel.{name}"
        if name in now.kernels:
            found += _kernel(where, kernel, now.kernels[name])
        else:
            found.append(Loosened(what=where, was=kernel.verdict, now=REMOVED))
    return found


def _kernel(where: str, base: KernelLock, now: KernelLock) -> Iterator[Loosened]:
    for fact in ("verdict", "reason", "against"):
        was, is_now = getattr(base, fact), getattr(now, fact)
        if was != is_now:
            yield Loosened(what=f"{where}.{fact}", was=was, now=is_now)
    for fact, order in (("door", DOORS), ("profile", PROFILES)):
        was, is_now = getattr(base, fact), getattr(now, fact)
        if order.index(is_now) < order.index(was):
            yield Loosened(what=f"{where}.{fact}", was=was, now=is_now)
    for reason, count in now.skipped.items():
        if count > base.skipped.get(reason, 0):
            yield Loosened(what=f"{where}.skipped.{reason}", was=base.skipped.get(reason, 0), now=count)
    for name, row in base.families.items():
        at = f"{where}.family.{name}"
        other = now.families.get(name)
        if other is None:
            yield Loosened(what=at, was=row.cases, now=REMOVED)
            continue
        yield from _smaller(
            at, {"cases": row.cases, "rows": row.rows}, {"cases": other.cases, "rows": other.rows}, ("cases", "rows")
        )
        for figure in FIGURES:
            if figure not in row.figures:
                continue
            ceiling = row.figures[figure].ceiling
            new = other.figures.get(figure)
            if new is None or not new.ceiling <= ceiling:
                yield Loosened(what=f"{at}.{figure}_ceiling", was=ceiling, now=REMOVED if new is None else new.ceiling)


def _smaller(where: str, base: Mapping[str, Any], now: Mapping[str, Any], facts: Sequence[str]) -> Iterator[Loosened]:
    for fact in facts:
        if now[fact] < base[fact]:
            yield Loosened(what=f"{where}.{fact}", was=base[fact], now=now[fact])


def complaints(base: Lock, now: Lock, today: date) -> list[Complaint]:
    """What stands against `now` after `base`: facts loosened without a waiver, waivers that are expired or that permit nothing.

    A waiver that `base` has as well has done its work and stands as a record until it expires.
    """
    found = []
    permits = {(w.what, str(w.was), str(w.now)) for w in now.waivers}
    loose = loosened(base, now)
    for fact in loose:
        if (fact.what, str(fact.was), str(fact.now)) not in permits:
            found.append(Complaint(what=fact.what, text=f"{fact.text}, and no waiver permits it", blank=fact.blank))
    needed = {(fact.what, str(fact.was), str(fact.now)) for fact in loose}
    for waiver in now.waivers:
        if (waiver.what, str(waiver.was), str(waiver.now)) not in needed and waiver not in base.waivers:
            text = f"the waiver of {waiver.what} from {waiver.was} to {waiver.now} permits nothing that changed: delete it"
            found.append(Complaint(what=waiver.what, text=text))
    return found + expired(now, today)


def expired(lock: Lock, today: date) -> list[Complaint]:
    """Waivers past their day."""
    found = []
    for waiver in lock.waivers:
        try:
            last = date.fromisoformat(waiver.expires)
        except ValueError:
            found.append(
                Complaint(what=waiver.what, text=f"the waiver of {waiver.what}: {waiver.expires!r} is no day of the calendar")
            )
            continue
        if today > last:
            text = f"the waiver of {waiver.what} expired on {waiver.expires}: tighten the lock, or have the waiver renewed"
            found.append(Complaint(what=waiver.what, text=text))
    return found


def at_revision(folder: Path, revision: str) -> dict[str, Lock]:
    """The locks that `folder` held at a git revision, by file name.  Raises InputError where git cannot say."""
    _git(folder, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", otherwise=f"--base {revision}: no such revision")
    listed = _git(folder, "ls-tree", "--name-only", revision, "./", otherwise=f"--base {revision}: cannot be listed")
    names = [name for name in listed.splitlines() if name.endswith(".toml")]
    texts = {
        name: _git(folder, "show", f"{revision}:./{name}", otherwise=f"--base {revision}: {name} cannot be read")
        for name in names
    }
    return {name: from_text(text, f"{name} at {revision}") for name, text in texts.items()}


def _git(folder: Path, *arguments: str, otherwise: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError as problem:
        raise InputError(f"{otherwise}: git cannot be run: {problem.strerror}") from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or "git found nothing; in a shallow clone, fetch it first"
        raise InputError(f"{otherwise} in {folder}: {said}")
    return done.stdout
