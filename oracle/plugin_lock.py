"""Verdicts of tests beside a lock: `pytest --oracle-lock FOLDER`, and `--oracle-update` to write it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from oracle.accept import Asked
from oracle.cases import read_cases
from oracle.errors import InputError
from oracle.gate import Entry, Judge, Judged, judge
from oracle.ledger import Ledger
from oracle.lock import write
from oracle.lock_files import read_locks
from oracle.locking import Book
from oracle.loosened import loosened
from oracle.verdict import Outcome, Verdict


def row_name(asked: Asked) -> str:
    """What a test's verdict is called in the lock: the kernel, and the families where only some are asked for."""
    return " ".join([asked.candidate, *(f"--family {name}" for name in asked.families)])


def as_locked(asked: Asked, folder: Path) -> Asked:
    """What is asked, with the lock's seed; figures of other seeds cannot be compared.

    Raises InputError where the test names a seed of its own.
    """
    seed = next((int(lock.header["seed"]) for lock in read_locks(folder, asked.device).values()), 0)
    if asked.seed not in (None, seed):
        raise InputError(f"seed {asked.seed}: the lock in {folder} was made with seed {seed}; leave the seed to it")
    return replace(asked, seed=seed)


def judge_locked(asked: Asked, folder: Path, run: Judge) -> Judged:
    """The verdict beside the lock: what moved is in `moves`, and so is a kernel that is not locked."""
    locks = read_locks(folder, asked.device)
    if not locks:
        raise InputError(f"--oracle-lock {folder}: no lock for device {asked.device} there; --oracle-update makes one")
    name = row_name(asked)
    homes = [(file, lock.kernels[name]) for file, lock in locks.items() if name in lock.kernels]
    file, locked = homes[0] if homes else ("", None)
    return judge(Entry(name=name, asked=asked, row=None, file=file, locked=locked, absent=""), locks, run)


def update(asked: Asked, folder: Path, run: Judge) -> tuple[Verdict, bool]:
    """The verdict, and whether its row is new in the lock; the lock holds it now, where it was accepted.

    Raises InputError where the lock would demand less than it did.
    """
    locks, name = read_locks(folder, asked.device), row_name(asked)
    ledger = Ledger(read_cases(asked.cases) if asked.cases else ())
    verdict = run(asked, ledger)
    if verdict.outcome is not Outcome.ACCEPT:
        return verdict, False
    book = Book(locks, partial=True)
    book.enter(name, asked, verdict, ledger)
    ((file, lock),) = book.closed().items()
    new = file not in locks or name not in locks[file].kernels
    if not new and (facts := loosened(locks[file], lock)):
        step = "take the row out by hand and update again, and `oracle gate --base` will ask for a waiver"
        raise InputError(f"{folder / file}.toml would demand less than it did: {facts[0].text}; {step}")
    folder.mkdir(parents=True, exist_ok=True)
    write(lock, folder / f"{file}.toml")
    return verdict, new
