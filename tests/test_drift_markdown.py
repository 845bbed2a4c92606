"""A drift report as Markdown: short, the same figures as elsewhere, and no text, token or file name is more than text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from drift_sample import sample
from markdown_it import MarkdownIt
from markdown_it.token import Token

from oracle.checkpoints.drifted import Drift
from oracle.drift_markdown import drift_markdown
from oracle.drift_summary import COLUMNS, WAYPOINT_COLUMNS, WORST_COLUMNS, comparison

DRIFT = sample()
BARE = replace(DRIFT, decisions=(), attributions=(), waypoints=())
HOSTILE = "a|b `c` ``d``\n\n# e <script>x</script> ![f](http://g) @somebody [h](i) \\| j \x1b[0m \\"


def tokens(text: str) -> Iterator[Token]:
    """Every token of the Markdown, those inside of lines as well."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        yield token
        yield from token.children or ()


def tables(text: str) -> list[list[list[str]]]:
    """The cells of every table, row by row, as a reader sees them."""
    found: list[list[list[str]]] = []
    before = ""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif before in ("th_open", "td_open"):
            found[-1][-1].append("".join(child.content for child in token.children or ()))
        before = token.type
    return found


def hostile(drift: Drift) -> Drift:
    """Every name, token and value that comes from elsewhere is hostile."""
    return replace(
        drift,
        reference=HOSTILE,
        rows=tuple(replace(row, configuration=f"{i}{HOSTILE}") for i, row in enumerate(drift.rows)),
        decisions=tuple(replace(d, candidate=HOSTILE, incumbent=HOSTILE, reason=HOSTILE) for d in drift.decisions),
        attributions=tuple(replace(a, configuration=HOSTILE, suggested=HOSTILE) for a in drift.attributions),
        waypoints=tuple(replace(w, name=HOSTILE, configuration=HOSTILE) for w in drift.waypoints),
        text=replace(drift.text, documents=(HOSTILE,) * len(drift.text.documents)),
        pieces=(HOSTILE,) * len(drift.pieces),
        layers=(HOSTILE,) * len(drift.layers),
        identity={HOSTILE: HOSTILE},
        environment={"command": HOSTILE, HOSTILE: HOSTILE},
    )


def test_the_first_line_is_the_decision() -> None:
    assert drift_markdown(replace(DRIFT, decisions=DRIFT.decisions[:1])).splitlines()[0] == "## ✅ ACCEPT: drift from `bf16`"
    assert drift_markdown(DRIFT).splitlines()[:3] == ["## DRIFT: drift from `bf16`", "", "2 decisions: 1 accept, 1 reject"]
    assert drift_markdown(replace(DRIFT, decisions=DRIFT.decisions[1:])).splitlines()[0] == "## ❌ REJECT: drift from `bf16`"
    assert drift_markdown(BARE).splitlines()[0] == "## DRIFT: drift from `bf16`"


def test_every_configuration_is_a_row_and_the_floor_is_marked() -> None:
    head, *rows = tables(drift_markdown(DRIFT))[0]

    assert tuple(head) == COLUMNS
    assert [row[0] for row in rows] == [line.cells[0] for line in comparison(DRIFT)]
    assert [row[2].partition(", ")[2] for row in rows] == ["the floor", "", "", "not distinguishable", ""]
    assert "| **`bf16+other-attention`** |" in drift_markdown(DRIFT)


def test_every_decision_is_there_with_its_reason() -> None:
    text = drift_markdown(DRIFT)

    for one in DRIFT.decisions:
        assert f"{one.ruling}: `{one.candidate}` against `{one.incumbent}`: `{one.reason}`" in text


def test_every_table_has_as_many_cells_in_each_row() -> None:
    for drift in (DRIFT, hostile(DRIFT)):
        found = tables(drift_markdown(drift))

        assert [len(table[0]) for table in found] == [len(COLUMNS), 5, len(WAYPOINT_COLUMNS), len(WORST_COLUMNS)]
        assert all(len({len(row) for row in table}) == 1 for table in found)


@pytest.mark.parametrize("drift", [DRIFT, BARE])
def test_no_text_from_elsewhere_is_markup(drift: Drift) -> None:
    text = drift_markdown(hostile(drift))

    assert not {token.type for token in tokens(text)} & {"html_block", "html_inline", "link_open", "image"}
    assert not any("@somebody" in token.content for token in tokens(text) if token.type == "text")
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "\\\\|" not in text, "a bar after two backslashes ends a cell on GitHub"


def test_a_token_with_a_bar_is_shown_as_it_is() -> None:
    worst = tables(drift_markdown(DRIFT))[-1]

    assert any("<|end|>" in row[-1] for row in worst)


def test_what_was_not_asked_for_has_no_heading() -> None:
    text = drift_markdown(BARE)

    assert not any(heading in text for heading in ("### Decisions", "### Layer", "### Waypoints"))
    assert "### Worst tokens" in text and "### Again" in text


def test_the_command_and_the_whole_hashes_are_there() -> None:
    text = drift_markdown(DRIFT)

    assert "```sh\noracle drift tiny --configs fp8,fp8+int8-attention\n```" in text
    assert "`torch 2, threads 1, seconds 2.50`" in text
    assert f"- `weights_sha256`: `{'a1' * 32}`" in text


def test_it_is_short() -> None:
    assert len(drift_markdown(DRIFT)) < 8000


def test_the_same_report_is_the_same_text() -> None:
    assert drift_markdown(DRIFT) == drift_markdown(replace(DRIFT))
