"""From what was seen to a verdict: every region of every door, and no way through on no evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.cases import Case
from oracle.contract import Precision, Record
from oracle.doors import (
    BIAS_BETA,
    CLASS_CASES,
    CLASS_LOGIT_SHARE,
    CLASS_ROWS,
    MARGIN_EMULATOR,
    MARGIN_NAMED,
    NEGLIGIBLE,
    SLOPE_BETA,
    TIGHT_CAP,
    decide,
    looser_than_default,
    ordered,
    ratio,
    ratios,
    slope_findings,
)
from oracle.families import Family
from oracle.measure import DIRECTIONS, Measured, Sums, Worst
from oracle.pool import Fill
from oracle.trial import Seen
from oracle.verdict import PRIORITY, Coverage, Finding, Outcome, Reason, Verdict

laws = settings(derandomize=True, deadline=None, database=None, max_examples=50)

FAMILY = Family(name="small", q_heads=4, kv_heads=2, head_dim=16, head_dim_v=16, scale=0.25)
CASE = Case(name="case", family=FAMILY, q_lens=(3,), kv_lens=(20,))
WHOLE = Coverage(cases=1, elements=1, rows=1, counts={}, missing=(), left_out=(), skipped={}, unseen=())
LIMIT = Worst(units=0.5, row=0, head=0, column=0, got=1.0, want=1.0, limit=0.1)
ELEMENTS = 16.0  # of each cluster


def clusters(e: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """The fields of clusters whose RMS errors are `e`."""
    e2 = torch.as_tensor(np.asarray(e, dtype=float)) ** 2 * ELEMENTS
    return {"cluster_e2": e2, "cluster_elements": torch.full_like(e2, ELEMENTS)}


def measured(e: Sequence[float] | np.ndarray = (0.1, 0.2), **changes: Any) -> Measured:
    values: dict[str, Any] = {
        "elements": 100,
        "not_finite": 0,
        "worst": LIMIT,
        "worst_det": 0.1,
        "worst_own": 0.1,
        "worst_lse": LIMIT,
        "worst_lse_after": 0.1,
        "fits_after": False,
        "empty_rows_wrong": 0,
        "mean_abs": 0.01,
        "max_abs": 0.1,
        "sums": {name: Sums() for name in DIRECTIONS},
        "logit_share": 0.0,
    }
    return Measured(**values | clusters(e) | changes)


def seen(candidate: Measured | None = None, incumbent: Measured | None = None, **changes: Any) -> Seen:
    values: dict[str, Any] = {
        "case": CASE,
        "candidate": candidate or measured(),
        "incumbent": incumbent or measured(),
        "same_bits": None,
        "findings": (),
        "fills": tuple(Fill),
        "calls": 8,
        "seconds": 0.5,
        "far_from_fp32": 0.0,
    }
    return Seen(**values | changes)


def verdict(*cases: Seen, **changes: Any) -> Verdict:
    values: dict[str, Any] = {
        "candidate": "new.py:kernel",
        "incumbent": "old",
        "named": False,
        "record": Record(),
        "seen": cases,
        "extra": (),
        "coverage": WHOLE,
        "doors": ("bits", "accuracy"),
        "seed": 0,
    }
    return decide(**values | changes)


def compared(value: float, spread: float = 0.0, count: int = 200) -> Seen:
    """A candidate whose RMS e is `value` times the incumbent's, with a spread between clusters."""
    e = np.random.default_rng(0).uniform(0.1, 0.2, count)
    mine = e * np.exp(np.random.default_rng(1).normal(0.0, spread, count))
    return seen(measured(mine * value * np.sqrt((e * e).sum() / (mine * mine).sum())), measured(e))


# Door 2, its bounds


@pytest.mark.parametrize("clusters", [30, 200])
def test_the_bounds_hold_the_true_ratio_in_95_of_100(clusters: int) -> None:
    """Each of the two is one-sided: the true ratio lies above the upper bound in about 5 of 100 draws, and below the lower."""
    random, draws, truth = np.random.default_rng(5), 300, 1.1
    over = under = 0
    for draw in range(draws):
        e = random.gamma(4.0, 0.03, clusters)
        mine = e * truth * np.exp(random.normal(0.0, 0.1, clusters) - 0.01)  # E of the square of the factor is 1
        found = ratio("all", [seen(measured(mine), measured(e))], 1.05, draw)
        over, under = over + (truth > found.upper), under + (truth < found.lower)

    assert 0.02 <= over / draws <= 0.10, over
    assert 0.02 <= under / draws <= 0.10, under


@laws
@given(value=st.floats(0.1, 10.0), spread=st.floats(0.0, 0.5), margin=st.floats(1.0, 2.0), count=st.integers(2, 60))
def test_the_value_lies_between_the_bounds_and_the_seed_decides_all(
    value: float, spread: float, margin: float, count: int
) -> None:
    case = compared(value, spread, count)
    found = ratio("all", [case], margin, 3)

    assert found.lower * (1 - 1e-9) <= found.value <= found.upper * (1 + 1e-9)
    assert found == ratio("all", [case], margin, 3)
    assert found.rows == count
    assert (found.rows_to_decide is not None) == (found.lower <= margin < found.upper)


def test_the_ratio_is_that_of_the_pooled_squares() -> None:
    found = ratio("all", [seen(measured([0.3, 0.4]), measured([0.1, 0.2])), seen(measured([0.5]), measured([0.2]))], 1.05, 0)

    assert math.isclose(found.value, math.sqrt((0.09 + 0.16 + 0.25) / (0.01 + 0.04 + 0.04)))


def test_an_incumbent_without_error_asks_for_none() -> None:
    assert ratio("all", [seen(measured([0.0, 0.0]), measured([0.0, 0.0]))], 1.05, 0).value == 1.0
    assert ratio("all", [seen(measured([0.0, 1e-9]), measured([0.0, 0.0]))], 1.05, 0).lower == math.inf


def test_one_cluster_decides_nothing() -> None:
    found = ratio("all", [seen(measured([0.1]), measured([0.1]))], 1.05, 0)

    assert (found.value, found.lower, found.upper) == (1.0, 0.0, math.inf)
    assert verdict(seen(measured([0.1]), measured([0.1]))).outcome is Outcome.INCONCLUSIVE


def test_more_rows_are_needed_the_nearer_the_ratio_is_to_the_margin() -> None:
    """And the wider the clusters are spread."""

    def needed(value: float, spread: float) -> int:
        rows = ratio("all", [compared(value, spread, 40)], 1.05, 0).rows_to_decide
        return 0 if rows is None else rows

    near = [needed(value, 0.3) for value in (0.75, 0.90, 0.95, 1.00, 1.03)]
    wide = [needed(1.0, spread) for spread in (0.0, 0.2, 0.3, 0.4)]

    assert near == sorted(near) and near[0] == 0 and near[-1] > 40
    assert wide == sorted(wide) and wide[0] == 0 and wide[-1] > 40


# Door 2, its regions


@pytest.mark.parametrize(
    ("value", "spread", "named", "outcome"),
    [
        (1.00, 0.01, True, Outcome.ACCEPT),
        (1.04, 0.01, True, Outcome.ACCEPT),
        (1.06, 0.01, True, Outcome.REJECT),
        (1.05, 0.20, True, Outcome.INCONCLUSIVE),
        (1.06, 0.01, False, Outcome.ACCEPT),
        (1.24, 0.01, False, Outcome.ACCEPT),
        (1.26, 0.01, False, Outcome.REJECT),
        (1.25, 0.20, False, Outcome.INCONCLUSIVE),
        (0.10, 0.01, True, Outcome.ACCEPT),
    ],
)
def test_the_margin_is_105_to_a_named_incumbent_and_125_to_the_emulator(
    value: float, spread: float, named: bool, outcome: Outcome
) -> None:
    assert (MARGIN_NAMED, MARGIN_EMULATOR) == (1.05, 1.25)
    got = verdict(compared(value, spread), named=named)

    assert got.outcome is outcome
    assert got.door == ("accuracy" if outcome is Outcome.ACCEPT else "")
    assert got.reasons == ((Reason.LESS_ACCURATE,) if outcome is Outcome.REJECT else ())
    assert (got.ratios[0].rows_to_decide is not None) == (outcome is Outcome.INCONCLUSIVE)
    assert got.exit_code == {Outcome.ACCEPT: 0, Outcome.REJECT: 1, Outcome.INCONCLUSIVE: 3}[outcome]


def by_class(inputs: str, value: float, **changes: Any) -> Seen:
    one = compared(value, 0.01)
    assert one.candidate is not None
    return replace(one, case=replace(CASE, inputs=inputs, **changes.pop("case", {})), candidate=replace(one.candidate, **changes))


def three(*of: Seen) -> list[Seen]:
    """As many cases of each as a class needs to be compared by itself."""
    return [s for s in of for _ in range(CLASS_CASES)]


def test_an_input_class_is_compared_by_itself() -> None:
    """A loss on one class is not made up for by gains on the others."""
    got = verdict(*three(*(by_class(inputs, 0.8) for inputs in ("randn", "flat", "ties")), by_class("peaked", 1.4)), named=True)

    assert got.ratios[0].value < 1.05
    assert len(got.findings) == 1 and "times the incumbent's on peaked: at least 1.3" in got.findings[0].text
    assert got.reasons == (Reason.LESS_ACCURATE,)


@pytest.mark.parametrize(
    "excused",
    [
        three(by_class("peaked", 1.4, logit_share=CLASS_LOGIT_SHARE)),
        three(replace(compared(1.4, 0.01, CLASS_ROWS // 3), case=replace(CASE, inputs="peaked"))),
        three(seen(measured([NEGLIGIBLE * 0.9] * 80), measured([NEGLIGIBLE * 0.6] * 80), case=replace(CASE, inputs="peaked"))),
        three(by_class("peaked", 1.4, case={"dtype": "fp32"})),
        three(by_class("peaked", 1.4))[1:],
    ],
    ids=["mostly logit error", "too few rows", "the rounding of the output", "fp32", "too few cases"],
)
def test_a_class_that_cannot_be_compared_by_itself_is_not(excused: list[Seen]) -> None:
    others = three(*(by_class(inputs, 0.8) for inputs in ("randn", "flat", "ties")))

    assert [r.label for r in ratios([*others, *excused], 1.05, 0)] == ["all 16-bit cases", "randn", "flat", "ties"]
    assert verdict(*others, *excused, named=True).outcome is Outcome.ACCEPT


def test_cases_without_an_incumbents_result_are_not_compared_and_the_verdict_says_so() -> None:
    silent = replace(compared(9.0), incumbent=None, case=replace(CASE, name="silent"))

    got = verdict(compared(1.0), silent, named=True)
    assert got.outcome is Outcome.ACCEPT
    assert "the incumbent gave no result on 1 cases (first on silent): not compared there" in got.notes

    nothing = verdict(silent, named=True)
    assert nothing.reasons == (Reason.NO_DOOR,) and "no result to compare with" in nothing.findings[0].text


# Door 1


def same(count: int = 2, **changes: Any) -> list[Seen]:
    return [replace(compared(1.0), same_bits=True, **changes) for _ in range(count)]


def test_the_same_bits_as_a_named_incumbent_on_every_case_open_the_door_of_bits() -> None:
    assert verdict(*same(), named=True).door == "bits"


@pytest.mark.parametrize(
    ("cases", "changes"),
    [
        (same(), {"named": False}),
        ([*same(), replace(compared(1.0), same_bits=False)], {"named": True}),
        ([*same(), replace(compared(1.0), same_bits=None)], {"named": True}),
        (same(), {"named": True, "record": Record(deterministic=False)}),
        (same(), {"named": True, "doors": ("accuracy",)}),
    ],
    ids=["the emulator", "other bits once", "not compared once", "declared to vary", "not allowed"],
)
def test_anything_less_goes_through_the_door_of_accuracy(cases: list[Seen], changes: dict[str, Any]) -> None:
    got = verdict(*cases, **changes)

    assert (got.outcome, got.door) == (Outcome.ACCEPT, "accuracy")


def test_other_bits_are_rejected_where_only_the_door_of_bits_is_allowed() -> None:
    other = replace(compared(1.0), same_bits=False, case=replace(CASE, name="first"))
    got = verdict(*same(), other, named=True, doors=("bits",))

    assert (got.outcome, got.reasons) == (Outcome.REJECT, (Reason.NO_DOOR,))
    assert "not bit-identical to the incumbent (first on first); doors allowed: bits" in got.findings[0].text
    assert verdict(*same(), named=True, doors=("bits",)).door == "bits"
    assert verdict(*same(), doors=("bits",)).reasons == (Reason.NO_DOOR,)
    assert verdict(*same(), named=True, doors=()).reasons == (Reason.NO_DOOR,)


# The contract

LOOSER = [
    {"p_format": "e4m3", "p_scale": 256.0},
    {"p_format": "int8"},
    {"u_acc": 2.0**-13},
    {"eps_exp": 2.0**-12},
    {"eps_tanh": 2.0**-10},
    {"qk_format": "int8"},
    {"v_format": "e4m3"},
    {"p_scale": 0.5},
]
AS_TIGHT: list[dict[str, Any]] = [
    {},
    {"p_format": "fp32"},
    {"row_sum": "after"},
    {"subtract_first": True},
    {"u_acc": 2.0**-24, "eps_exp": 2.0**-22, "eps_tanh": 2.0**-22},
    {"p_scale": 256.0},
    {"flush_to_zero": True},
]


@pytest.mark.parametrize("promises", LOOSER, ids=lambda p: ",".join(p))
def test_a_looser_contract_passes_only_against_a_named_incumbent_of_the_same(promises: dict[str, Any]) -> None:
    precision = Precision(**promises)
    record = Record(precision=precision)

    assert looser_than_default(precision)
    assert verdict(compared(1.0), record=record).reasons == (Reason.LOOSER_CONTRACT,)
    assert verdict(compared(1.0), record=record, named=True, incumbent_precision=Precision()).reasons == (Reason.LOOSER_CONTRACT,)
    assert verdict(compared(1.0), record=record, named=True, incumbent_precision=precision).outcome is Outcome.ACCEPT


@pytest.mark.parametrize("promises", AS_TIGHT, ids=lambda p: ",".join(p) or "default")
def test_a_contract_as_tight_as_the_default_passes(promises: dict[str, Any]) -> None:
    assert not looser_than_default(Precision(**promises))
    assert verdict(compared(1.0), record=Record(precision=Precision(**promises))).outcome is Outcome.ACCEPT


# Door 0 and coverage

FOUND = Finding(reason=Reason.LEAK, case="case", text="it leaks")
THIN = replace(WHOLE, missing=("family llama3",))


def test_a_finding_rejects_whatever_the_ratio_and_the_bits() -> None:
    for named in (False, True):
        got = verdict(*same(findings=(FOUND,)), named=named)
        assert (got.outcome, got.door, got.exit_code, got.reasons) == (Outcome.REJECT, "", 1, (Reason.LEAK,))
        assert got.ratios[0].value == pytest.approx(1.0)  # it is still told
    assert verdict(compared(1.0), extra=[FOUND]).outcome is Outcome.REJECT


def test_too_little_coverage_beats_an_accept_and_never_a_reject() -> None:
    assert verdict(compared(1.0), coverage=THIN).outcome is Outcome.NOT_COVERED
    assert verdict(compared(1.0), coverage=THIN).exit_code == 3
    assert verdict(compared(1.25, 0.2), coverage=THIN).outcome is Outcome.INCONCLUSIVE
    assert verdict(compared(1.5), coverage=THIN).outcome is Outcome.REJECT
    assert verdict(compared(1.0), extra=[FOUND], coverage=THIN).outcome is Outcome.REJECT


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("doors", [("bits", "accuracy"), ("bits",), ("accuracy",), ()])
def test_zero_cases_never_accept(named: bool, doors: tuple[str, ...]) -> None:
    got = verdict(named=named, doors=doors)
    assert got.outcome is not Outcome.ACCEPT and got.figures is None


def test_a_candidate_that_never_answered_is_never_accepted() -> None:
    dead = replace(seen(), candidate=None, incumbent=None)

    assert verdict(dead).outcome is not Outcome.ACCEPT
    assert verdict(replace(dead, findings=(FOUND,))).reasons == (Reason.LEAK,)


def test_the_reason_that_explains_the_others_stands_first() -> None:
    """Then the smallest case, then the largest excess."""
    reasons = list(Reason)
    shuffled = [Finding(reason=r, case="", text="") for r in reasons[::2] + reasons[1::2]]
    assert [f.reason for f in ordered(shuffled)] == reasons
    for first, then in (
        (Reason.CRASH, Reason.ERROR),
        (Reason.NOT_FINITE, Reason.ERROR),
        (Reason.ERROR, Reason.LSE),
        (Reason.ERROR, Reason.LEAK),
        (Reason.NONDETERMINISTIC, Reason.LEAK),
        (Reason.LEAK, Reason.CANARY),
        (Reason.ERROR, Reason.GAIN),
        (Reason.GAIN, Reason.LESS_ACCURATE),
    ):
        assert PRIORITY[first] < PRIORITY[then]

    same_reason = [
        Finding(reason=Reason.ERROR, case=name, text="", size=size, units=units)
        for name, size, units in (("large", 9, 50.0), ("small", 1, 2.0), ("small and worse", 1, 3.0))
    ]
    assert [f.case for f in ordered(same_reason)] == ["small and worse", "small", "large"]


# The fp32 line, the row sum


def test_the_fp32_line_is_a_condition_and_no_excuse() -> None:
    far, near = replace(compared(1.0), far_from_fp32=0.0021), replace(compared(1.0), far_from_fp32=0.002)

    assert verdict(far).outcome is verdict(near, within_fp32=0.002).outcome is Outcome.ACCEPT
    assert verdict(far, within_fp32=0.002).reasons == (Reason.FP32_LINE,)
    assert verdict(replace(near, far_from_fp32=math.nan), within_fp32=0.002).reasons == (Reason.FP32_LINE,)
    assert verdict(replace(near, findings=(FOUND,)), within_fp32=0.002).reasons == (Reason.LEAK,)


WIDE_LSE: dict[str, Any] = {"worst_lse": replace(LIMIT, units=3.0), "worst_lse_after": 0.9}


def test_the_wider_limit_of_the_lse_needs_short_rows_that_show_the_row_sum_or_a_record_that_says_it() -> None:
    long = seen(measured(**WIDE_LSE))
    short = seen(measured(fits_after=True, **WIDE_LSE))

    assert verdict(long).reasons == (Reason.LSE,)
    got = verdict(long, short, seen())
    assert got.reasons == () and got.figures is not None and got.figures.row_sum == "after, undeclared"
    assert any("undeclared" in note for note in got.notes)
    declared = verdict(long, record=Record(precision=Precision(row_sum="after")))
    assert declared.reasons == () and declared.figures is not None and declared.figures.row_sum == "after"


def test_what_a_record_excuses_stands_in_the_notes() -> None:
    for record, word in (
        (Record(writes_padding=True), "writes_padding"),
        (Record(deterministic=False), "varying bits"),
        (Record(page_invariant=False), "page ids"),
    ):
        assert any(word in note for note in verdict(compared(1.0), record=record).notes)
    assert verdict(compared(1.0)).notes == ()


# Slopes


def leaning(name: str, beta: float, *, rows: int = 400, noise: float = 0.0, effect: float = 1.0, **case: Any) -> Seen:
    """`rows` rows whose error is `beta` times a direction of size `effect` in units of the bound, plus noise of `noise`."""
    random = np.random.default_rng(2)
    b = np.full(rows, 16 * effect**2)
    a = b * (beta + noise * random.normal(size=rows))
    sums = Sums(a=a.sum(), b=b.sum(), aa=(a * a).sum(), ab=(a * b).sum(), bb=(b * b).sum(), elements=16 * rows)
    one = compared(1.0)
    assert one.candidate is not None
    return replace(one, candidate=replace(one.candidate, sums={n: sums if n == name else Sums() for n in DIRECTIONS}),
                   case=replace(CASE, **case))  # fmt: skip


@pytest.mark.parametrize(
    ("name", "reason", "floor"),
    [("gain", Reason.GAIN, SLOPE_BETA), ("temperature", Reason.TEMPERATURE, SLOPE_BETA), ("bias", Reason.BIAS, BIAS_BETA)],
)
def test_a_slope_counts_when_it_is_certain_and_not_tiny_and_visible_and_of_many_rows(
    name: str, reason: Reason, floor: float
) -> None:
    effect = 0.05 / floor
    for sign in (1, -1):
        got = verdict(leaning(name, sign * 1.1 * floor, effect=effect))
        assert got.reasons == (reason,) and f"{name} {sign * 1.1 * floor:+.2e} on randn inputs" in got.findings[0].text
    assert verdict(leaning(name, 0.9 * floor, effect=effect)).reasons == ()
    assert verdict(leaning(name, 1.1 * floor, effect=effect, noise=10 * floor)).reasons == ()
    assert verdict(leaning(name, 1.1 * floor, effect=0.015 / floor)).reasons == ()
    assert verdict(leaning(name, 1.1 * floor, effect=effect, rows=19)).reasons == ()


def test_slopes_add_over_the_cases_of_an_input_class_and_not_over_classes() -> None:
    few = [leaning("gain", 1e-3, rows=12, effect=50.0) for _ in range(2)]
    apart = [few[0], replace(few[1], case=replace(CASE, inputs="flat"))]

    assert [f.reason for f in slope_findings(few, Record())[0]] == [Reason.GAIN]
    assert slope_findings(apart, Record())[0] == []


def test_the_floor_of_the_gain_grows_with_the_keys_and_that_of_capped_logits_with_tanh() -> None:
    capped = replace(FAMILY, softcap=30.0)

    assert verdict(leaning("gain", 8e-4, effect=60.0, kv_lens=(4000,))).reasons == (Reason.GAIN,)
    assert verdict(leaning("gain", 8e-4, effect=60.0, kv_lens=(33000,))).reasons == ()
    assert verdict(leaning("temperature", 8e-4, effect=60.0, kv_lens=(33000,))).reasons == (Reason.TEMPERATURE,)
    assert verdict(leaning("temperature", 8e-4, effect=60.0, family=capped)).reasons == ()
    tight = Record(precision=Precision(eps_tanh=2.0**-22))
    assert verdict(leaning("temperature", 8e-4, effect=60.0, family=capped), record=tight).reasons == (Reason.TEMPERATURE,)


def test_what_a_coarse_p_loses_of_the_output_is_a_temperature_where_the_two_directions_are_one() -> None:
    """As on v = 1 beside a sink: u_p^2 / 2 of o, over a direction a thousandth of it.  More is a fault, as it is of a finer P."""
    for beta, p_format, found in ((1.8, "e4m3", 0), (2.2, "e4m3", 1), (1.8, "input", 1)):
        case = leaning("temperature", beta, effect=0.03)
        assert case.candidate is not None
        sums = case.candidate.sums
        t = sums["temperature"]
        sums = sums | {"gain": replace(t, a=0.0, ab=0.0, b=1e6 * t.b, bb=1e12 * t.bb)}
        record = Record(precision=Precision(p_format=p_format))
        slopes = slope_findings([replace(case, candidate=replace(case.candidate, sums=sums))], record)[0]
        assert len(slopes) == found, (beta, p_format)


def with_few_values(beta: float, softcap: float, dtype: str = "bf16") -> Seen:
    """A temperature of `beta` on logits capped at `softcap` whose deviation is 0.5."""
    case = leaning("temperature", beta, effect=60.0, family=replace(FAMILY, softcap=softcap), dtype=dtype)
    assert case.candidate is not None
    sums = case.candidate.sums
    sums = sums | {"temperature": replace(sums["temperature"], narrow=sums["temperature"].b / 0.5)}
    return replace(case, candidate=replace(case.candidate, sums=sums))


def test_under_a_tight_cap_the_rounding_of_few_values_of_p_is_no_temperature() -> None:
    """It is at most u_p over the deviation of the logits; more is a fault, and so is as much under a wide cap."""
    for dtype, u_p in (("bf16", 2.0**-8), ("fp16", 2.0**-11)):
        assert slope_findings([with_few_values(1.9 * u_p, TIGHT_CAP - 0.1, dtype)], Record())[0] == []
        for beta, softcap in ((2.6 * u_p + 2.0**-10, TIGHT_CAP - 0.1), (1.9 * u_p + 2.0**-9, TIGHT_CAP)):
            found = slope_findings([with_few_values(beta, softcap, dtype)], Record())[0]
            assert [f.reason for f in found] == [Reason.TEMPERATURE], (dtype, beta, softcap)


def test_a_tight_cap_shelters_no_other_case() -> None:
    """Those cases are a pool of their own: one does not lift the floor of the others."""
    fault = leaning("temperature", 3e-3, effect=60.0)

    assert [f.reason for f in slope_findings([fault, with_few_values(0.0, 0.75)], Record())[0]] == [Reason.TEMPERATURE]


def test_capped_logits_that_are_all_off_by_one_sign_move_weight_to_or_from_a_sink() -> None:
    """By eps_tanh times `level`, which is no fault; an uncapped kernel has no such excuse."""
    for name, beta, effect in (("gain", 8e-3, 10.0), ("bias", 0.08, 1.0)):
        for family, found in ((replace(FAMILY, softcap=30.0), 0), (FAMILY, 1)):
            case = leaning(name, beta, effect=effect, family=family)
            assert case.candidate is not None
            sums = case.candidate.sums
            sums = sums | {name: replace(sums[name], level=20 * beta * 2.0**7 * sums[name].b)}
            assert len(slope_findings([replace(case, candidate=replace(case.candidate, sums=sums))], Record())[0]) == found, name


def test_an_exp_that_is_off_by_one_sign_moves_weight_to_or_from_a_sink() -> None:
    """By eps_exp times `weight`, which is no fault; twice that is."""
    for share, found in ((0.9, 0), (2.0, 1)):
        case = leaning("bias", 0.08, effect=1.0)
        assert case.candidate is not None
        sums = case.candidate.sums
        weight = 0.08 / share * 2.0**13 * sums["bias"].b  # the slope is this share of the floor
        sums = sums | {"bias": replace(sums["bias"], weight=weight)}
        assert len(slope_findings([replace(case, candidate=replace(case.candidate, sums=sums))], Record())[0]) == found


def test_the_pool_that_comes_nearest_is_told() -> None:
    cases = [leaning("gain", 2e-4, effect=100.0), leaning("gain", -3e-4, effect=100.0, inputs="flat")]
    slopes = slope_findings(cases, Record())[1]

    assert slopes["gain"]["beta"] == pytest.approx(-3e-4)
    assert slopes["gain"]["share_of_limit"] == pytest.approx(0.75)
    assert set(slopes) == set(DIRECTIONS)


def test_figures_are_over_all_cases() -> None:
    one = measured([0.3, 0.3], mean_abs=0.1, max_abs=0.2)
    two = measured([0.4, 0.4], elements=300, worst=replace(LIMIT, units=0.7))
    got = verdict(seen(one), seen(two)).figures

    assert got is not None
    assert (got.max_e, got.max_abs, got.calls, got.seconds) == (0.7, 0.2, 16, 1.0)
    assert got.rms_e == pytest.approx(math.sqrt((0.09 + 0.16) / 2)) and got.mean_abs == pytest.approx(0.1 / 4 + 0.03 / 4)
