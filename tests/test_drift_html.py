"""A drift report as one HTML file: decision first, nothing from elsewhere, foreign text only text, every figure in it."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace

import pytest
import torch
from drift_sample import measured, row_of, sample, text_of
from html_pages import Read, pictures

from oracle import drift_charts as charts
from oracle.canvas import Picture
from oracle.checkpoints.drifted import Drift, Row
from oracle.checkpoints.figures import Estimate
from oracle.drift_html import drift_html
from oracle.drift_numbers import ends, number
from oracle.drift_passages import AFTER, BEFORE, MOST, passages
from oracle.drift_summary import figures
from oracle.html_report import LIBRARIES

DRIFT = sample()
BARE = replace(DRIFT, decisions=(), attributions=(), waypoints=())
HOSTILE = "</title><script>alert('x')</script><img src=\"http://a.b/c\">&amp;{{ 7 * 7 }} \x1b[0m\u202e '"


def spoiled(row: Row, tokens: int) -> Row:
    """The row, its first tokens not finite."""
    bad = torch.arange(len(row.divergence.kl)) < tokens
    columns = {f.name: getattr(row.divergence, f.name) for f in fields(row.divergence)}
    lost = {name: c.masked_fill(bad, False if c.dtype == torch.bool else math.nan) for name, c in columns.items()}
    return row_of(DRIFT.text, row.configuration, type(row.divergence)(**lost))


HTML = drift_html(DRIFT)
PAGE = Read(HTML)


def test_it_takes_nothing_from_elsewhere() -> None:
    assert not {tag for tag, _ in PAGE.tags} & {"script", "link", "iframe", "object", "embed", "base"}
    assert all(value.startswith(("data:image/svg+xml;base64,", "#")) for value in PAGE.attributes("src", "srcset", "href"))
    assert "url(" not in HTML and "@import" not in HTML and not re.search("https?:", HTML)
    for svg in pictures(HTML):
        assert all(value.startswith(("#", "data:image/png;base64,")) for value in re.findall(r'href="([^"]*)"', svg))
        assert "<script" not in svg


def test_the_decision_comes_first_then_the_table_then_the_pictures() -> None:
    one = Read(drift_html(replace(DRIFT, decisions=DRIFT.decisions[:1])))
    assert next(text for tag, text in one.text if tag == "title") == "ACCEPT fp8+int8-attention"
    assert next(text for tag, text in PAGE.text if tag == "title") == "DRIFT bf16"
    assert PAGE.headings() == [
        "Configurations",
        "Decisions",
        "KL along the text",
        "Worst tokens in their text",
        "Distribution of the KL",
        "KL by position",
        "KL by the reference's confidence",
        "Layer by layer: fp8",
        "Waypoints",
        "Worst tokens",
        "All figures",
        "What ran",
        "Identity",
        "Again",
    ]


def test_what_was_not_asked_for_has_no_heading() -> None:
    page = Read(drift_html(BARE))

    assert next(text for tag, text in page.text if tag == "title") == "DRIFT bf16"
    assert not set(page.headings()) & {"Decisions", "Layer by layer: fp8", "Waypoints"}


def test_every_picture_is_there_for_light_and_for_dark_pages_and_said_in_words() -> None:
    assert len(pictures(HTML)) == 10 == len(set(pictures(HTML)))
    assert PAGE.attributes("media") == ["(prefers-color-scheme: dark)"] * 5
    assert len(PAGE.attributes("alt")) == 5 and all(PAGE.attributes("alt"))
    assert HTML.count("@media (prefers-color-scheme: dark)") == 2


def test_every_figure_of_every_configuration_is_in_it() -> None:
    text = PAGE.whole()

    for row in DRIFT.rows:
        for what, value, interval in figures(row.figures):
            assert what in text and value in text and interval in text
        for band in (*row.figures.by_position, *row.figures.by_confidence, *row.figures.by_document):
            assert band.label in text and number(band.kl.value) in text and ends(band.kl) in text
        for path in row.ran:
            assert path in text
    estimates = {f.name for f in fields(DRIFT.rows[0].figures) if isinstance(getattr(DRIFT.rows[0].figures, f.name), Estimate)}
    assert len([1 for _, _, interval in figures(DRIFT.rows[0].figures) if interval]) == len(estimates) + 4


def test_no_text_from_elsewhere_is_more_than_text() -> None:
    hostile = replace(
        DRIFT,
        reference=HOSTILE,
        rows=tuple(replace(row, configuration=f"{i}{HOSTILE}", ran={HOSTILE: 1}) for i, row in enumerate(DRIFT.rows)),
        decisions=tuple(replace(d, candidate=f"2{HOSTILE}", incumbent=HOSTILE, reason=HOSTILE) for d in DRIFT.decisions),
        attributions=tuple(replace(a, configuration=HOSTILE, suggested=HOSTILE) for a in DRIFT.attributions),
        waypoints=tuple(replace(w, name=HOSTILE, configuration=HOSTILE) for w in DRIFT.waypoints),
        text=replace(DRIFT.text, documents=(HOSTILE,) * len(DRIFT.text.documents)),
        pieces=(HOSTILE,) * len(DRIFT.pieces),
        layers=(HOSTILE,) * len(DRIFT.layers),
        identity={HOSTILE: HOSTILE},
        environment={"command": HOSTILE, HOSTILE: HOSTILE},
    )
    html = drift_html(hostile)
    page = Read(html)

    assert {tag for tag, _ in page.tags} == {tag for tag, _ in PAGE.tags}
    assert page.whole().count("<script>alert('x')</script>") > 100 and "{{ 7 * 7 }}" in html
    assert all(value.startswith("data:") for value in page.attributes("src", "srcset"))
    assert all(c.isprintable() or c == "\n" for c in html)
    assert not any("<script" in svg for svg in pictures(html))


def test_the_same_report_is_the_same_bytes_and_not_many() -> None:
    assert drift_html(replace(DRIFT)) == HTML
    assert len(HTML) < 800_000


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_library_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from oracle.errors import InputError

    monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(InputError, match=f"{library} is not installed"):
        drift_html(DRIFT)


@pytest.mark.parametrize(
    "drift",
    [
        replace(DRIFT, rows=DRIFT.rows[1:]),
        replace(DRIFT, rows=DRIFT.rows[:1], decisions=()),
        replace(BARE, rows=()),
        replace(DRIFT, attributions=(replace(DRIFT.attributions[0], swaps=(), kept=(), suggested="", suggested_kl=None),)),
    ],
    ids=["no floor", "only the floor", "no rows", "no swaps"],
)
def test_a_report_without_one_of_its_parts_is_still_one(drift: Drift) -> None:
    assert drift_html(drift).startswith("<!doctype html>")


def test_one_block_of_one_token_has_its_report() -> None:
    text = text_of(1, 2)
    html = drift_html(replace(BARE, text=text, rows=(row_of(text, "fp8", measured(text, 0.1, 3)),)))

    assert "[-inf, inf]" in html and "± ?" in html


# Passages


def test_the_worst_token_of_a_passage_is_framed_and_stands_where_the_title_says() -> None:
    for row in DRIFT.rows:
        found = passages(DRIFT, row)
        kl = row.divergence.kl
        assert 1 <= len(found) <= MOST
        assert found[0].title.startswith(
            f"KL {number(float(kl.max()))} at position {int(DRIFT.text.position[int(kl.argmax())])} "
        )
        for passage in found:
            (worst,) = [token for token in passage.tokens if "worst" in token.marks]
            assert worst.about == passage.title.partition(" at ")[0]
            assert len(passage.tokens) <= BEFORE + AFTER


def test_no_passage_is_about_a_token_that_stands_in_another() -> None:
    long = sample(2, 400)
    titles = [re.findall(r"position (\d+) of block (\d+)", p.title)[0] for p in passages(long, long.rows[4])]
    at = [(int(block), int(position) + 1) for position, block in titles]

    assert len(at) > 3
    for i, (block, here) in enumerate(at):
        assert not any(b == block and there - BEFORE <= here < there + AFTER for b, there in at[:i])


def test_a_token_is_coloured_by_the_share_of_tokens_below_it() -> None:
    row = DRIFT.rows[1]
    bounds = [row.figures.kl_percentiles[level].value for level in ("50", "90", "99", "99.9")]

    for passage in passages(DRIFT, row):
        for token in passage.tokens:
            if token.about:
                kl = float(token.about.removeprefix("KL "))
                level = int((re.findall(r"t(\d)", token.marks) or ["0"])[0])
                assert level in {sum(kl * (1 + tilt) > bound for bound in bounds) for tilt in (-0.005, 0, 0.005)}


def test_the_first_token_of_a_block_was_not_scored_and_has_no_colour() -> None:
    first = [p for p in passages(DRIFT, DRIFT.rows[1]) if len(p.tokens) < BEFORE + AFTER]

    assert first and all((p.tokens[0].marks, p.tokens[0].about) == ("", "") for p in first)


def test_a_token_that_is_not_finite_is_the_worst_of_all() -> None:
    (first, *_) = passages(DRIFT, spoiled(DRIFT.rows[1], 1))

    assert first.title.startswith("KL inf at position 0 of block 0")
    (worst,) = [token for token in first.tokens if "worst" in token.marks]
    assert worst.marks == "lost worst" and worst.about == "not finite"


# Pictures


def all_pictures(drift: Drift) -> list[Picture]:
    row = drift.rows[1]
    made = [
        charts.along(drift, row),
        charts.distribution(drift),
        charts.bands(drift, "by_position"),
        charts.bands(drift, "by_confidence"),
        *(charts.layers(drift, a) for a in drift.attributions),
    ]
    return [picture for picture in made if picture is not None]


def test_the_stretches_hold_every_token_once() -> None:
    for drift in (DRIFT, sample(2, 20)):
        row = drift.rows[1]
        mean, largest, edges = charts.stretches(row, drift.text)
        kl = row.divergence.kl.numpy()

        assert edges[0] == 0 and edges[-1] == len(kl) and len(mean) == len(largest) == len(edges) - 1 <= charts.MOST_BINS
        assert (mean * (edges[1:] - edges[:-1])).sum() == pytest.approx(kl.sum(), rel=1e-12)
        assert largest.max() == kl.max() and (largest >= mean * (1 - 1e-12)).all()


def test_the_curve_says_how_many_tokens_are_at_or_above_each_value() -> None:
    row = DRIFT.rows[1]
    kl, share = charts.exceeded(row)

    assert (kl[1:] >= kl[:-1]).all() and (share[1:] <= share[:-1]).all() and len(kl) <= charts.MOST_POINTS
    assert kl[-1] == float(row.divergence.kl.max()) and share[-1] == 1 / 768 and share[0] == 1
    for value, part in zip(kl, share, strict=True):
        assert part == float((row.divergence.kl >= value).double().mean())


def test_nan_has_a_place_of_its_own_wherever_single_tokens_are_drawn() -> None:
    drift = replace(DRIFT, rows=(DRIFT.rows[0], spoiled(DRIFT.rows[1], 5)))

    assert [("NaN" in p.light, "NaN" in p.dark) for p in (charts.along(drift, drift.rows[1]), charts.distribution(drift))] == [
        (True, True)
    ] * 2
    assert not any("NaN" in p.light for p in all_pictures(DRIFT))


def test_a_layer_that_is_not_finite_is_drawn_as_the_longest_and_named() -> None:
    one = DRIFT.attributions[0]
    lost = replace(one.swaps[0], kl=Estimate(value=math.nan, low=-math.inf, high=math.inf, se=math.inf))

    assert "NaN" in charts.layers(DRIFT, replace(one, swaps=(lost, one.swaps[1]))).light


def test_no_drift_at_all_has_its_pictures() -> None:
    same = row_of(DRIFT.text, "bf16+same", measured(DRIFT.text, 0.0, 3))

    assert all("less" in p.light for p in all_pictures(replace(BARE, rows=(same, same))))


def test_more_configurations_than_colours_differ_in_their_dashes() -> None:
    rows = tuple(replace(DRIFT.rows[1], configuration=f"fp8+k{i}") for i in range(9))
    svg = charts.distribution(replace(DRIFT, rows=rows)).light

    assert all(f"fp8+k{i}" in svg for i in range(9)) and "stroke-dasharray" in svg


def test_a_name_that_no_font_has_is_drawn_in_plain_signs() -> None:
    rows = tuple(replace(row, configuration="bf16+カ.py:f\x1b") for row in DRIFT.rows[1:])

    assert "bf16+\\u30ab.py:f" in charts.distribution(replace(DRIFT, rows=rows)).light
