"""A verdict as Markdown: short, whole in what it admits, and no text of a kernel is more than text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from oracle.markdown import ITEMS, REASONS, WIDTH, code, fenced, verdict_markdown
from oracle.verdict import Coverage, Figures, Finding, Outcome, Ratio, Reason, Verdict

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
ACCEPTED = Verdict(
    outcome=Outcome.ACCEPT,
    door="accuracy",
    candidate="k",
    incumbent="emulator",
    findings=(),
    ratios=(Ratio(label="all cases", value=1.0, lower=0.99, upper=1.01, margin=1.25, rows=100),),
    figures=FIGURES,
    coverage=COVERAGE,
    notes=("a note",),
    environment={"torch": "2", "device": "cpu", "threads": 1, "profile": "default", "seed": 7, "command": "oracle accept k"},
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
HOSTILE = "a|b `c` ``d``\n\n# e <script>x</script> ![f](http://g) @somebody [h](i) | j \\"


def tokens(text: str) -> Iterator[Token]:
    """Every token of the Markdown, those inside of lines as well."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        yield token
        yield from token.children or ()


def rows(text: str) -> list[int]:
    """Cells of each row of the tables."""
    counts: list[int] = []
    for token in tokens(text):
        if token.type == "tr_open":
            counts.append(0)
        elif token.type in ("th_open", "td_open"):
            counts[-1] += 1
    return counts


def test_the_first_line_is_the_verdict() -> None:
    assert verdict_markdown(ACCEPTED).splitlines()[0] == "## ✅ ACCEPT `k`"
    assert verdict_markdown(REJECTED).splitlines()[0] == "## ❌ REJECT `k`"


def test_a_reason_stands_with_its_smallest_evidence_and_the_count_of_others() -> None:
    text = verdict_markdown(REJECTED)

    assert "- **error-exceeds-bound** (e > 1) on `small`: `e = 7 at row 1` (and 1 more)" in text
    assert "e = 9" not in text
    assert "past-the-plan" in text


def test_the_figures_are_a_table_with_ratio_and_slopes() -> None:
    text = verdict_markdown(ACCEPTED)

    assert "| RMS e over the incumbent's, all cases | 1.000 [0.990, 1.010] | margin 1.25; 100 clusters |" in text
    assert "| slope: gain | +1.0e-05 | 10% of its limit |" in text
    assert set(rows(text)) == {3}


@pytest.mark.parametrize("outcome", Outcome)
def test_what_was_not_covered_is_always_there(outcome: Outcome) -> None:
    text = verdict_markdown(replace(ACCEPTED, outcome=outcome, coverage=replace(COVERAGE, skipped={}, missing=("captured",))))

    assert "### Not covered" in text
    assert "- must be covered, and was not: `captured`" in text
    assert "- never judged: " in text


def test_without_a_result_it_says_so() -> None:
    assert "No figures: it gave no result." in verdict_markdown(replace(REJECTED, figures=None, ratios=()))


def test_the_command_that_runs_it_again_is_there_with_its_seed() -> None:
    assert "```sh\noracle accept k --seed 7\n```" in verdict_markdown(ACCEPTED)


def test_it_is_short_whatever_was_found() -> None:
    findings = tuple(Finding(reason=r, case=f"case {i}", text="x" * 10_000, size=i) for r in Reason for i in range(100))
    coverage = replace(COVERAGE, left_out=("y" * 100,) * 1000)
    text = verdict_markdown(replace(REJECTED, findings=findings, coverage=coverage))

    assert len(text) < (REASONS + 2) * WIDTH + 3 * ITEMS * 100 + 4000
    assert f"and {len(Reason) - REASONS} more reasons" in text
    assert f"and {1000 - ITEMS} more" in text


def test_no_text_of_a_kernel_is_markup() -> None:
    findings = (Finding(reason=Reason.EXCEPTION, case=HOSTILE, text=HOSTILE, size=1),)
    hostile = replace(REJECTED, candidate=HOSTILE, incumbent=HOSTILE, findings=findings, notes=(HOSTILE,))
    for verdict in (hostile, replace(hostile, outcome=Outcome.ACCEPT, door="bits", findings=())):
        text = verdict_markdown(verdict)
        kinds = {token.type for token in tokens(text)}

        assert not kinds & {"html_block", "html_inline", "link_open", "image"}
        assert set(rows(text)) == {3}
        assert not any("@somebody" in token.content for token in tokens(text) if token.type == "text")


@given(st.text(st.characters(exclude_categories=("Cs", "Cc", "Z"), include_characters="` |\\\n")))
@example("`")
@example("``a`")
@example(" ")
def test_a_code_span_holds_its_text_and_nothing_more(text: str) -> None:
    inside = [token for token in tokens(f"x {code(text)} y") if token.type not in ("paragraph_open", "paragraph_close", "inline")]
    shown = " ".join(text.split())[:WIDTH]

    assert [token.type for token in inside] == ["text", "code_inline", "text"]
    assert inside[1].content.strip() == shown or len(shown) == WIDTH


def test_a_command_with_backticks_stays_in_its_block() -> None:
    (block,) = [token for token in tokens(fenced("oracle accept ```a``` `b`")) if token.type == "fence"]

    assert block.content == "oracle accept ```a``` `b`\n"


def test_the_same_verdict_is_the_same_text() -> None:
    assert verdict_markdown(REJECTED) == verdict_markdown(replace(REJECTED))
