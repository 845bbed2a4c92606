"""Spreads and ceilings come from what was measured; a lock is added to only where it was made."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lock_samples import HEADER, LOCK

from oracle import locking
from oracle.accept import Asked
from oracle.errors import InputError
from oracle.ledger import Ledger, Measurement
from oracle.lock import ALL, KernelLock, rounded
from oracle.locking import Book, factor, lock_name, measured, same_machine, with_reason, with_spread
from oracle.verdict import Coverage, Finding, Outcome, Reason, Verdict

ENVIRONMENT: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "seed": 0,
    "profile": "quick",
    "suite_sha256": "a" * 64,
    "suite_skipped": {"no sinks": 2},
    "record": {"interpreted": False, "deterministic": True},
}
ACCEPTED = Verdict(
    outcome=Outcome.ACCEPT,
    door="accuracy",
    candidate="k",
    incumbent="emulator",
    findings=(),
    ratios=(),
    figures=None,
    coverage=Coverage(cases=1, elements=1, rows=1, counts={}, missing=(), left_out=(), skipped={}, unseen=()),
    notes=(),
    environment=ENVIRONMENT,
)
REJECTED = replace(
    ACCEPTED,
    outcome=Outcome.REJECT,
    door="",
    findings=(Finding(reason=Reason.GAIN, case="", text="it shrinks"), Finding(reason=Reason.BIAS, case="", text="")),
)


DRAWS = itertools.count()  # no two draws have the same bits


class Known(Ledger):
    """A ledger of given figures."""

    def __init__(self, **figures: float) -> None:
        super().__init__()
        self._figures = figures

    def measurements(self) -> dict[str, Measurement]:
        return rows(**self._figures)


def rows(**figures: float) -> dict[str, Measurement]:
    one = Measurement(cases=2, rows=9, digest=str(next(DRAWS)), figures=figures)
    return {ALL: one, "gemma2": one}


def kernel(**figures: float) -> KernelLock:
    return measured(Asked(candidate="k"), ACCEPTED, Known(**figures))


def test_the_factor_is_students_bound_on_one_more_value() -> None:
    assert factor(5) == rounded(7.173182219782308 * (1 + 1 / 5) ** 0.5)  # t(0.999, 4)
    assert factor(3) > factor(5) > factor(30) > 3.09


@given(st.lists(st.floats(min_value=0.1, max_value=1.0), min_size=5, max_size=5))
def test_a_ceiling_is_so_many_spreads_above_the_value(values: list[float]) -> None:
    own, *others = map(rounded, values)
    figure = with_spread(kernel(rms_e=own), [rows(rms_e=v) for v in others]).families["gemma2"].figures["rms_e"]

    assert figure.value == own
    assert figure.spread == rounded(statistics.stdev([own, *others]))
    assert figure.ceiling == rounded(own + factor() * figure.spread) >= own


def test_fewer_seeds_make_a_wider_band() -> None:
    without = {name: row for name, row in rows(rms_e=0.3).items() if name == ALL}
    figures = with_spread(kernel(rms_e=0.1), [rows(rms_e=0.2), rows(rms_e=0.15), without, without]).families["gemma2"].figures

    assert figures["rms_e"].spread == rounded(statistics.stdev([0.1, 0.2, 0.15]) * factor(3) / factor(5))


def test_a_seed_that_gives_the_same_bits_counts_for_nothing() -> None:
    captured = rows(rms_e=0.1)["gemma2"]
    others = [{ALL: rows(rms_e=v)[ALL], "gemma2": captured} for v in (0.11, 0.12, 0.13, 0.14)]
    found = with_spread(kernel(rms_e=0.1), others).families

    assert found["gemma2"].figures["rms_e"].spread == found[ALL].figures["rms_e"].spread > 0


def test_a_row_that_no_other_seed_has_takes_the_largest_relative_spread() -> None:
    lone = [{ALL: rows(rms_e=0.2)[ALL]} for _ in range(4)]
    found = with_spread(kernel(rms_e=0.1), lone).families

    assert found["gemma2"].figures["rms_e"].spread == found[ALL].figures["rms_e"].spread > 0


def test_a_rejected_kernel_is_locked_by_its_reason_alone() -> None:
    locked = measured(Asked(candidate="k"), REJECTED, Known(rms_e=1e9))

    assert (locked.verdict, locked.reason, locked.families) == ("reject", "gain", {})
    assert measured(Asked(candidate="k"), REJECTED, Known(), "bias").reason == "bias"
    assert measured(Asked(candidate="k"), REJECTED, Known(), "crash").reason == "gain"
    assert with_spread(locked, []) == locked


def test_a_kernel_of_varying_bits_has_no_digest() -> None:
    varies = replace(ACCEPTED, environment=ENVIRONMENT | {"record": {"interpreted": False, "deterministic": False}})

    assert measured(Asked(candidate="k"), varies, Known(rms_e=0.1)).families[ALL].digest == ""


def test_interpreted_kernels_have_a_lock_of_their_own() -> None:
    assert lock_name(ACCEPTED) == "cpu"
    interpreted = {"record": {"interpreted": True, "deterministic": True}}
    assert lock_name(replace(ACCEPTED, environment=ENVIRONMENT | interpreted)) == "triton-interpreter"


@pytest.mark.parametrize("fact", ["torch", "hardware", "threads", "triton"])
def test_another_machine_is_another_version_or_hardware_or_number_of_threads(fact: str) -> None:
    here = replace(LOCK, header=HEADER | locking.machine("cpu") | {"threads": 1})

    assert same_machine(here, ENVIRONMENT)
    assert not same_machine(replace(here, header={**here.header, fact: "other"}), ENVIRONMENT)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other seeds measure the same."""
    monkeypatch.setattr(locking, "other_seeds", lambda asked, seed, progress: [rows(rms_e=0.1)] * 4)
    monkeypatch.setattr(locking, "constants", lambda: {"margin_named": 1.05})


@pytest.mark.usefixtures("steady")
def test_a_kernel_that_is_entered_moves_no_other() -> None:
    old = replace(LOCK, header=HEADER | locking.machine("cpu") | {"threads": 1})
    book = Book({"cpu": old}, partial=True)
    book.enter("new", Asked(candidate="new"), ACCEPTED, Known(rms_e=0.1))
    lock = book.closed()["cpu"]

    assert {name: lock.kernels[name] for name in old.kernels} == old.kernels
    assert lock.kernels["new"].families["gemma2"].figures["rms_e"].ceiling == 0.1
    assert lock.header["shipped"] is False


@pytest.mark.usefixtures("steady")
def test_a_lock_of_another_machine_is_not_added_to() -> None:
    book = Book({"cpu": replace(LOCK, header=HEADER | {"torch": "1.0"})}, partial=True)

    with pytest.raises(InputError, match=r"cpu.toml was made with torch 1.0, .*measure all of it anew: `oracle lock`"):
        book.enter("new", Asked(candidate="new"), ACCEPTED, Known(rms_e=0.1))


@pytest.mark.usefixtures("steady")
def test_only_what_is_accepted_is_locked_but_for_what_must_be_rejected() -> None:
    book = Book({}, partial=True)
    with pytest.raises(InputError, match="k: reject: it shrinks; only an accepted kernel can be locked"):
        book.enter("k", Asked(candidate="k"), REJECTED, Known())
    book.enter("k", Asked(candidate="k"), REJECTED, Known(), reason="gain")

    assert book.closed()["cpu"].kernels["k"].reason == "gain"


def test_a_reason_is_kept_with_what_it_loosened() -> None:
    assert with_reason(LOCK, "why", ["kernel.k.door"]).loosened[-1] == {
        "oracle": "0.1.0",
        "reason": "why",
        "what": ["kernel.k.door"],
    }


def test_what_is_wrong_under_another_seed_is_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "answer_once", lambda asked, ledger, progress: asked.seed != 2)

    with pytest.raises(InputError, match="k: is wrong with seed 2; see `oracle accept k --seed 2`"):
        locking.other_seeds(Asked(candidate="k"), 0, lambda done, total, what: None)
