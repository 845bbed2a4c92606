"""A folder of locks: one file for each kind of device, and what the files alone tell.  torch is not loaded."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path

from oracle.errors import InputError
from oracle.lock import Lock, read
from oracle.loosened import Complaint, at_revision, complaints, expired


def read_locks(folder: Path, device: str) -> dict[str, Lock]:
    """The locks in `folder` for kernels on `device`, by file name without `.toml`; none where there is no such folder.

    Raises InputError for one that is malformed.
    """
    locks = {path.stem: read(path) for path in sorted(folder.glob("*.toml"))}
    return {name: lock for name, lock in locks.items() if lock.header["device"] == device}


def loosening(folder: Path, revision: str, today: date) -> dict[str, list[Complaint]]:
    """What stands against the locks in `folder` after those of a git revision, by file name: within seconds, without measuring.

    Raises InputError for a malformed lock or a revision that git does not know.
    """
    found: dict[str, list[Complaint]] = {}
    for name, base in at_revision(folder, revision).items():
        path = folder / name
        if path.exists():
            found[name] = complaints(base, read(path), today)
        else:
            found[name] = [Complaint(what="", text=f"{path} was removed since {revision}: restore it")]
    return found


def overdue(locks: Mapping[str, Lock], today: date) -> dict[str, list[Complaint]]:
    """Expired waivers, by file name."""
    return {f"{name}.toml": found for name, lock in locks.items() if (found := expired(lock, today))}


def require_locks(folder: Path, locks: Mapping[str, Lock], device: str) -> None:
    """Raises InputError where a folder that was named holds no lock for `device`."""
    if not locks:
        raise InputError(f"--lock {folder}: no lock for device {device} there; `oracle lock --lock {folder}` makes one")
