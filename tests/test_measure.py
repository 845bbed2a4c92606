"""Nothing wrong ever measures as fine, and what is measured is what was planted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle import measure as measuring
from oracle.cases import Case
from oracle.contract import Call, Precision, Record
from oracle.families import Family
from oracle.measure import Measured, Truth, measure, tell
from oracle.pool import without_fill
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import emulate
from oracle.references.plan import live_rows
from oracle.references.rounding import DTYPES, FORMAT_NAMES
from oracle.references.roundoff import roundoff
from oracle.strategies import calls
from oracle.trial import prepare

laws = settings(derandomize=True, deadline=None, database=None, max_examples=30)
few = settings(laws, max_examples=10)

FAMILY = Family(name="small", q_heads=4, kv_heads=2, head_dim=32, head_dim_v=32, scale=32**-0.5)
CASE = Case(name="case", family=FAMILY, q_lens=(10, 1, 5), kv_lens=(90, 33, 5), page_size=8, rows=16, seed=1)
EMPTY = replace(CASE, q_lens=(10, 2, 5), kv_lens=(90, 0, 3), rows=17)  # the rows of one sequence, and two before the first key
SINKS = replace(EMPTY, family=replace(FAMILY, sinks=True), sinks="small")
SHORT = replace(CASE, q_lens=(16, 16), kv_lens=(16, 16), rows=32)  # rows of 1 to 16 keys
MANY = replace(CASE, q_lens=(100, 100), kv_lens=(160, 140), rows=200)


@cache
def truth_of(case: Case) -> tuple[Truth, Call]:
    made = prepare(case, Record())
    return made.truth, without_fill(made.laid)


def drawn(call: Call) -> Truth:
    """The truth of every row of a call, for a kernel without a record."""
    name = FORMAT_NAMES[call.q.dtype]
    scaled = any(s is not None for s in (call.q_scale, call.k_scale, call.v_scale))
    return tell(call, live_rows(call), roundoff(Precision(), dtype=name, out_dtype=name, scaled=scaled))


def exactly(case: Case) -> tuple[Tensor, Tensor]:
    """The exact answer, in the formats of the contract."""
    truth, _ = truth_of(case)
    return truth.exact.out.to(DTYPES[case.dtype]), truth.exact.lse.float()


def measured(case: Case, out: Tensor, lse: Tensor | None = None) -> Measured:
    truth, call = truth_of(case)
    return measure(truth, call, out, lse)


def fine(m: Measured) -> bool:
    """Nothing to object to."""
    return (
        m.not_finite == 0 and m.worst.units <= 1 and m.empty_rows_wrong == 0 and (m.worst_lse is None or m.worst_lse.units <= 1)
    )


# What is right


@laws
@given(calls())
def test_the_exact_answer_rounded_to_the_output_takes_no_more_than_its_share_of_the_bound(call: Call) -> None:
    """e <= 1 / (1 + 2u), which is why B carries that factor; e_lse is the rounding to fp32."""
    truth = drawn(call)
    out = truth.exact.out.to(call.q.dtype)
    assume(bool(torch.isfinite(out).all()))

    m = measure(truth, call, out, truth.exact.lse.float())

    assert fine(m)
    assert m.worst.units <= 1 / (1 + 2 * truth.roundoff.u_out)
    assert m.worst_lse is not None and m.worst_lse.units < 0.5


@laws
@given(call=calls(), k=st.floats(1e-3, 1e3))
@example(call=truth_of(CASE)[1], k=1.0000001)
def test_an_error_of_k_bounds_measures_k(call: Call, k: float) -> None:
    """Whatever the size of the element and of the tensor."""
    truth = drawn(call)
    b = truth.bound.b
    assume(bool((b > 0).any()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "REFINE_ABOVE", math.inf)
        m = measure(truth, call, truth.exact.out + k * b, None)

    resolution = float(((truth.exact.out.abs() + k * b) / b)[b > 0].max()) * 2.0**-51
    assert m.worst.units == pytest.approx(k, rel=1e-9, abs=resolution)
    assert m.rms == pytest.approx(k, rel=1e-9, abs=resolution)
    assert m.max_abs <= float((k * b).max()) * (1 + 1e-9) + float(truth.exact.out.abs().max()) * 2.0**-50


@few
@given(k=st.floats(1e-2, 10.0), row=st.integers(0, 15), head=st.integers(0, 3), column=st.integers(0, 31))
def test_the_worst_element_is_told_with_its_place(k: float, row: int, head: int, column: int) -> None:
    truth, _ = truth_of(CASE)
    out = truth.exact.out.clone()
    out[row, head, column] -= k * truth.bound.b[row, head, column]
    worst = measured(CASE, out).worst

    assert (worst.row, worst.head, worst.column) == (int(truth.rows[row]), head, column)
    assert worst.units == pytest.approx(k, rel=1e-6)
    assert worst.got == float(out[row, head, column]) and worst.want == float(truth.exact.out[row, head, column])
    assert worst.limit == float(truth.bound.b[row, head, column])


def test_an_error_does_not_depend_on_how_many_elements_there_are() -> None:
    out = exactly(CASE)[0].double() * 1.01
    truth, call = truth_of(CASE)
    some = tell(call, truth.rows[:3], truth.roundoff)

    assert measure(some, call, out[:3], None).worst.units <= measured(CASE, out).worst.units
    assert measure(some, call, out[:1].expand(3, -1, -1), None).worst.units > 1


def test_the_limits_are_those_of_the_contract_asked_for() -> None:
    """An error of a bf16 rounding is fine for a bf16 kernel and for no other."""
    out = exactly(CASE)[0]
    _, call = truth_of(CASE)
    tight = tell(call, truth_of(CASE)[0].rows, roundoff(Precision(), dtype="fp16", out_dtype="fp16", scaled=False))

    assert fine(measured(CASE, out))
    assert measure(tight, call, out, None).worst.units > 1


@pytest.mark.parametrize("name", ["textbook", "row sum after", "lazy", "reversed"])
def test_correct_kernels_are_fine(name: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "textbook": {},
        "row sum after": {"row_sum": "after"},
        "lazy": {"lazy": 8.0},
        "reversed": {"reverse": True},
    }
    for case in (CASE, EMPTY, SINKS, SHORT, MANY):
        truth, call = truth_of(case)
        m = measure(truth, call, *emulate(call, Arithmetic(**options[name]), truth.rows))
        assert m.worst.units <= 1 and m.worst_det <= 1 and m.worst_lse_after <= 1 and m.empty_rows_wrong == m.not_finite == 0


# What is wrong: never fine

BAD = [math.nan, math.inf, -math.inf]


@few
@given(value=st.sampled_from(BAD), row=st.integers(0, 16), head=st.integers(0, 3), column=st.integers(0, 31))
def test_one_element_that_is_not_finite_is_never_fine(value: float, row: int, head: int, column: int) -> None:
    """In rows without keys neither."""
    out, lse = exactly(EMPTY)
    truth, _ = truth_of(EMPTY)
    out[row, head, column] = value
    m = measured(EMPTY, out, lse)

    assert m.not_finite == 1 and not fine(m)
    assert (m.worst.units, m.worst.row, m.worst.head, m.worst.column) == (math.inf, int(truth.rows[row]), head, column)


@pytest.mark.parametrize("value", [*BAD, 0.0, 1.0, -1e30, 1e30])
@pytest.mark.parametrize("case", [CASE, EMPTY, SINKS, SHORT], ids=["case", "empty", "sinks", "short"])
def test_one_number_everywhere_is_never_fine(value: float, case: Case) -> None:
    out, lse = exactly(case)

    assert not fine(measured(case, torch.full_like(out, value), lse))
    m = measured(case, out, torch.full_like(lse, value))
    assert m.worst_lse is not None and not (m.worst_lse.units <= 1 and m.worst_lse_after <= 1)


@few
@given(value=st.sampled_from([math.nan, math.inf, -math.inf]), row=st.integers(0, 15), head=st.integers(0, 3))
def test_one_lse_that_is_not_finite_is_never_fine(value: float, row: int, head: int) -> None:
    out, lse = exactly(CASE)
    lse[row, head] = value
    m = measured(CASE, out, lse)

    assert m.worst_lse is not None and m.worst_lse.units == m.worst_lse_after == math.inf
    assert (m.worst_lse.row, m.worst_lse.head, m.worst_lse.column) == (int(truth_of(CASE)[0].rows[row]), head, -1)


REARRANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows in reverse": lambda x: x.flip(0),
    "rows rolled": lambda x: x.roll(1, 0),
    "heads in reverse": lambda x: x.flip(1),
    "two heads swapped": lambda x: x[:, [0, 2, 1, 3]],
    "negated": lambda x: -x,
    "doubled": lambda x: 2 * x,
    "a hundredth more": lambda x: 1.01 * x,
    "first row everywhere": lambda x: x[:1].expand_as(x),
    "first head everywhere": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("name", list(REARRANGED))
@pytest.mark.parametrize("case", [CASE, SINKS, SHORT], ids=["case", "sinks", "short"])
def test_the_right_numbers_in_the_wrong_places_are_never_fine(name: str, case: Case) -> None:
    out, lse = exactly(case)

    assert measured(case, REARRANGED[name](out)).worst.units > 1
    m = measured(case, out, REARRANGED[name](lse))
    assert m.worst_lse is not None and m.worst_lse.units > 1


@pytest.mark.parametrize(
    "other",
    [(16, 4, 1), (1, 4, 32), (16, 1, 32), (1, 1, 1), (4, 16, 32), (16, 32, 4), (2048,), (15, 4, 32), (16, 4, 32, 1), (16, 4), ()],
    ids=str,
)
def test_another_shape_is_an_error_and_never_broadcast(other: tuple[int, ...]) -> None:
    """Also with an exact answer that a broadcast number would equal."""
    case = replace(CASE, inputs="ones-v")
    _, lse = exactly(case)
    with pytest.raises(ValueError, match=r"out: got shape .*, want \(16, 4, 32\)"):
        measured(case, torch.ones(other), lse)


def test_a_swapped_output_and_lse_are_an_error() -> None:
    out, lse = exactly(CASE)
    with pytest.raises(ValueError, match="out: got shape"):
        measured(CASE, lse, out)
    with pytest.raises(ValueError, match=r"lse: got shape \(16, 1\), want \(16, 4\)"):
        measured(CASE, out, lse[:, :1])


def test_a_candidate_does_not_widen_its_own_limit() -> None:
    """The tolerance is made of the exact answer alone: an answer ten times as large is ten times as wrong."""
    out = exactly(CASE)[0].double()
    units = [measured(CASE, scale * out).worst.units for scale in (1e3, 1e4, 1e5, -1e5)]

    assert units[1] / units[0] == pytest.approx(10, rel=0.02) and units[2] / units[1] == pytest.approx(10, rel=0.02)
    assert units[3] == pytest.approx(units[2], rel=0.02)


def test_opposite_signs_at_the_ends_of_the_range_are_far_apart() -> None:
    """No difference wraps round and none overflows into something small."""
    out = exactly(CASE)[0]
    largest = torch.finfo(torch.bfloat16).max

    assert measured(CASE, torch.where(out < 0, largest, -largest)).worst.units > 1e38


def with_bound(truth: Truth, b: Tensor) -> Truth:
    return replace(truth, bound=replace(truth.bound, b=b))


def test_a_bound_of_zero_asks_for_exactness(monkeypatch: pytest.MonkeyPatch) -> None:
    """0/0 is 0 and anything else over 0 is inf; a bound that is NaN is the same."""
    truth, call = truth_of(CASE)
    exact = truth.exact.out
    off = exact.clone()
    off[3, 2, 1] += 1e-300 + exact[3, 2, 1].abs() * 1e-15
    monkeypatch.setattr(measuring, "REFINE_ABOVE", math.inf)  # it would take the true bound again
    for b in (torch.zeros_like(exact), torch.full_like(exact, math.nan)):
        assert measure(with_bound(truth, b), call, exact, None).worst.units == 0
        assert measure(with_bound(truth, b), call, off, None).worst.units == math.inf


# Rows without keys


def test_a_row_without_keys_is_exactly_zero_and_its_lse_minus_infinity() -> None:
    truth, _ = truth_of(EMPTY)
    empty = truth.exact.empty.nonzero().flatten().tolist()
    assert len(empty) == 4
    out, lse = exactly(EMPTY)
    assert fine(measured(EMPTY, out, lse)) and fine(measured(EMPTY, torch.where(out == 0, -0.0, out), lse))

    for value in (1e-38, -1.0, 1e30):
        wrong = out.clone()
        wrong[empty[0], 1, 2] = wrong[empty[1], 0, 0] = value
        assert measured(EMPTY, wrong, lse).empty_rows_wrong == 2
    for value in (0.0, -1e30, math.inf, math.nan):
        wrong = lse.clone()
        wrong[empty[0], 1] = value
        assert measured(EMPTY, out, wrong).empty_rows_wrong == 1


def test_rows_without_keys_stay_out_of_every_average() -> None:
    out, lse = exactly(EMPTY)
    m = measured(EMPTY, out, lse)

    assert float(m.cluster_elements.sum()) == (17 - 4) * 4 * 32
    assert measured(EMPTY, out * 1.001, lse).rms == pytest.approx(
        math.sqrt(float(measured(EMPTY, out * 1.001, lse).cluster_e2.sum()) / ((17 - 4) * 4 * 32))
    )


def test_a_row_with_a_sink_and_no_key_has_the_sink_as_its_lse() -> None:
    """To within a few roundings of fp32: base 2 costs two."""
    truth, call = truth_of(SINKS)
    out, lse = exactly(SINKS)
    empty = truth.exact.empty
    assert call.sinks is not None and torch.equal(lse[empty], call.sinks.expand(4, 4)) and fine(measured(SINKS, out, lse))

    base_2 = (lse.double() / math.log(2)).float().double() * math.log(2)
    assert fine(measured(SINKS, out, base_2))
    for value in (-math.inf, math.nan, 0.0):
        m = measured(SINKS, out, torch.where(empty[:, None], value, lse))
        assert m.worst_lse is not None and m.worst_lse.units == (math.inf if value else m.worst_lse.units) > 1
    m = measured(SINKS, out, torch.where(empty[:, None], lse * (1 + 1e-6), lse))
    assert m.worst_lse is not None and m.worst_lse.units > 1
    assert measured(SINKS, torch.where(empty[:, None, None], 1e-30, out), lse).empty_rows_wrong == 4


# LSE


def test_an_lse_in_base_2_is_right_only_when_converted() -> None:
    out, lse = exactly(CASE)
    base_2 = (lse.double() / math.log(2)).float()

    assert fine(measured(CASE, out, base_2.double() * math.log(2)))
    assert not fine(measured(CASE, out, base_2))


def test_without_an_lse_none_is_judged() -> None:
    m = measured(CASE, exactly(CASE)[0])

    assert m.worst_lse is None and m.worst_lse_after == 0 and not m.fits_after


def lse_of(case: Case, **arithmetic: Any) -> Measured:
    truth, call = truth_of(case)
    return measure(truth, call, *emulate(call, Arithmetic(**arithmetic), truth.rows))


@pytest.mark.parametrize("seed", range(4))
def test_a_row_sum_over_rounded_p_is_recognised_on_short_rows_and_only_there(seed: int) -> None:
    short, long = (replace(case, seed=seed) for case in (SHORT, MANY))

    assert lse_of(short, row_sum="after").fits_after
    assert not lse_of(long, row_sum="after").fits_after
    for other in ({}, {"p_format": "fp32"}, {"exp2": "error-1e-3"}, {"exp2": "poly3"}, {"lazy": 8.0}):
        assert not lse_of(short, **other).fits_after, other


def test_an_error_of_exp_is_not_taken_for_rounded_p() -> None:
    """1e-3 is a quarter of what rounding to bf16 may cost, and it is seen."""
    m = lse_of(SHORT, exp2="error-1e-3")

    assert m.worst_lse is not None and m.worst_lse.units > 1 and not m.fits_after


def test_in_formats_finer_than_the_limit_of_the_lse_it_cannot_be_recognised() -> None:
    """In fp16 it costs up to twice the limit, in fp32 nothing."""
    m = lse_of(replace(SHORT, dtype="fp16"), row_sum="after")

    assert m.worst_lse is not None and m.worst_lse.units < 2 and m.worst_lse_after <= 1 and not m.fits_after
    assert not lse_of(replace(SHORT, dtype="fp32"), row_sum="after", p_format="bf16").fits_after


def test_twenty_rows_are_needed_to_recognise_it() -> None:
    few_rows = replace(SHORT, family=replace(FAMILY, q_heads=1, kv_heads=1), q_lens=(16,), kv_lens=(16,))

    assert not lse_of(few_rows, row_sum="after").fits_after


# V2g over all ties


@few
@given(call=calls(logits=("ties", "flat", "normal"), dtypes=("bf16",)), k=st.floats(0.5, 3.0), data=st.data())
def test_refining_can_only_lower_an_error(call: Call, k: float, data: st.DataObject) -> None:
    truth = drawn(call)
    assume(bool((truth.bound.b > 0).any()))
    signs = torch.randn(truth.exact.out.shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))).sign()
    out = truth.exact.out + k * truth.bound.b * signs
    refined = measure(truth, call, out, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "REFINE_ABOVE", math.inf)
        plain = measure(truth, call, out, None)

    assert refined.worst.units <= plain.worst.units * (1 + 1e-12)
    assert bool((refined.cluster_e2 <= plain.cluster_e2 * (1 + 1e-12)).all())


@few
@given(call=calls(logits=("ties", "flat", "normal"), dtypes=("bf16",)), beyond=st.floats(1.0001, 5.0))
def test_refining_never_rescues_what_the_worst_case_condemns(call: Call, beyond: float) -> None:
    truth = drawn(call)
    live = (truth.bound.b > 0).nonzero()
    assume(len(live))
    out = truth.exact.out.clone()
    at = tuple(live[len(live) // 2].tolist())
    out[at] += beyond * truth.bound.b_det[at]

    assert measure(truth, call, out, None).worst.units >= min(1.0001, beyond) * 0.99999
    assert measure(truth, call, out, None).worst_det == pytest.approx(beyond, rel=1e-6)


def two_valued(seed: int = 0) -> Call:
    """64 keys of two weights that bf16 cannot hold, all of one weight with v of one sign: their roundings are one rounding."""
    g = torch.Generator().manual_seed(seed)
    k = torch.zeros(64, 1, 8)
    k[1:, :, 0] = -0.5 - torch.arange(63).remainder(2)[:, None] * 0.25
    v = torch.where(torch.arange(64)[:, None, None] % 2 == 1, 1.0, -1.0) * (1 + 0.25 * torch.rand(64, 1, 8, generator=g))
    q = torch.zeros(20, 1, 8)
    q[:, 0, 0] = 0.5 + 0.171875 * torch.arange(20)
    return Call(
        q=q.bfloat16(), k_cache=k.view(8, 8, 1, 8).bfloat16(), v_cache=v.view(8, 8, 1, 8).bfloat16(),
        cu_seqlens_q=torch.tensor([0, 20], dtype=torch.int32), seqused_k=torch.tensor([64], dtype=torch.int32),
        page_table=torch.arange(8, dtype=torch.int32)[None], softmax_scale=1.0, causal=False,
    )  # fmt: skip


def test_what_a_kernel_uses_of_its_room_leaves_out_the_rounding_of_the_output() -> None:
    """A result half a unit of its last place off has used nothing; one at the limit, all that the rounding leaves."""
    truth, _ = truth_of(CASE)
    exact, limit, u = truth.exact.out, truth.bound.b, truth.roundoff.u_out
    room = limit - (1 + 2 * u) * u * exact.abs()

    assert measured(CASE, exactly(CASE)[0]).worst_own == 0.0 < measured(CASE, exactly(CASE)[0]).worst.units
    assert measured(CASE, exact + limit).worst_own == pytest.approx(1.0, abs=2 * u * float((limit / room).max()))


def test_an_output_below_the_normal_numbers_uses_nothing_by_its_rounding() -> None:
    """There a step has one size, whatever the output's: half of it is more than u |out|."""
    small = replace(CASE, dtype="fp16", inputs="tiny-v")
    truth, _ = truth_of(small)
    out, _ = exactly(small)

    assert truth.roundoff.a_out > float((truth.roundoff.u_out * truth.exact.out.abs()).median())
    assert measured(small, out).worst_own == 0.0 < measured(small, out).worst.units


def test_ties_are_believed_only_as_far_as_their_sum_reaches() -> None:
    """A correct kernel is far from the limit on keys of two weights, where the sum over single keys alone would reject it."""
    call = two_valued()
    truth = drawn(call)
    out, lse = emulate(call, Arithmetic())
    single = replace(truth.exact, v2g=truth.exact.v2)

    assert fine(measure(truth, call, out, lse))
    assert bool((truth.exact.v2g > 2 * single.v2).all())


# Clusters


@laws
@given(calls(dtypes=("bf16",)))
def test_clusters_are_the_sequences_and_kv_heads_and_add_up(call: Call) -> None:
    truth = drawn(call)
    b = truth.bound.b
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "REFINE_ABOVE", math.inf)
        m = measure(truth, call, truth.exact.out + 0.25 * b, None)

    live = int((~truth.exact.empty).sum()) * call.q.shape[1] * call.v_cache.shape[3]
    sequences = len(torch.unique(truth.exact.plan.seq))
    assert len(m.cluster_e2) == len(m.cluster_elements) == sequences * call.k_cache.shape[2]
    assert float(m.cluster_elements.sum()) == live
    assert float(m.cluster_e2.sum()) == pytest.approx(0.0625 * live, rel=1e-6)
    assert m.elements == truth.exact.out.numel()


def test_no_rows_measure_nothing() -> None:
    truth, call = truth_of(CASE)
    none = tell(call, truth.rows[:0], truth.roundoff)
    m = measure(none, call, torch.zeros(0, 4, 32), torch.zeros(0, 4))

    assert (m.elements, m.not_finite, m.rms, len(m.cluster_e2)) == (0, 0, 0.0, 0)
