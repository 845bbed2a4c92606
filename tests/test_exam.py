"""The exam: who was rejected and why, kind by kind and check by check, beside what others' rules say of the same outputs."""

from __future__ import annotations

import pytest

from oracle import accept as accepting
from oracle import exam
from oracle.accept import Asked
from oracle.cases import Case
from oracle.exam import Judged, judge_mutants, only_by, shares
from oracle.exam_text import checks, faults, kinds, peers
from oracle.families import Family
from oracle.mutants.peers import RULES
from oracle.mutants.table import MUTANTS
from oracle.mutants.understood import WRONG
from oracle.preparation import shared_preparation
from oracle.suite import Suite
from oracle.verdict import Coverage, Figures, Finding, Outcome, Reason, Verdict

FAMILY = Family(name="small", q_heads=4, kv_heads=2, head_dim=64, head_dim_v=64, scale=0.125)
CASES = (
    Case(name="mixed", family=FAMILY, q_lens=(24, 2, 1), kv_lens=(70, 0, 9), inputs="needle", seed=1),
    Case(name="short", family=FAMILY, q_lens=(16,), kv_lens=(16,), seed=2),
)
COVERED = Coverage(cases=1, elements=1, rows=1, counts={}, missing=(), left_out=(), skipped={}, unseen=())
FIGURES = Figures(
    max_e=0.5, max_e_det=0.1, max_e_own=0.375, max_e_lse=0.25, rms_e=0.1, mean_abs=0.0, max_abs=0.0, row_sum="before",
    seconds=1.0, calls=8,
    slopes={"gain": {"beta": 0.0, "z": 1.0, "effect": 0.0, "share_of_limit": 0.75}},
)  # fmt: skip


def verdict(*reasons: Reason) -> Verdict:
    return Verdict(
        outcome=Outcome.REJECT if reasons else Outcome.ACCEPT,
        door="" if reasons else "accuracy",
        candidate="a kernel",
        incumbent="emulator",
        findings=tuple(Finding(reason=reason, case="", text="") for reason in reasons),
        ratios=(),
        figures=FIGURES,
        coverage=COVERED,
        notes=(),
    )


def judged(name: str, *reasons: Reason, peers: dict[str, tuple[bool, bool]]) -> Judged:
    return Judged(
        name=name, seed=0, profile="quick", outcome="reject" if reasons else "accept", reasons=reasons, shares={}, ratio=None,
        seconds=2.0, peers=peers, versions="",
    )  # fmt: skip


NAMES = [name for name, mutant in MUTANTS.items() if mutant.reasons == WRONG][:4]
KILLED, BY_ONE, MISUNDERSTOOD, SURVIVOR = (
    judged(name, *reasons, peers=said)
    for name, reasons, said in zip(
        NAMES,
        ((Reason.ERROR, Reason.LSE), (Reason.LSE,), (Reason.CANARY,), ()),
        ({rule: (rule == "FA2 2x", True) for rule in RULES}, dict.fromkeys(RULES, (False, False)), {}, {}),
        strict=True,
    )
)
ALL = [KILLED, BY_ONE, MISUNDERSTOOD, SURVIVOR]


def test_only_a_reject_for_an_allowed_reason_is_understood() -> None:
    assert [j.understood for j in ALL] == [True, True, False, False]


def test_the_kinds_count_who_was_left_by_name() -> None:
    sheet = kinds(ALL)

    assert sheet.rows[-1][:4] == ("all", "4", "3", "2")
    assert {name for row in sheet.rows for name in (MISUNDERSTOOD.name, SURVIVOR.name) if name in row[4]} == {
        MISUNDERSTOOD.name,
        SURVIVOR.name,
    }
    assert not any(KILLED.name in row[4] for row in sheet.rows)


def test_a_check_that_alone_rejects_a_mutant_is_told() -> None:
    assert only_by(ALL) == {"lse-exceeds-bound": [BY_ONE.name], "canary": [MISUNDERSTOOD.name]}
    assert {row[0]: row[1:3] for row in checks(ALL).rows} == {
        "error-exceeds-bound": ("1", "0"),
        "lse-exceeds-bound": ("2", "1"),
        "canary": ("1", "1"),
    }


def test_every_mutant_has_a_line_with_its_report_and_a_mark_for_each_reason() -> None:
    sheet = faults(ALL)
    lines = {row[0]: row for row in sheet.rows}

    assert len(lines) == 4 and sheet.columns[4:-1] == ("error-exceeds-bound", "lse-exceeds-bound", "canary")
    assert lines[f"`{KILLED.name}`"][2:] == (MUTANTS[KILLED.name].reference, "quick", "x", "x", "", "2")
    assert f"| `{SURVIVOR.name}` |" in sheet.markdown()


def test_rules_are_counted_over_the_mutants_that_they_were_asked_of() -> None:
    lines = {row[0]: row[3:] for row in peers(ALL).rows}

    assert lines["FA2 2x"] == ("1 of 2", "1 of 2") and lines["llama.cpp NMSE"] == ("0 of 2", "1 of 2")
    assert lines["this oracle"] == ("", "2 of 2")
    assert r"max \|out - ref\|" in peers(ALL).markdown()


def test_how_near_a_kernel_comes_to_its_limits() -> None:
    assert shares(verdict()) == {"max e": 0.5, "beside the output's rounding": 0.375, "max e_lse": 0.25, "gain": 0.75}


@pytest.fixture
def small_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel is judged on CASES alone."""

    def build(scope: object, *, profile: str, seed: int, families: tuple[str, ...]) -> Suite:
        return Suite(profile=profile, seed=seed, families=("small",), cases=CASES, skipped=())

    monkeypatch.setattr(accepting, "build", build)


@pytest.mark.usefixtures("small_suite")
def test_a_mutant_is_judged_and_others_rules_see_the_same_outputs() -> None:
    """Lost last keys stand in a needle's place: every rule sees that; a scale off by 0.1 % none that allows 1.5 %."""
    lost, scaled = judge_mutants(["last_key_dropped", "scale_tenth_percent"], 0, True)

    assert lost.understood and lost.peers["cosine 0.999"] == (True, True)
    assert scaled.peers["vLLM 1.5e-2"] == (False, False)
    assert lost.peers.keys() == scaled.peers.keys() == RULES.keys()


@pytest.mark.usefixtures("small_suite")
def test_a_mutant_that_gives_no_answer_passes_no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exam, "timeout_s", lambda case, record: 1e-9)
    (judged,) = judge_mutants(["last_key_dropped"], 0, True)

    assert set(judged.peers.values()) == {(True, True)}


@pytest.mark.usefixtures("small_suite")
def test_peers_are_asked_only_where_wanted() -> None:
    (judged,) = judge_mutants(["zeros"], 0, False)

    assert judged.peers == {} and judged.understood and judged.seconds > 0


@pytest.mark.usefixtures("small_suite")
def test_only_what_the_quick_profile_misses_meets_the_default_one() -> None:
    """A mask that is causal when it is not asked to be: CASES are all causal, so nothing sees it."""
    caught, missed = judge_mutants(["zeros", "causal_always"], 0, False)

    assert (caught.profile, caught.understood) == ("quick", True)
    assert (missed.profile, missed.understood) == ("default", False)


@pytest.mark.usefixtures("small_suite")
def test_a_correct_kernel_is_not_understood_to_be_wrong() -> None:
    asked = Asked(candidate="oracle.kernels.emulated:textbook", seed=3, profile="quick")
    result = exam.judge("textbook", asked, shared_preparation())

    assert (result.outcome, result.reasons, result.seed) == ("not-covered", (), 3)
    assert 0 < result.shares["max e"] < 1 and result.ratio is not None
