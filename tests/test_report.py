"""The text and the JSON of a verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from io import StringIO

import jsonschema
import pytest
from rich.console import Console

from oracle.report import verdict_json, verdict_text
from oracle.verdict import DOORS, Coverage, Figures, Finding, Outcome, Ratio, Reason, Verdict

SCHEMA = json.loads(files("oracle").joinpath("schema/verdict.schema.json").read_text())
COVERAGE = Coverage(
    cases=3, elements=1234, rows=56, counts={"fill nan": 3}, missing=(), left_out=(), skipped={"no softcap": 2}, unseen=()
)
FIGURES = Figures(
    max_e=0.5,
    max_e_det=0.25,
    max_e_own=0.125,
    max_e_lse=None,
    rms_e=0.13,
    mean_abs=1e-4,
    max_abs=1e-2,
    slopes={"gain": {"beta": 1e-5, "z": 1.0, "effect": 1e-3, "share_of_limit": 0.1}},
    row_sum="before",
    seconds=1.5,
    calls=21,
)
ENVIRONMENT = {
    "oracle": "0", "torch": "2", "device": "cpu", "threads": 1, "profile": "default", "seed": 7, "suite_sha256": "0",
    "source_sha256": None, "record": {}, "command": "oracle accept k",
}  # fmt: skip
ACCEPTED = Verdict(
    outcome=Outcome.ACCEPT,
    door="accuracy",
    candidate="k",
    incumbent="emulator",
    findings=(),
    ratios=(Ratio(label="all", value=1.0, lower=0.99, upper=1.01, margin=1.25, rows=100),),
    figures=FIGURES,
    coverage=COVERAGE,
    notes=("a note",),
    environment=ENVIRONMENT,
)
REJECTED = replace(
    ACCEPTED,
    outcome=Outcome.REJECT,
    door="",
    findings=(
        Finding(reason=Reason.ERROR, case="small", text="e = 7 at row 1", size=10, units=7.0),
        Finding(reason=Reason.ERROR, case="large", text="e = 9 at row 2", size=100, units=9.0),
        Finding(reason=Reason.LEAK, case="small", text="a nan fill past the plan changes the result", size=10),
    ),
)


def text_of(verdict: Verdict) -> str:
    out = StringIO()
    Console(file=out, width=120, highlight=False).print(verdict_text(verdict))
    return out.getvalue()


@pytest.mark.parametrize(
    "verdict",
    [
        ACCEPTED,
        REJECTED,
        replace(REJECTED, figures=None, ratios=()),
        replace(ACCEPTED, figures=replace(FIGURES, max_e=float("inf"), max_abs=float("nan"))),
        replace(ACCEPTED, outcome=Outcome.NOT_COVERED, coverage=replace(COVERAGE, missing=("captured inputs",))),
    ],
)
def test_the_json_of_a_verdict_is_valid_by_its_schema(verdict: Verdict) -> None:
    data = json.loads(json.dumps(verdict_json(verdict), allow_nan=False))

    jsonschema.Draft202012Validator(SCHEMA).validate(data)
    assert data["exit_code"] == verdict.exit_code


def test_a_key_too_many_or_too_few_is_not_valid() -> None:
    data = verdict_json(ACCEPTED)
    validator = jsonschema.Draft202012Validator(SCHEMA)

    assert not validator.is_valid(data | {"more": 1})
    assert not validator.is_valid({k: v for k, v in data.items() if k != "coverage"})


def test_the_schema_names_every_reason_outcome_and_door() -> None:
    assert SCHEMA["$defs"]["reason"]["enum"] == [str(r) for r in Reason]
    assert SCHEMA["properties"]["outcome"]["enum"] == [str(o) for o in Outcome]
    assert SCHEMA["properties"]["door"]["enum"] == ["", *DOORS]


def test_the_first_line_says_the_verdict_and_the_second_what_was_judged() -> None:
    first, second, *_ = text_of(ACCEPTED).splitlines()

    assert first.split()[:2] == ["ACCEPT", "k"]
    assert "door accuracy" in first
    assert "3 cases" in second
    assert "1,234 output elements" in second
    assert "not declared: 2 (2 x no softcap)" in second


def test_a_reject_shows_each_reason_once_on_its_smallest_case() -> None:
    text = text_of(REJECTED)

    assert "small: e = 7 at row 1 (and 1 more)" in text
    assert "e = 9" not in text
    assert "past-the-plan" in text


def test_the_last_line_says_how_to_run_it_again() -> None:
    assert text_of(ACCEPTED).rstrip().endswith("again: oracle accept k --seed 7")


def test_a_reject_fits_on_one_screen() -> None:
    many = tuple(Finding(reason=r, case=f"case {r}", text="x" * 200, size=1) for r in Reason)

    assert len(text_of(replace(REJECTED, findings=many)).splitlines()) <= 30


def test_what_was_not_covered_is_said_of_an_accept_withheld() -> None:
    withheld = replace(ACCEPTED, outcome=Outcome.NOT_COVERED, coverage=replace(COVERAGE, missing=("captured inputs",)))

    assert "not covered: captured inputs" in text_of(withheld)
    assert withheld.exit_code == 3
