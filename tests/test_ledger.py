"""Figures by family are those of the cases that were seen, each counted once for its row and once for all."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from oracle.cases import Case
from oracle.contract import Record
from oracle.families import FAMILIES, Family
from oracle.isolation.outcome import Returned
from oracle.ledger import Ledger, group
from oracle.lock import FIGURES
from oracle.measure import measure
from oracle.pool import without_fill
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import emulate
from oracle.trial import Answer, Prepared, Seen, prepare

SHAPE = Family(name="2x1-64/64", q_heads=2, kv_heads=1, head_dim=64, head_dim_v=64, scale=0.125)
PAIR = Case(name="pair-0001", family=SHAPE, dtype="bf16", q_lens=(3, 1), kv_lens=(40, 20), page_size=16, seed=1)
NAMED = replace(PAIR, name="smollm2/randn", family=FAMILIES["smollm2"], seed=2)


def answer(case: Case) -> Answer:
    prepared = prepare(case, Record())
    out, lse = emulate(prepared.laid.call, Arithmetic(tile=16))
    return answered(prepared, out, lse)


def answered(prepared: Prepared, out: torch.Tensor, lse: torch.Tensor) -> Answer:
    rows, call = prepared.truth.rows, without_fill(prepared.laid)
    textbook = emulate(call, Arithmetic(), rows)
    seen = Seen(
        case=prepared.case,
        candidate=measure(prepared.truth, call, out[rows], lse[rows]),
        incumbent=measure(prepared.truth, call, *textbook),
        same_bits=None,
        findings=(),
        fills=(),
        calls=1,
        seconds=0.0,
        far_from_fp32=0.0,
    )
    returned = Returned(out=out, out_storage=None, lse=lse, seconds=0.0, changed_inputs=())
    return Answer(prepared=prepared, returned=returned, incumbent=textbook[0], seen=seen)


ONE, TWO = answer(PAIR), answer(NAMED)


def kept(*answers: Answer, own: tuple[Case, ...] = ()) -> Ledger:
    ledger = Ledger(own)
    for each in answers:
        ledger(each)
    return ledger


@pytest.mark.parametrize(
    ("name", "row"),
    [("pair-0001", "pair"), ("long-4k/randn", "long"), ("batch-65538", "batch"), ("promised/tiny-v/bf16", "promised")],
)
def test_a_case_of_no_family_counts_for_its_kind_of_shapes(name: str, row: str) -> None:
    assert group(replace(PAIR, name=name)) == row
    assert group(replace(NAMED, name=name)) == "smollm2"


def test_every_case_counts_for_its_row_and_for_all() -> None:
    rows = kept(ONE, TWO).measurements()

    assert list(rows) == ["all", "pair", "smollm2"]
    assert rows["all"].cases == 2 and rows["pair"].cases == rows["smollm2"].cases == 1
    assert rows["all"].rows == rows["pair"].rows + rows["smollm2"].rows
    assert set(rows["all"].figures) == set(FIGURES)


def test_the_figures_are_those_of_the_measurement() -> None:
    figures, mine = kept(ONE).measurements()["pair"].figures, ONE.seen.candidate
    assert mine is not None and mine.worst_lse is not None and ONE.seen.incumbent is not None

    assert figures["rms_e"] == pytest.approx(mine.rms)
    assert figures["ratio"] == pytest.approx(mine.rms / ONE.seen.incumbent.rms)
    assert (figures["max_e"], figures["max_e_lse"], figures["max_abs"]) == (mine.worst.units, mine.worst_lse.units, mine.max_abs)
    assert figures["mean_abs"] == pytest.approx(mine.mean_abs)


def test_all_is_the_larger_of_two_and_their_mean_square() -> None:
    rows = {name: row.figures for name, row in kept(ONE, TWO).measurements().items()}

    assert rows["all"]["max_e"] == max(rows["pair"]["max_e"], rows["smollm2"]["max_e"])
    assert (
        min(rows["pair"]["rms_e"], rows["smollm2"]["rms_e"])
        < rows["all"]["rms_e"]
        < max(rows["pair"]["rms_e"], rows["smollm2"]["rms_e"])
    )


def test_fp32_cases_have_no_ratio() -> None:
    assert "ratio" not in kept(answer(replace(PAIR, dtype="fp32"))).measurements()["all"].figures


def test_the_digest_is_of_the_live_bits() -> None:
    digest = kept(ONE).measurements()["all"].digest
    padded = torch.cat([ONE.returned.out, torch.full((2, 2, 64), 7.0, dtype=torch.bfloat16)])
    other = ONE.returned.out.clone()
    other.view(torch.int16)[0, 0, 0] ^= 1

    assert kept(replace(ONE, returned=replace(ONE.returned, out=padded))).measurements()["all"].digest == digest
    assert kept(replace(ONE, returned=replace(ONE.returned, out=other))).measurements()["all"].digest != digest
    assert ONE.returned.lse is not None
    lse = ONE.returned.lse.nextafter(torch.tensor(9.0))
    assert kept(replace(ONE, returned=replace(ONE.returned, lse=lse))).measurements()["all"].digest != digest


def test_a_nan_is_no_small_error() -> None:
    out = ONE.returned.out.clone()
    out[ONE.prepared.truth.rows[0]] = math.nan
    assert ONE.returned.lse is not None

    assert kept(answered(ONE.prepared, out, ONE.returned.lse)).measurements()["all"].figures["max_e"] == math.inf


def test_the_users_own_cases_do_not_count() -> None:
    assert list(kept(ONE, TWO, own=(PAIR,)).measurements()) == ["all", "smollm2"]
