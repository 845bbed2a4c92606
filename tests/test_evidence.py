"""What is gathered for pictures is what was judged: the same errors, of every judged element, in bounded memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.accept import Asked, accept
from oracle.cases import Case
from oracle.contract import Record
from oracle.evidence import BINS, HIGHEST, LOWEST, WORST, Evidence, Gathered, Histogram
from oracle.families import Family
from oracle.isolation.outcome import Returned
from oracle.measure import measure
from oracle.pool import without_fill
from oracle.trial import Answer, Seen, prepare
from oracle.verdict import Finding, Reason

FAMILY = Family(name="small", q_heads=4, kv_heads=2, head_dim=16, head_dim_v=8, scale=0.25)
CASE = Case(name="two", family=FAMILY, dtype="fp32", q_lens=(3, 2), kv_lens=(10, 5), seed=1)
PREPARED = prepare(CASE, Record())
EXACT = PREPARED.truth.exact.out


def answered(out: Tensor, *, incumbent: Tensor | None = EXACT, name: str = "two", findings: tuple[Finding, ...] = ()) -> Answer:
    """A kernel's answer to CASE, under another name."""
    prepared = replace(PREPARED, case=replace(CASE, name=name))
    call = without_fill(PREPARED.laid)
    seen = Seen(
        case=prepared.case,
        candidate=measure(PREPARED.truth, call, out, None),
        incumbent=None if incumbent is None else measure(PREPARED.truth, call, incumbent, None),
        same_bits=None,
        findings=findings,
        fills=(),
        calls=1,
        seconds=0.0,
        far_from_fp32=0.0,
    )
    returned = Returned(out=out, out_storage=None, lse=None, seconds=0.0, changed_inputs=())
    return Answer(prepared=prepared, returned=returned, incumbent=incumbent, seen=seen)


def off_by(units: float, row: int = 2, head: int = 3, column: int = 5) -> Tensor:
    """The exact answer but for one element, which is so many bounds away."""
    out = EXACT.clone()
    out[row, head, column] += units * PREPARED.truth.bound.b[row, head, column]
    return out


def found(reason: Reason, *, size: int, units: float = 2.0) -> tuple[Finding, ...]:
    return (Finding(reason=reason, case="", text="wrong", size=size, units=units),)


def gathered(*answers: Answer) -> Evidence:
    watch = Gathered()
    for answer in answers:
        watch(answer)
    return watch.evidence


def test_the_map_is_worst_where_the_measured_error_is() -> None:
    (one,) = gathered(answered(off_by(7.0))).cases

    assert one.by_head is not None and one.by_head.shape == (5, 4)
    assert divmod(int(one.by_head.argmax()), 4) == (2, 3) == (one.worst.row, one.worst.head)
    assert float(one.by_head.max()) == one.worst.units == pytest.approx(7.0, rel=1e-3)
    assert one.candidate.tolist() == one.by_head.amax(1).tolist()


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_the_worst_and_not_dropped(lost: float) -> None:
    evidence = gathered(answered(off_by(lost)))

    assert evidence.cases[0].candidate.tolist() == [0, 0, math.inf, 0, 0]
    assert evidence.candidate.counts[-1] == 1
    assert evidence.incumbent.counts[-1] == 0


def test_the_histograms_count_every_judged_element() -> None:
    answers = [answered(off_by(units)) for units in (0.0, 0.3, 7.0, 1e30, math.nan)]
    evidence = gathered(*answers)

    assert evidence.candidate.elements == evidence.incumbent.elements == 5 * EXACT.numel()
    assert evidence.candidate.counts[0] == 5 * EXACT.numel() - 4
    assert evidence.candidate.counts[-2:] == (1, 1)


def test_a_bin_holds_its_lower_edge_and_the_last_one_whatever_is_beyond() -> None:
    counts = Histogram().plus(torch.tensor([2.0**LOWEST, 1.0, 2.0**HIGHEST, 1e38, 0.999 * 2.0**LOWEST])).counts

    assert {i: count for i, count in enumerate(counts) if count} == {0: 1, 1: 1, 1 - 2 * LOWEST: 1, BINS: 2}


def test_a_row_near_the_limit_is_measured_with_all_its_ties() -> None:
    """As a verdict measures it: under the quick form of the bound alone, a correct kernel would seem beyond its limit."""
    too_tight = replace(PREPARED.truth.bound, b=PREPARED.truth.bound.b / 2)
    answer = answered(off_by(0.95))
    narrowed = replace(answer.prepared, truth=replace(PREPARED.truth, bound=too_tight))
    (one,) = gathered(replace(answer, prepared=narrowed)).cases

    assert float(one.candidate.max()) == pytest.approx(0.95, rel=1e-3)


def test_an_incumbent_without_result_has_no_errors() -> None:
    evidence = gathered(answered(off_by(0.3), incumbent=None))

    assert evidence.cases[0].incumbent is None
    assert evidence.incumbent.elements == 0 < evidence.candidate.elements


def test_rows_lie_where_the_plan_puts_them() -> None:
    (one,) = gathered(answered(EXACT)).cases

    assert one.sequence.tolist() == [0, 0, 0, 1, 1]
    assert one.position.tolist() == [7, 8, 9, 3, 4]


def test_only_the_worst_cases_keep_their_maps_and_the_worst_stands_first() -> None:
    evidence = gathered(*(answered(off_by(0.01 * i), name=str(i)) for i in range(3 * WORST)))

    assert [one.case.name for one in evidence.worst] == [str(i) for i in range(3 * WORST - 1, 2 * WORST - 1, -1)]
    assert sum(one.by_head is not None for one in evidence.cases) == WORST
    assert len(evidence.cases) == 3 * WORST


def test_the_case_of_the_first_finding_keeps_its_map_among_many_worse() -> None:
    first = answered(off_by(2.0), name="first", findings=found(Reason.NOT_FINITE, size=7))
    worse = [answered(off_by(10.0 + i), name=str(i), findings=found(Reason.ERROR, size=1)) for i in range(2 * WORST)]
    evidence = gathered(*worse[:WORST], first, *worse[WORST:])
    shown = evidence.shown([Finding(reason=Reason.NOT_FINITE, case="first", text="wrong")])

    assert shown is not None and shown.case.name == "first" and shown.by_head is not None
    assert sum(one.by_head is not None for one in evidence.cases) == WORST + 1


def test_where_the_first_finding_is_about_no_case_the_worst_is_shown() -> None:
    evidence = gathered(answered(off_by(0.1), name="better"), answered(off_by(0.2), name="worse"))
    shown = evidence.shown([Finding(reason=Reason.GAIN, case="", text="a gain")])

    assert shown is not None and shown.case.name == "worse"


def test_without_an_answer_nothing_is_shown() -> None:
    assert gathered().shown([Finding(reason=Reason.CRASH, case="two", text="it died")]) is None


@pytest.mark.parametrize("kernel", ["sdpa-flash", "oracle.mutants.planted:v_page_rolled"])
def test_the_evidence_of_a_verdict_is_what_was_judged(kernel: str) -> None:
    """Errors near the limit among it, which are measured with their ties."""
    watch = Gathered()
    seen: list[Seen] = []

    def both(answer: Answer) -> None:
        watch(answer)
        seen.append(answer.seen)

    verdict = accept(Asked(candidate=kernel, profile="quick", seed=1, families=("smollm2",)), watch=both)
    evidence = watch.evidence

    assert [float(one.candidate.max()) for one in evidence.cases] == [s.candidate.worst.units for s in seen if s.candidate]
    assert [one.case for one in evidence.cases] == [s.case for s in seen]
    assert evidence.candidate.elements == verdict.coverage.elements
    assert verdict.figures is not None and evidence.worst[0].worst.units == verdict.figures.max_e
