"""A verdict as one HTML file: verdict first, nothing from elsewhere, a kernel's text only text, and what was not covered."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
import torch
from html_pages import Read, pictures

from oracle import accept as accepting
from oracle.casefile import read
from oracle.cases import Case
from oracle.cli import cli
from oracle.errors import InputError
from oracle.evidence import CaseErrors, Evidence, Histogram
from oracle.families import FAMILIES, Family
from oracle.html_report import LIBRARIES, html_report, replay
from oracle.measure import Worst
from oracle.verdict import Coverage, Figures, Finding, Outcome, Ratio, Reason, Verdict

FAMILY = Family(name="small", q_heads=4, kv_heads=2, head_dim=16, head_dim_v=8, scale=0.25, window=(30, 0))
E = torch.full((6, 4), 0.25, dtype=torch.float64).index_put((torch.tensor(4), torch.tensor(2)), torch.tensor(7.0).double())
ERRORS = CaseErrors(
    case=Case(name="pair-7", family=FAMILY, q_lens=(4, 2), kv_lens=(40, 20)),
    rows=torch.arange(6),
    sequence=torch.tensor([0, 0, 0, 0, 1, 1]),
    position=torch.tensor([36, 37, 38, 39, 18, 19]),
    candidate=E.amax(1),
    incumbent=E.amax(1) / 8,
    worst=Worst(units=7.0, row=4, head=2, column=3, got=1.5, want=1.0, limit=0.0714),
    findings=(),
    by_head=E,
)
EVIDENCE = Evidence(cases=(ERRORS,), candidate=Histogram().plus(E), incumbent=Histogram().plus(E / 8))
ACCEPTED = Verdict(
    outcome=Outcome.ACCEPT,
    door="accuracy",
    candidate="k",
    incumbent="old",
    findings=(),
    ratios=(Ratio(label="all cases", value=1.0, lower=0.99, upper=1.01, margin=1.25, rows=100),),
    figures=Figures(
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
    ),
    coverage=Coverage(
        cases=3, elements=24, rows=6, counts={}, missing=(), left_out=("fill -inf",), skipped={"no softcap": 2}, unseen=()
    ),
    notes=("a note",),
    environment={"torch": "2", "device": "cpu", "threads": 1, "profile": "quick", "seed": 7, "command": "oracle accept k"},
)
REJECTED = replace(
    ACCEPTED,
    outcome=Outcome.REJECT,
    door="",
    findings=(
        Finding(reason=Reason.ERROR, case="pair-7", text="e = 7 at row 4", size=10, units=7.0),
        Finding(reason=Reason.LEAK, case="pair-7", text="a nan fill past the plan changes the result", size=10),
    ),
)
HOSTILE = "</title><script>alert('x')</script><img src=\"http://a.b/c\">&amp;{{ 7 * 7 }} 'END"


ACCEPTED_HTML, REJECTED_HTML = html_report(ACCEPTED, EVIDENCE), html_report(REJECTED, EVIDENCE)


@pytest.mark.parametrize("html", [ACCEPTED_HTML, REJECTED_HTML])
def test_it_takes_nothing_from_elsewhere(html: str) -> None:
    page = Read(html)

    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "base"}
    assert all(value.startswith(("data:image/svg+xml;base64,", "#")) for value in page.attributes("src", "srcset", "href"))
    assert "url(" not in html and "@import" not in html and not re.search("https?:", html)
    for svg in pictures(html):
        assert all(value.startswith(("#", "data:image/png;base64,")) for value in re.findall(r'href="([^"]*)"', svg))
        assert "<script" not in svg


def test_the_verdict_comes_first_then_the_reasons_then_the_pictures() -> None:
    page = Read(REJECTED_HTML)

    assert next(text for tag, text in page.text if tag == "title") == "REJECT k"
    assert page.headings() == [
        "Reasons, each with its smallest evidence",
        "Error by position",
        "Distribution of the error",
        "Candidate against incumbent, row by row",
        "Heads by rows",
        "Worst cases",
        "Figures",
        "Notes",
        "Not covered",
        "Again",
    ]
    assert "Reasons, each with its smallest evidence" not in Read(ACCEPTED_HTML).headings()


def test_every_picture_is_there_for_light_and_for_dark_pages_and_said_in_words() -> None:
    page = Read(ACCEPTED_HTML)

    assert len(pictures(ACCEPTED_HTML)) == 8 == len(set(pictures(ACCEPTED_HTML)))
    assert page.attributes("media") == ["(prefers-color-scheme: dark)"] * 4
    assert len(page.attributes("alt")) == 4 and all(page.attributes("alt"))
    assert "@media (prefers-color-scheme: dark)" in ACCEPTED_HTML


def test_the_caption_names_the_case_row_and_head_of_the_worst_element() -> None:
    text = Read(REJECTED_HTML).whole()

    assert "Case pair-7, which the first reason names." in text
    assert "at row 4: sequence 1, query 0 of 2, position 18 of 20, page 1 slot 2; head 2, column 3" in text
    assert "The ring is at row 4, head 2" in text


def test_where_the_smallest_case_has_too_few_rows_to_show_a_pattern_a_larger_one_is_pictured_too() -> None:
    many = torch.arange(40)
    larger = replace(
        ERRORS,
        case=replace(ERRORS.case, name="pair-8", q_lens=(40,), kv_lens=(60,)),
        rows=many,
        sequence=0 * many,
        position=20 + many,
        candidate=torch.full((40,), 7.0).double(),
        incumbent=None,
        by_head=torch.full((40, 4), 7.0).double(),
    )
    html = html_report(REJECTED, replace(EVIDENCE, cases=(ERRORS, larger)))

    assert Read(html).headings().count("Error by position") == Read(html).headings().count("Heads by rows") == 2
    assert "Case pair-8, which of the worst has the most rows" in html


@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("evidence", [EVIDENCE, Evidence()])
def test_what_was_not_covered_is_always_there(outcome: Outcome, evidence: Evidence) -> None:
    text = Read(html_report(replace(ACCEPTED, outcome=outcome), evidence)).whole()

    assert "fill -inf" in text and "no softcap (2 cases)" in text and "never judged" in text


def test_a_kernel_that_gave_no_answer_has_a_report_without_pictures() -> None:
    crash = (Finding(reason=Reason.CRASH, case="pair-7", text="it died of signal 11"),)
    html = html_report(replace(REJECTED, findings=crash, figures=None, ratios=()), Evidence())

    assert "it died of signal 11" in html and "the kernel gave no answer to any case" in html
    assert pictures(html) == []


def test_no_text_of_a_kernel_is_more_than_text() -> None:
    case = replace(ERRORS.case, name=HOSTILE)
    findings = (Finding(reason=Reason.ERROR, case=HOSTILE, text=HOSTILE, size=10, units=7.0),)
    verdict = replace(
        REJECTED,
        candidate=HOSTILE,
        incumbent=HOSTILE,
        findings=findings,
        notes=(HOSTILE,),
        environment=REJECTED.environment | {"command": HOSTILE},
    )
    html = html_report(verdict, replace(EVIDENCE, cases=(replace(ERRORS, case=case),)))

    assert {tag for tag, _ in Read(html).tags} == {tag for tag, _ in Read(REJECTED_HTML).tags}
    assert Read(html).whole().count("<script>alert('x')</script>") >= 6
    assert "{{ 7 * 7 }}" in html
    assert all(value.startswith("data:") for value in Read(html).attributes("src", "srcset"))


def test_the_same_verdict_is_the_same_bytes() -> None:
    assert html_report(REJECTED, EVIDENCE) == REJECTED_HTML


def test_nan_is_the_worst_of_all_cases_and_in_the_pictures() -> None:
    lost = replace(ERRORS, worst=replace(ERRORS.worst, units=math.inf, got=math.nan), candidate=E.amax(1) * math.inf)
    html = html_report(REJECTED, Evidence(cases=(lost,), candidate=Histogram().plus(E * math.inf)))

    assert "Its largest e of out is inf" in html and "Got nan" in html
    assert "NaN" in pictures(html)[0] and "NaN" in pictures(html)[2]


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        (ERRORS.case, "k"),
        (replace(ERRORS.case, name="mqa/needle", family=FAMILIES["mqa"]), "kernels/mine.py:attention"),
        (replace(ERRORS.case, name="it's $HOME `x`"), 'a"b\\:$(c)'),
        (replace(ERRORS.case, name="-e", q_lens=(), kv_lens=()), "END"),
        (replace(ERRORS.case, q_lens=(1,) * 300, kv_lens=(5,) * 300), "k"),
    ],
)
def test_the_commands_save_the_case_with_its_kernel_and_replay_it(case: Case, kernel: str, tmp_path: Path) -> None:
    commands = replay(kernel, replace(ERRORS, case=case))
    shell = 'oracle() { echo "$@"; }\n' + commands
    said = subprocess.run(["bash", "-euc", shell], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    verb, _, file = said.strip().partition(" ")

    (saved,) = read(tmp_path / file)
    assert (verb, saved.case, saved.kernel) == ("replay", case, kernel)
    assert len(commands.splitlines()) < 60


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_library_is_named_with_the_command_that_installs_it(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)

    with pytest.raises(InputError, match=rf"{library} is not installed; pip install 'attention-oracle\[report\]'"):
        html_report(ACCEPTED, EVIDENCE)


# The command


def run(*arguments: str) -> int:
    status = cli.main(["accept", "k", "--profile", "quick", *arguments], standalone_mode=False)
    assert isinstance(status, int)
    return status


def test_accept_writes_every_report_that_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "accept", lambda asked, progress, **_: replace(REJECTED, coverage=ACCEPTED.coverage))
    html, markdown, json = (tmp_path / f"report.{end}" for end in ("html", "md", "json"))

    assert run("--html", str(html), "--markdown", str(markdown), "--json", str(json)) == 1
    assert html.read_text().startswith("<!doctype html>")
    assert markdown.read_text().startswith("## ❌ REJECT `k`")
    assert json.read_text().startswith("{")


@pytest.mark.parametrize("option", ["--html", "--markdown", "--json"])
def test_a_report_into_no_folder_is_refused_before_anything_is_judged(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(accepting, "accept")

    with pytest.raises(click.UsageError, match=f"{option} /nowhere/report: there is no folder /nowhere"):
        run(option, "/nowhere/report")


def test_without_matplotlib_html_is_refused_before_anything_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delattr(accepting, "accept")

    with pytest.raises(InputError, match="matplotlib"):
        run("--html", str(tmp_path / "report.html"))
