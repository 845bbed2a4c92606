"""The kernel table, and what the gate says of a verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oracle.gate import check
from oracle.isolation.locate import load
from oracle.kernels.table import KERNELS, KernelRow, unavailable
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


@pytest.mark.parametrize("row", KERNELS.values(), ids=KERNELS)
def test_every_row_expects_something_that_can_be_said(row: KernelRow) -> None:
    assert row.expect in ("accept", "reject")
    assert (row.reason in map(str, Reason)) == (row.expect == "reject")
    assert not row.against or row.against in KERNELS


def test_a_kernel_without_its_library_says_how_to_get_it() -> None:
    missing = replace(GOOD, needs="a_module_that_is_not_there")

    assert unavailable(missing, "cpu").startswith("a_module_that_is_not_there is not installed: pip install")
    assert unavailable(replace(GOOD, devices=("cpu",)), "cuda") == "does not run on cuda"
    assert unavailable(GOOD, "cpu") == ""
