"""Preparing many trials on the same cases gives, bit for bit, what preparing one gives."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from oracle import preparation
from oracle.cases import Case
from oracle.contract import Call, Precision, Record
from oracle.families import Family
from oracle.measure import Truth, tell
from oracle.preparation import shared_preparation
from oracle.references.roundoff import Roundoff
from oracle.trial import Prepared, prepare

FAMILY = Family(name="small", q_heads=4, kv_heads=2, head_dim=16, head_dim_v=16, scale=0.25, sinks=True)
CASE = Case(name="mixed", family=FAMILY, q_lens=(3, 2, 1), kv_lens=(21, 0, 9), page_size=8, sinks="small", seed=1)
RECORDS = (
    Record(),
    Record(writes_padding=True, precision=Precision(row_sum="after", u_acc=2.0**-13)),
    Record(precision=Precision(p_format="e4m3", p_scale=256.0, qk_format="int8", qk_block=4, smooth_k=True, v_format="e4m3")),
)


def same(one: object, two: object) -> bool:
    """Whether two records hold the same bits."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        if one.dtype.itemsize == 1:
            one, two = one.view(torch.uint8), two.view(torch.uint8)
        return torch.equal(one.nan_to_num(), two.nan_to_num()) if one.dtype.is_floating_point else torch.equal(one, two)
    if hasattr(one, "__dataclass_fields__"):
        return all(same(getattr(one, f.name), getattr(two, f.name)) for f in fields(one))  # type: ignore[arg-type]
    return one == two


def equal(one: Prepared, two: Prepared) -> bool:
    return one.case == two.case and same(one.truth, two.truth) and same(one.laid, two.laid) and same(one.material, two.material)


@pytest.mark.parametrize("record", RECORDS)
def test_it_is_what_a_trial_prepares_by_itself_the_first_and_the_second_time(record: Record) -> None:
    shared = shared_preparation()

    for other in (*RECORDS, record):
        shared(CASE, other)
    assert equal(shared(CASE, record), prepare(CASE, record))
    assert not equal(shared(CASE, record), prepare(replace(CASE, seed=2), record))


def test_the_exact_answer_is_computed_once_for_kernels_of_one_tie_width(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(call: Call, rows: Tensor, roundoff: Roundoff) -> Truth:
        asked.append(call)
        return tell(call, rows, roundoff)

    monkeypatch.setattr(preparation, "tell", counted)
    shared = shared_preparation()

    for _ in range(3):
        shared(CASE, RECORDS[0])
        shared(CASE, RECORDS[1])

    assert len(asked) == 1
