"""A verdict in plain words: what was decided, why, how large the errors were, and always what was not covered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oracle.summary import again, figures, headline, in_short, not_covered, reasons
from oracle.verdict import MEANINGS, Coverage, Figures, Finding, Outcome, Ratio, Reason, Verdict

COVERAGE = Coverage(cases=3, elements=1234, rows=56, counts={}, missing=(), left_out=(), skipped={}, unseen=())
FIGURES = Figures(
    max_e=0.5,
    max_e_det=0.25,
    max_e_own=0.125,
    max_e_lse=None,
    rms_e=0.13,
    mean_abs=1e-4,
    max_abs=1e-2,
    slopes={},
    row_sum="before",
    seconds=1.5,
    calls=21,
)
VERDICT = Verdict(
    outcome=Outcome.ACCEPT,
    door="accuracy",
    candidate="k",
    incumbent="old",
    findings=(),
    ratios=(Ratio(label="all cases", value=1.0, lower=0.9, upper=1.5, margin=1.25, rows=100, rows_to_decide=1700),),
    figures=FIGURES,
    coverage=COVERAGE,
    notes=(),
    environment={"seed": 7, "command": "oracle accept k"},
)


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (VERDICT, "through door accuracy, against <old>"),
        (replace(VERDICT, door="", outcome=Outcome.INCONCLUSIVE), "as accurate as <old>? these rows cannot tell"),
        (replace(VERDICT, door="", outcome=Outcome.NOT_COVERED), "nothing found against it, but too little was judged"),
        (
            replace(VERDICT, door="", findings=(Finding(reason=Reason.CRASH, case="c", text="it died"),)),
            "crash",
        ),
    ],
)
def test_the_headline_says_what_was_decided(verdict: Verdict, text: str) -> None:
    assert headline(verdict, "<{}>".format) == text


def test_each_reason_is_told_once_with_its_meaning_and_its_first_finding() -> None:
    findings = tuple(
        Finding(reason=r, case=f"case {i}", text="wrong", size=i) for r in (Reason.ERROR, Reason.LEAK) for i in (1, 2)
    )
    told = reasons(replace(VERDICT, findings=findings))

    assert [(one.reason, one.smallest.case, one.more) for one in told] == [
        (Reason.ERROR, "case 1", 1),
        (Reason.LEAK, "case 1", 1),
    ]
    assert [one.meaning for one in told] == [MEANINGS[Reason.ERROR], MEANINGS[Reason.LEAK]]


def test_something_is_never_covered() -> None:
    assert [gap.why for gap in not_covered(VERDICT)] == ["never judged"]


def test_everything_that_the_coverage_lacks_is_not_covered() -> None:
    coverage = replace(COVERAGE, missing=("a",), left_out=("b",), skipped={"no softcap": 2, "no sinks": 1}, unseen=("d",))
    items = [item for gap in not_covered(replace(VERDICT, coverage=coverage)) for item in gap.items]

    assert items[:5] == ["a", "b", "no softcap (2 cases)", "no sinks (1 case)", "d"]


def test_a_ratio_that_cannot_decide_says_how_many_rows_would() -> None:
    assert (
        "RMS e over the incumbent's, all cases",
        "1.000 [0.900, 1.500]",
        "margin 1.25; 100 clusters; about 1,700 would decide",
    ) in (figures(VERDICT))


def test_without_figures_there_is_nothing_to_hold_against_a_limit() -> None:
    nothing = replace(VERDICT, figures=None, ratios=())

    assert figures(nothing) == [] and in_short(nothing) == ""
    assert in_short(VERDICT) == "max e 0.5 (limit 1); RMS e over the incumbent's 1.000 [0.900, 1.500] (margin 1.25)"


def test_the_command_names_the_seed_once() -> None:
    assert again(VERDICT) == "oracle accept k --seed 7"
    assert again(replace(VERDICT, environment={"seed": 7, "command": "oracle accept k --seed 7"})) == "oracle accept k --seed 7"
