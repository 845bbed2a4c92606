"""A kernel beside its lock: whatever moved is named in a sentence, and nothing else is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from lock_samples import KERNEL, REJECTED, ROW, with_figure, with_row

from oracle.lock import Figure, KernelLock
from oracle.moves import Compared, Kind, compare, unlocked, unmeasured

FACTOR = 7.85783


def moved(now: KernelLock, locked: KernelLock = KERNEL, *, same_machine: bool = True) -> Compared:
    return compare("k", locked, now, same_machine=same_machine, factor=FACTOR)


def measured(value: float, name: str = "rms_e") -> KernelLock:
    return with_row(with_figure(name, Figure(value=value, spread=0.0, ceiling=value)))


def test_the_same_moves_nothing() -> None:
    assert moved(KERNEL) == Compared(moves=())
    assert moved(REJECTED, REJECTED) == Compared(moves=())


def test_within_its_band_a_figure_has_not_moved() -> None:
    assert moved(measured(0.157858)) == moved(measured(0.1422)) == Compared(moves=())


def test_an_error_past_its_ceiling_has_risen() -> None:
    (move,) = moved(measured(0.157859)).moves

    assert move.kind is Kind.ROSE
    assert move.what == "kernel.k.family.gemma2.rms_e_ceiling"
    assert move.text == "k on gemma2: rms_e rose from 0.15 to 0.157859 (+5.2%), ceiling 0.157858"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_has_risen(value: float) -> None:
    assert [m.kind for m in moved(measured(value)).moves] == [Kind.ROSE]


def test_an_error_below_its_band_makes_the_lock_stale() -> None:
    (move,) = moved(measured(0.142)).moves

    assert move.kind is Kind.FELL
    assert (
        move.text
        == "k on gemma2: rms_e fell from 0.15 to 0.142, below its band (0.142142): the lock is stale; `oracle lock` tightens it"
    )


def test_on_another_machine_a_fall_is_told_and_a_rise_counts() -> None:
    fell = moved(measured(0.142), same_machine=False)

    assert fell.moves == ()
    assert fell.notes[-1] == "k: 1 figures are below their bands here, which makes a lock stale only where it was made"
    assert [m.kind for m in moved(measured(0.2), same_machine=False).moves] == [Kind.ROSE]


def test_a_slope_may_shrink() -> None:
    locked = with_row(with_figure("gain", Figure(value=1e-3, spread=1e-5, ceiling=2e-3)))

    assert moved(measured(0.0, "gain"), locked) == Compared(moves=())


@pytest.mark.parametrize(
    ("now", "locked", "says"),
    [
        (replace(KERNEL, verdict="reject", door="", reason="bias"), KERNEL, "k: the verdict was accept, is reject (bias)"),
        (KERNEL, REJECTED, "k: the verdict was reject, is accept"),
        (replace(REJECTED, reason="bias"), REJECTED, "k: rejected for bias, no longer for gain"),
        (KERNEL, replace(KERNEL, door="bits", against="old"), "k: door bits is lost: it has other bits than the emulator"),
        (replace(KERNEL, verdict="inconclusive", door=""), KERNEL, "k: the verdict was accept, is inconclusive"),
    ],
)
def test_another_verdict_or_door_is_named_before_all_else(now: KernelLock, locked: KernelLock, says: str) -> None:
    (move,) = moved(now, locked).moves

    assert move.kind is Kind.VERDICT and move.text.startswith(says)


def test_families_are_missed_and_noticed() -> None:
    fewer = replace(KERNEL, families={"all": ROW})

    assert [(m.kind, m.text) for m in moved(fewer).moves] == [(Kind.MISSING, "k on gemma2: locked, and not measured")]
    assert [m.kind for m in moved(KERNEL, fewer).moves] == [Kind.NEW]


def test_figures_are_missed_and_noticed() -> None:
    fewer = with_row(with_figure("rms_e", None))

    assert [m.text for m in moved(fewer).moves] == ["k on gemma2: rms_e is no longer measured"]
    assert [m.text for m in moved(KERNEL, fewer).moves] == ["k on gemma2: rms_e is measured, and not locked"]


def test_another_suite_cannot_be_compared() -> None:
    (move,) = moved(replace(measured(9.0), suite_sha256="b" * 64)).moves

    assert move.kind is Kind.SUITE and "its suite changed (12 cases then, 12 cases now)" in move.text


def test_a_longer_skip_list_is_named_and_a_shorter_one_is_not() -> None:
    (move,) = moved(replace(KERNEL, skipped={"no softcap": 5})).moves

    assert move.text == "k: skipped 5 cases (no softcap), 4 before"
    assert moved(replace(KERNEL, skipped={})) == Compared(moves=())
    assert [m.text for m in moved(replace(KERNEL, skipped={"no softcap": 4, "no sinks": 1})).moves] == [
        "k: skipped 1 cases (no sinks), 0 before"
    ]


def test_other_bits_count_where_the_door_is_same_bits_and_on_the_same_machine() -> None:
    bits, other = replace(KERNEL, door="bits"), with_row(replace(ROW, digest="1" * 64))

    assert [m.kind for m in moved(replace(other, door="bits"), bits).moves] == [Kind.BITS]
    assert moved(other).moves == ()
    assert moved(other).notes == ("k: other bits than the lock's on 1 of 2 rows, within every band",)
    elsewhere = moved(replace(other, door="bits"), bits, same_machine=False)
    assert elsewhere.moves == ()
    assert "figures were compared, bits were not" in elsewhere.notes[0]


def test_kernels_are_missed_and_noticed() -> None:
    assert unmeasured("k", "no CUDA device here").text == "k: locked, and not measured: no CUDA device here"
    assert unlocked("k").text == "k: measured, and not locked: `oracle lock` adds it"
