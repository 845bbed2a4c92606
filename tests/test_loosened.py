"""A lock after another: whatever demands less is named, and only a waiver that says so permits it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lock_samples import HEADER, KERNEL, LOCK, LOOSE, REJECTED, ROW, WAIVER, WHAT, with_figure, with_kernel, with_row

from oracle.errors import InputError
from oracle.lock import Figure, Lock, from_text, to_text, write
from oracle.lock_files import loosening, overdue, read_locks, require_locks
from oracle.loosened import REMOVED, Loosened, complaints, expired, loosened

TODAY = date(2026, 12, 31)


def facts(now: Lock, base: Lock = LOCK) -> list[tuple[str, object, object]]:
    return [(fact.what.removeprefix("kernel.kernel.py:attention."), fact.was, fact.now) for fact in loosened(base, now)]


def test_a_lock_is_not_looser_than_itself() -> None:
    assert loosened(LOCK, LOCK) == []


@given(st.floats(min_value=0, max_value=1))
def test_a_ceiling_is_looser_where_it_is_higher(ceiling: float) -> None:
    now = with_kernel(with_row(with_figure("rms_e", Figure(value=0.15, spread=0.001, ceiling=ceiling))))

    assert facts(now) == ([] if ceiling <= 0.157858 else [("family.gemma2.rms_e_ceiling", 0.157858, ceiling)])


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (replace(LOCK, header=HEADER | {"cases": 23}), ("header.cases", 24, 23)),
        (replace(LOCK, header=HEADER | {"mutants": 360}), ("header.mutants", 361, 360)),
        (replace(LOCK, header=HEADER | {"input_classes": 20}), ("header.input_classes", 21, 20)),
        (replace(LOCK, header=HEADER | {"seeds": 4}), ("header.seeds", 5, 4)),
        (replace(LOCK, bound={"margin_named": 1.04}), ("bound.margin_named", 1.05, 1.04)),
        (replace(LOCK, bound={}), ("bound.margin_named", 1.05, REMOVED)),
        (replace(LOCK, kernels={k: v for k, v in LOCK.kernels.items() if k != "wrong"}), ("kernel.wrong", "reject", REMOVED)),
        (replace(LOCK, kernels={**LOCK.kernels, "wrong": KERNEL}), ("kernel.wrong.verdict", "reject", "accept")),
        (with_kernel(replace(KERNEL, families={"all": ROW})), ("family.gemma2", 12, REMOVED)),
        (with_kernel(with_row(replace(ROW, rows=499))), ("family.gemma2.rows", 500, 499)),
        (with_kernel(with_row(replace(ROW, cases=11))), ("family.gemma2.cases", 12, 11)),
        (with_kernel(with_row(with_figure("gain", None))), ("family.gemma2.gain_ceiling", 9e-6, REMOVED)),
        (with_kernel(replace(KERNEL, skipped={"no softcap": 5})), ("skipped.no softcap", 4, 5)),
        (with_kernel(replace(KERNEL, skipped={"no softcap": 4, "no sinks": 1})), ("skipped.no sinks", 0, 1)),
        (with_kernel(replace(KERNEL, profile="quick")), ("profile", "default", "quick")),
        (with_kernel(replace(KERNEL, against="other")), ("against", "", "other")),
    ],
)
def test_every_way_to_demand_less_is_named(now: Lock, expected: tuple[str, object, object]) -> None:
    assert facts(now)[0] == expected


def test_a_door_is_lost_and_not_won() -> None:
    bits = with_kernel(replace(KERNEL, door="bits"))

    assert facts(LOCK, bits) == [("door", "bits", "accuracy")]
    assert facts(bits, LOCK) == []


def test_more_of_everything_is_no_loosening() -> None:
    more = with_kernel(replace(KERNEL, skipped={}, profile="deep", families={**KERNEL.families, "gemma3": ROW}))

    assert loosened(LOCK, replace(more, header=HEADER | {"cases": 99}, bound={"margin_named": 1.05, "new": 1.0})) == []


def test_without_a_waiver_it_is_a_complaint_with_the_waiver_to_fill_in() -> None:
    (complaint,) = complaints(LOCK, LOOSE, TODAY)

    assert complaint.what == WHAT
    assert complaint.text == f"{WHAT} went from 0.157858 to 0.2, and no waiver permits it"
    filled = complaint.blank.replace('why = ""', 'why = "w"').replace('expires = ""', 'expires = "2027-01-01"')
    assert complaints(LOCK, from_text(to_text(LOOSE) + "\n" + filled, "x"), TODAY) == []


def test_a_waiver_permits_just_what_it_says_until_its_day() -> None:
    waived = replace(LOOSE, waivers=(WAIVER,))

    assert complaints(LOCK, waived, TODAY) == []
    (late,) = complaints(LOCK, waived, date(2027, 1, 1))
    assert late.text.startswith(f"the waiver of {WHAT} expired on 2026-12-31")
    for wrong in (replace(WAIVER, now=0.19), replace(WAIVER, was=0.1), replace(WAIVER, what=WHAT.replace("gemma2", "all"))):
        texts = [c.text for c in complaints(LOCK, replace(LOOSE, waivers=(wrong,)), TODAY)]
        assert len(texts) == 2 and "no waiver permits it" in texts[0] and "permits nothing that changed" in texts[1]


def test_a_waiver_that_was_there_before_is_a_record() -> None:
    landed = replace(LOOSE, waivers=(WAIVER,))

    assert complaints(landed, landed, TODAY) == []
    assert len(complaints(landed, landed, date(2027, 1, 1))) == 1


def test_a_day_that_is_none_is_a_complaint() -> None:
    assert "is no day of the calendar" in expired(replace(LOCK, waivers=(replace(WAIVER, expires="2026-02-30"),)), TODAY)[0].text


def test_a_removed_fact_reads_as_one() -> None:
    assert Loosened(what="kernel.k", was="accept", now=REMOVED).text == "kernel.k was removed"


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository whose first commit has one lock, in a folder."""
    folder = tmp_path / "ci" / "thresholds"
    folder.mkdir(parents=True)
    write(LOCK, folder / "cpu.toml")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "lock")
    return folder


def test_the_lock_at_a_revision_is_the_base(repository: Path) -> None:
    assert loosening(repository, "HEAD", TODAY) == {"cpu.toml": []}
    write(LOOSE, repository / "cpu.toml")
    assert [c.what for c in loosening(repository, "HEAD", TODAY)["cpu.toml"]] == [WHAT]
    (repository / "sm_90.toml").write_text(to_text(LOCK))
    assert list(loosening(repository, "HEAD", TODAY)) == ["cpu.toml"]


def test_a_lock_file_that_is_gone_is_a_complaint(repository: Path) -> None:
    (repository / "cpu.toml").unlink()

    (complaint,) = loosening(repository, "HEAD", TODAY)["cpu.toml"]
    assert "was removed since HEAD" in complaint.text


@pytest.mark.parametrize("revision", ["no-such-branch", "--output=x", ""])
def test_a_revision_that_git_does_not_know_is_wrong_usage(repository: Path, revision: str) -> None:
    with pytest.raises(InputError, match="no such revision"):
        loosening(repository, revision, TODAY)


def test_outside_a_repository_there_is_no_base(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--base HEAD"):
        loosening(tmp_path, "HEAD", TODAY)


def test_a_malformed_base_names_the_revision(repository: Path) -> None:
    (repository / "cpu.toml").write_text("format = 1\nformat = 1\n")
    git(repository, "commit", "-qam", "broken")

    with pytest.raises(InputError, match=r"cpu.toml at HEAD: .*line 2"):
        loosening(repository, "HEAD", TODAY)


def test_a_folder_holds_the_locks_of_a_device(tmp_path: Path) -> None:
    write(LOCK, tmp_path / "cpu.toml")
    write(replace(LOCK, header=HEADER | {"device": "cuda"}), tmp_path / "sm_90.toml")

    assert list(read_locks(tmp_path, "cpu")) == ["cpu"] and list(read_locks(tmp_path, "cuda")) == ["sm_90"]
    assert read_locks(tmp_path / "none", "cpu") == {}
    with pytest.raises(InputError, match=r"no lock for device cpu there; `oracle lock --lock .*` makes one"):
        require_locks(tmp_path / "none", {}, "cpu")


def test_expired_waivers_are_seen_without_a_base() -> None:
    locks = {"cpu": replace(LOCK, waivers=(WAIVER,)), "other": replace(LOCK, kernels={"k": REJECTED})}

    assert overdue(locks, TODAY) == {}
    assert list(overdue(locks, date(2027, 1, 1))) == ["cpu.toml"]
