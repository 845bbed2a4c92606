"""The kernel table, and what the gate says of a verdict."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from lock_samples import HEADER, KERNEL, LOCK, LOOSE, REJECTED
from rich.console import Console

from oracle.accept import Asked
from oracle.constants import constants
from oracle.gate import Entry, Judged, allow_better, check, judge, moved_constants, roster
from oracle.gate_text import complaint_lines, gate_lines, gate_table, github_annotations, summary
from oracle.isolation.locate import load
from oracle.kernels.field.table import FIELD
from oracle.kernels.table import KERNELS, KernelRow, unavailable
from oracle.lock import Lock, from_text, to_text
from oracle.locking import machine
from oracle.loosened import Complaint, complaints
from oracle.moves import Kind, Move
from oracle.trial import Watch
from oracle.verdict import Coverage, Finding, Outcome, Reason, Verdict

NOTHING = Coverage(cases=1, elements=1, rows=1, counts={}, missing=(), left_out=(), skipped={}, unseen=())
ACCEPT = Verdict(
    outcome=Outcome.ACCEPT,
    door="accuracy",
    candidate="k",
    incumbent="emulator",
    findings=(),
    ratios=(),
    figures=None,
    coverage=NOTHING,
    notes=(),
    environment={"device": "cpu"},
)
LEAK = Finding(reason=Reason.LEAK, case="c", text="it leaks")
REJECT = replace(ACCEPT, outcome=Outcome.REJECT, door="", findings=(LEAK,))
GOOD = KernelRow(target="m:f", about="", expect="accept")
BAD = KernelRow(target="m:f", about="", expect="reject", reason="past-the-plan")


def test_the_verdict_expected_is_no_problem() -> None:
    assert check(GOOD, ACCEPT) == ""
    assert check(BAD, REJECT) == ""


@pytest.mark.parametrize(
    ("row", "verdict", "says"),
    [
        (GOOD, REJECT, "expected accept, got reject: it leaks"),
        (GOOD, replace(ACCEPT, outcome=Outcome.INCONCLUSIVE, door=""), "expected accept, got inconclusive"),
        (GOOD, replace(ACCEPT, outcome=Outcome.NOT_COVERED), "expected accept, got not-covered"),
        (BAD, ACCEPT, "expected reject (past-the-plan), got accept"),
        (replace(BAD, reason="gain"), REJECT, "expected to be rejected for gain, was for past-the-plan"),
        (replace(GOOD, door="bits"), ACCEPT, "expected through door bits, went through accuracy"),
    ],
)
def test_any_other_verdict_is_named(row: KernelRow, verdict: Verdict, says: str) -> None:
    assert check(row, verdict) == says


def test_the_order_of_sums_may_differ_on_a_gpu() -> None:
    assert check(replace(GOOD, door="bits"), replace(ACCEPT, environment={"device": "cuda"})) == ""


@pytest.mark.parametrize("name", KERNELS)
def test_every_row_names_a_kernel_with_a_record(name: str) -> None:
    kernel, _ = load(KERNELS[name].target)

    assert callable(kernel)
    assert hasattr(kernel, "record")


SHIPPED = [name for name, row in KERNELS.items() if row.elsewhere is None]


@pytest.mark.parametrize("row", [KERNELS[name] for name in SHIPPED], ids=SHIPPED)
def test_every_row_expects_something_that_can_be_said(row: KernelRow) -> None:
    assert row.expect in ("accept", "reject")
    assert (row.reason in map(str, Reason)) == (row.expect == "reject")
    if row.against:
        assert hasattr(load(KERNELS[row.against].target if row.against in KERNELS else row.against)[0], "record")


@pytest.mark.parametrize("verdict", [ACCEPT, REJECT])
def test_nothing_is_expected_of_another_projects_kernel(verdict: Verdict) -> None:
    others = {name: row for name, row in KERNELS.items() if row.elsewhere is not None}

    assert set(others) == set(FIELD) and not any(row.expect or row.reason or row.door for row in others.values())
    assert check(others["flex-eager"], verdict) == "" == unavailable(others["flex-eager"], "cpu")
    assert unavailable(others["torch-cudnn"], "cpu") == "is not for cpu"


def test_a_kernel_without_its_library_says_how_to_get_it() -> None:
    missing = replace(GOOD, needs="a_module_that_is_not_there")

    assert unavailable(missing, "cpu").startswith("a_module_that_is_not_there is not installed: pip install")
    assert unavailable(replace(GOOD, devices=("cpu",)), "cuda") == "does not run on cuda"
    assert unavailable(GOOD, "cpu") == ""


ENVIRONMENT: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "profile": "default",
    "suite_sha256": "a" * 64,
    "suite_skipped": {},
    "record": {"interpreted": False, "deterministic": True},
}
RIGHT = replace(ACCEPT, environment=ENVIRONMENT)
REJECT_HERE = replace(REJECT, environment=ENVIRONMENT)
HERE = replace(LOCK, header=HEADER | machine("cpu") | {"threads": 1})
LOCKS = {"cpu": HERE}


def entry(name: str, locked: Any = None, row: KernelRow | None = None, absent: str = "", file: str = "cpu") -> Entry:
    return Entry(name=name, asked=Asked(candidate=name), row=row, file=file if locked else "", locked=locked, absent=absent)


def judged_as(verdict: Verdict, one: Entry, locks: dict[str, Lock] = LOCKS) -> Judged:
    def run(asked: Asked, watch: Watch) -> Verdict:
        return verdict

    return judge(one, locks, run)


def test_the_roster_is_all_that_is_locked_and_what_is_shipped_where_a_lock_says_so() -> None:
    shipped = {"cpu": replace(HERE, header={**HERE.header, "shipped": True})}

    assert [e.name for e in roster(LOCKS, "cpu")] == list(LOCK.kernels)
    assert [e.name for e in roster(shipped, "cpu")] == [*SHIPPED, *LOCK.kernels]
    assert [e.name for e in roster({}, "cpu")] == SHIPPED
    assert [e.name for e in roster(LOCKS, "cpu", names=["new.py:f"], against="old.py:f")] == ["new.py:f"]


def test_a_locked_kernel_is_asked_what_it_was_asked() -> None:
    locked = {
        "cpu": replace(HERE, kernels={"k": replace(KERNEL, against="old", profile="deep")}, header={**HERE.header, "seed": 7})
    }
    (one,) = roster(locked, "cpu", cases=Path("c"))

    assert (one.asked.against, one.asked.profile, one.asked.seed, one.asked.cases) == ("old", "deep", 7, Path("c"))
    (again,) = roster(locked, "cpu", names=["k"], against="new", profile="quick")
    assert (again.asked.against, again.asked.profile) == ("new", "quick")


def test_what_is_locked_and_cannot_be_run_is_red() -> None:
    absent = judged_as(RIGHT, entry("k", KERNEL, absent="no CUDA device here"))

    assert [m.text for m in absent.moves] == ["k: locked, and not measured: no CUDA device here"]
    assert judged_as(RIGHT, entry("k", absent="no CUDA device here")).holds


def test_what_is_not_locked_is_red_where_there_is_a_lock() -> None:
    assert [m.kind for m in judged_as(RIGHT, entry("k")).moves] == [Kind.NEW]
    assert judged_as(RIGHT, entry("k"), {}).holds


def test_a_kernel_that_gave_no_figures_is_red() -> None:
    kinds = [m.kind for m in judged_as(RIGHT, entry("k", KERNEL)).moves]

    assert kinds == [Kind.MISSING] * len(KERNEL.families)


def test_a_kernel_belongs_to_the_lock_of_its_device() -> None:
    interpreted = replace(RIGHT, environment=ENVIRONMENT | {"record": {"interpreted": True, "deterministic": True}})

    (move,) = judged_as(interpreted, entry("k", KERNEL)).moves
    assert "locked in cpu.toml, and is now one of triton-interpreter.toml" in move.text


def test_any_of_the_reasons_found_may_be_the_one_locked() -> None:
    both = replace(
        RIGHT,
        outcome=Outcome.REJECT,
        door="",
        findings=(LEAK, Finding(reason=Reason.GAIN, case="", text="")),
    )
    locked = replace(REJECTED, profile="default")

    assert judged_as(both, entry("k", locked)).holds
    other = judged_as(replace(both, findings=(LEAK,)), entry("k", locked))
    assert [m.text for m in other.moves] == ["k: rejected for past-the-plan, no longer for gain"]


def test_the_kernel_table_and_the_lock_both_count() -> None:
    both = judged_as(REJECT_HERE, entry("k", KERNEL, row=GOOD))

    assert both.problem == "expected accept, got reject: it leaks"
    assert [m.kind for m in both.moves] == [Kind.VERDICT]


def test_better_may_be_allowed_and_worse_may_not() -> None:
    moves = tuple(Move(kind=kind, what="kernel.k", text="") for kind in Kind)

    (allowed,) = allow_better([Judged(entry=entry("k"), verdict=RIGHT, moves=moves)])
    assert [m.kind for m in allowed.moves] == [kind for kind in Kind if kind is not Kind.FELL]


def test_a_constant_that_changed_is_red() -> None:
    same = {"cpu": replace(HERE, bound=constants())}
    other = {"cpu": replace(HERE, bound={**constants(), "margin_named": 1.1})}

    assert moved_constants(same) == {}
    assert [c.what for c in moved_constants(other)["cpu.toml"]] == ["bound.margin_named"]
    assert len(moved_constants({"cpu": replace(HERE, bound={})})["cpu.toml"]) == len(constants())


def test_the_bound_itself_is_among_the_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    before = constants()
    monkeypatch.setattr("oracle.references.bound.LAMBDA", 3.5)
    after = constants()

    assert after["lambda"] == 3.5 and after["probe_b"] > before["probe_b"]
    assert all(value > 0 and torch.tensor(value).isfinite() for value in before.values())


def text_of(judged: list[Judged]) -> str:
    out = StringIO()
    Console(file=out, width=160).print(gate_table(judged))
    return out.getvalue()


MOVED = Judged(
    entry=entry("kernel.py:attention", KERNEL),
    verdict=RIGHT,
    moves=(Move(kind=Kind.ROSE, what="kernel.kernel.py:attention.family.gemma2.rms_e_ceiling", text="it rose | 50% <b>"),),
    notes=("bits were not compared",),
)


def test_the_table_has_a_line_for_every_kernel() -> None:
    lines = text_of(
        [MOVED, judged_as(RIGHT, entry("k", absent="no CUDA device here")), judged_as(RIGHT, entry("e", row=GOOD), {})]
    )

    assert "1 moved: rose" in lines and "not run: no CUDA device here" in lines and "as expected" in lines
    assert gate_lines([MOVED]) == ["it rose | 50% <b>", "note: bits were not compared"]


def test_a_sentence_stands_beside_the_line_of_the_lock_that_it_is_about() -> None:
    lock = from_text(to_text(LOCK), "x")
    lines = to_text(LOCK).splitlines()
    (said,) = github_annotations(Path("ci/thresholds"), {"cpu": lock}, [MOVED], {})

    head, _, text = said.removeprefix("::error ").partition("::")
    fields = dict(field.split("=") for field in head.split(","))
    assert fields["file"] == "ci/thresholds/cpu.toml"
    assert lines[int(fields["line"]) - 1] == "rms_e_ceiling = 0.157858"
    assert lines[: int(fields["line"])].count('[kernel."kernel.py:attention".family.gemma2]') == 1
    assert text == "it rose | 50%25 <b>"


def test_a_fact_that_is_gone_is_annotated_at_what_held_it() -> None:
    lock = from_text(to_text(LOCK), "x")
    gone = {
        "cpu.toml": [Complaint(what="kernel.sdpa.flash.family.gemma9", text="gone")],
        "old.toml": [Complaint(what="", text="removed")],
    }
    said = list(github_annotations(Path("t"), {"cpu": lock}, [], gone))

    line = int(said[0].partition("line=")[2].partition(",")[0])
    assert to_text(LOCK).splitlines()[line - 1] == '[kernel."sdpa.flash"]'
    assert said[1].startswith("::error file=t/old.toml,line=1,")


def test_the_summary_has_the_sentences_the_table_and_what_was_not_covered() -> None:
    uncovered = replace(MOVED, verdict=replace(RIGHT, coverage=replace(NOTHING, left_out=("family gemma3",))))
    text = summary([uncovered], {}, False)

    assert text.startswith("## oracle gate: moved")
    assert "- **it rose \\| 50% &lt;b>**" in text
    assert "| kernel.py:attention | accept accuracy | accept accuracy | 1 cases, default | 1 moved: rose |" in text
    assert "kernel.py:attention: family gemma3" in text
    assert "bits were not compared" in text


def test_a_complaint_shows_the_waiver_to_fill_in() -> None:
    lines = complaint_lines({"cpu.toml": complaints(LOCK, LOOSE, date(2026, 1, 1))})

    assert lines[0].startswith("cpu.toml: kernel.kernel.py:attention.family.gemma2.rms_e_ceiling went from 0.157858 to 0.2")
    assert lines[1] == "    [[waiver]]"
