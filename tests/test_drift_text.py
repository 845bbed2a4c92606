"""A drift report for a terminal: the decision first, one table with the floor in it, and foreign text that is only text."""

from __future__ import annotations

import math
from dataclasses import replace
from io import StringIO

import pytest
import torch
from drift_sample import FLOOR, sample
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from oracle.checkpoints.drifted import Drift, Swap
from oracle.checkpoints.figures import Estimate
from oracle.drift_numbers import bar, number, percent, visible
from oracle.drift_summary import (
    BEFORE,
    comparison,
    headline,
    layers,
    shown,
    spots,
    times_floor,
    waypoint,
    within_line,
    worst,
)
from oracle.drift_text import drift_text

DRIFT = sample()
ONE = replace(DRIFT, decisions=DRIFT.decisions[:1])
BARE = replace(DRIFT, decisions=(), attributions=(), waypoints=())
HOSTILE = "\x1b[31m[bold]red[/bold]\r\n\u202etxt.exe\x07\u0000"


def text_of(drift: Drift, width: int = 100) -> str:
    out = StringIO()
    Console(file=out, width=width, highlight=False).print(drift_text(drift))
    return out.getvalue()


def without_floor(drift: Drift) -> Drift:
    return replace(drift, rows=tuple(row for row in drift.rows if not row.floor))


# Numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (-0.0, "0"), (0.03574, "0.0357"), (0.0360, "0.0360"), (1.0, "1.00"), (123.4, "123"), (1234.5, "1,230"),
        (99.99, "100"), (999.9, "1,000"), (1.5e-7, "1.50e-07"), (5e9, "5.00e+09"), (-0.0122, "-0.0122"), (math.inf, "inf"),
        (-math.inf, "-inf"), (math.nan, "nan"),
    ],
)  # fmt: skip
def test_a_number_has_three_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


@given(st.floats(-1e300, 1e300))
@example(999.5)
@example(999_499.9)
@example(999_500.0)
@example(5e-324)
def test_a_number_is_read_back_to_half_a_unit_of_its_last_digit(value: float) -> None:
    read = float(number(value).replace(",", ""))

    assert abs(read - value) <= 0.00501 * abs(value) or abs(value) < 1e-300
    assert (read == 0) == (value == 0)


@given(st.floats(0, 1))
@example(1 - 1e-9)
@example(0.9995)
def test_a_share_below_the_whole_never_reads_as_the_whole(share: float) -> None:
    assert (percent(share) == "100 %") == (share == 1)


@given(st.floats(), st.integers(1, 40))
@example(math.nan, 8)
def test_a_bar_has_its_width_whatever_it_shows(share: float, width: int) -> None:
    assert len(bar(share, width)) == width
    assert bar(1.0, width) == bar(math.inf, width) == bar(math.nan, width) == "█" * width
    assert bar(0.0, width) == bar(-1.0, width) == " " * width


@given(st.text())
@example(HOSTILE)
@example("\ud800 \u2028 \ufeff")
def test_what_is_visible_is_one_printable_line_that_can_be_written(text: str) -> None:
    assert visible(text).isprintable()
    visible(text).encode("utf-8")


# What is said


def test_the_first_line_says_what_was_decided_with_both_figures_and_the_margin() -> None:
    first = " ".join(text_of(ONE).splitlines()[:3])
    (decision,) = ONE.decisions

    assert first.startswith(f"{decision.ruling.upper()}  fp8+int8-attention against fp8: {decision.ruling}; KL ")
    assert f"{number(decision.kl_candidate.value)} ± " in first and f"against {number(decision.kl_incumbent.value)} ± " in first
    assert "5 %" in first and "(12 blocks" in first


def test_of_several_decisions_none_heads_the_report() -> None:
    assert text_of(DRIFT).startswith("DRIFT  2 decisions: 1 accept, 1 reject\n")


def test_without_a_decision_the_first_line_says_what_was_found() -> None:
    kl = [row.figures.kl.value for row in DRIFT.rows if not row.floor]

    assert headline(BARE).startswith(
        f"KL from bf16: {number(min(kl))} to {number(max(kl))} nats in 4 configurations; the floor is "
    )
    assert "no floor was measured" in headline(without_floor(BARE))
    assert headline(replace(BARE, rows=DRIFT.rows[:1])).startswith("nothing was measured against bf16 but its floor")


def test_every_configuration_stands_in_one_table_beside_its_floor() -> None:
    lines = comparison(DRIFT)

    assert [line.cells[0] for line in lines] == [row.configuration for row in DRIFT.rows]
    assert [line.note for line in lines] == ["the floor", "", "", "not distinguishable", ""]
    for line, row in zip(lines, DRIFT.rows, strict=True):
        f = row.figures
        assert line.cells[1].startswith(number(f.kl.value))
        assert line.cells[2:5] == (
            number(f.kl.value / DRIFT.rows[0].figures.kl.value),
            number(f.kl_percentiles["99"].value),
            number(f.kl_max),
        )
        assert line.cells[-1] == str(f.not_finite)


def test_a_configuration_no_farther_than_the_floor_is_called_not_distinguishable() -> None:
    assert "not distinguishable" in text_of(DRIFT)
    near = tuple(row for row in DRIFT.rows if row.configuration != "bf16+near")
    assert "not distinguishable" not in text_of(replace(DRIFT, rows=near))


def test_without_a_floor_nothing_is_measured_by_it() -> None:
    bare = without_floor(DRIFT)

    assert {line.cells[2] for line in comparison(bare)} == {"no floor"}
    assert {line.note for line in comparison(bare)} == {""}
    assert "the floor" not in text_of(replace(bare, decisions=()))


def test_a_floor_of_nothing_is_infinitely_exceeded() -> None:
    floor = DRIFT.rows[0]
    none = replace(floor, figures=replace(floor.figures, kl=Estimate(value=0.0, low=0.0, high=0.0, se=0.0)))

    assert times_floor(replace(DRIFT, rows=(none, *DRIFT.rows[1:])), DRIFT.rows[1].figures.kl) == math.inf


def test_the_layers_are_listed_with_bars_and_the_suggestion_was_measured() -> None:
    (one,) = DRIFT.attributions
    first, second = layers(DRIFT, one)
    text = " ".join(text_of(DRIFT).split())

    assert (first.kept, second.kept) == (False, True)
    assert second.cells[-1].count("█") == 16 > first.cells[-1].count("█") == 6
    assert "1.05 times the sum of each alone; none swapped 0; with layer 1 as in the reference, fp8@0 has KL" in text
    nothing = replace(one, kept=(), suggested="", suggested_kl=None)
    assert "no mixed configuration helps" in text_of(replace(DRIFT, attributions=(nothing,)), 200)


def test_of_many_layers_the_terminal_shows_those_with_most_drift_and_counts_the_rest() -> None:
    one = DRIFT.attributions[0]
    values = (*(0.001 * i for i in range(1, 20)), math.nan)
    swaps = tuple(Swap(layer=i, kind="sliding", kl=Estimate(value=kl, low=kl, high=kl, se=0.0)) for i, kl in enumerate(values))
    many = replace(DRIFT, attributions=(replace(one, swaps=swaps),))

    assert [line.cells[0] for line in layers(many, many.attributions[0], 3)] == ["17", "18", "19"]
    assert len(layers(many, many.attributions[0])) == 20
    assert "and 12 more layers, each with less" in text_of(many)


@pytest.mark.parametrize(
    ("difference", "word"), [(0.0, "pass"), (2.0, "pass"), (2.01, "OVER"), (math.inf, "OVER"), (math.nan, "OVER")]
)
def test_a_waypoint_passes_the_line_up_to_a_logit_difference_of_two(difference: float, word: str) -> None:
    one = replace(DRIFT.waypoints[0], max_logit=difference)

    assert waypoint(one)[6] == word and within_line(one) == (word == "pass")


def test_a_step_that_is_not_exact_where_it_must_be_is_seen() -> None:
    assert [waypoint(replace(DRIFT.waypoints[0], exact=exact))[-1] for exact in (None, True, False)] == ["not asked", "yes", "NO"]


def test_a_worst_token_stands_behind_the_tokens_that_predict_it() -> None:
    for row in DRIFT.rows:
        for spot in worst(DRIFT, row):
            block = DRIFT.text.blocks[spot.block]
            assert spot.token == block[spot.position + 1] and spot.piece == DRIFT.pieces[spot.token]
            assert spot.before == tuple(DRIFT.pieces[t] for t in block[: spot.position + 1][-BEFORE:])
            assert float(row.divergence.kl[spot.index]) == spot.kl


def test_most_worst_tokens_are_those_of_the_configuration_decided_on() -> None:
    names = [spot.configuration for spot in spots(ONE)]

    assert names.count("fp8+int8-attention") == 4 and FLOOR not in names
    assert {names.count(row.configuration) for row in DRIFT.rows[1:]} == {4, 1}


def test_without_a_decision_the_farthest_configuration_is_shown() -> None:
    far = shown(BARE)

    assert far is not None and far.configuration == "kernels/mine.py:attention"
    floor = shown(replace(BARE, rows=DRIFT.rows[:1]))
    assert floor is not None and floor.floor
    assert shown(replace(BARE, rows=())) is None


def test_the_last_line_identifies_the_report_and_says_how_to_make_it_again() -> None:
    last = " ".join(text_of(DRIFT).split()).rpartition(" weights_sha256 ")[2]

    assert last.startswith(
        "a1a1a1a1a1a1, tokenizer_sha256 b2b2b2b2b2b2, tokens_sha256 c3c3c3c3c3c3, blocks 12x65, reference bf16"
    )
    assert last.endswith("again: oracle drift tiny --configs fp8,fp8+int8-attention")


# How it is said


@pytest.mark.parametrize("width", [100, 120])
def test_it_fits_on_one_screen_and_no_number_is_broken(width: int) -> None:
    text = text_of(DRIFT, width)

    assert len(text.splitlines()) <= 62
    for line in comparison(DRIFT):
        assert all(cell in text for cell in line.cells[1:])


def test_nothing_foreign_is_markup_or_control() -> None:
    rows = tuple(replace(row, configuration=row.configuration + HOSTILE) for row in DRIFT.rows)
    decisions = tuple(replace(d, candidate=d.candidate + HOSTILE, reason=HOSTILE) for d in DRIFT.decisions)
    hostile = replace(
        DRIFT,
        reference=HOSTILE,
        rows=rows,
        decisions=decisions,
        attributions=(replace(DRIFT.attributions[0], configuration=HOSTILE, suggested=HOSTILE),),
        waypoints=(replace(DRIFT.waypoints[0], name=HOSTILE, configuration=HOSTILE),),
        text=replace(DRIFT.text, documents=(HOSTILE,) * 3),
        pieces=(HOSTILE,) * len(DRIFT.pieces),
        layers=(HOSTILE,) * 2,
        identity={HOSTILE: HOSTILE},
        environment={"command": HOSTILE},
    )
    text = text_of(hostile, 400)

    assert all(c.isprintable() or c == "\n" for c in text)
    assert text.count("[bold]red[/bold]") > 20


def test_the_same_report_is_the_same_text() -> None:
    assert text_of(DRIFT) == text_of(replace(DRIFT))


def test_what_is_not_finite_is_counted_and_said() -> None:
    lost = replace(DRIFT.rows[1].figures, not_finite=3, kl=Estimate(value=math.inf, low=math.nan, high=math.inf, se=math.nan))
    text = text_of(replace(BARE, rows=(DRIFT.rows[0], replace(DRIFT.rows[1], figures=lost))))

    assert "inf ± ?" in text
    assert torch.equal(DRIFT.rows[1].divergence.finite, torch.ones(768, dtype=torch.bool))
