"""Which rows are judged: every edge, then random ones, as many as the table of docs/numerics.md asks for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oracle.cases import Case
from oracle.families import Family
from oracle.material import visible_keys
from oracle.rows import KEY_TILES, TILES, rows_needed, sample_rows

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=100)

FAMILY = Family(name="rows", q_heads=8, kv_heads=2, head_dim=4, head_dim_v=4, scale=1.0)
LONG = Case(name="r", family=FAMILY, q_lens=(700,), kv_lens=(1000,))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 300)), min_size=1, max_size=4))
    window = draw(st.sampled_from([(-1, -1), (0, 0), (20, 0), (63, 0), (30, 10), (20, -1)]))
    family = replace(FAMILY, q_heads=2 * draw(st.integers(1, 12)), causal=draw(st.booleans()), window=window)
    return Case(
        name="r", family=family, q_lens=tuple(q for q, _ in lengths), kv_lens=tuple(k for _, k in lengths),
        page_size=draw(st.sampled_from((16, 1, 256))), seed=draw(st.integers(0, 9)),
    )  # fmt: skip


# The table of docs/numerics.md: rows for a fault on a share of all rows, at three confidences
TABLE = {0.25: (11, 17, 25), 0.03: (99, 152, 227), 0.01: (299, 459, 688), 0.001: (2995, 4603, 6905)}


@pytest.mark.parametrize(("share", "rows"), TABLE.items())
def test_rows_needed_are_those_of_the_table(share: float, rows: tuple[int, ...]) -> None:
    assert tuple(rows_needed(share, confidence) for confidence in (0.95, 0.99, 0.999)) == rows


@drawn
@given(st.floats(1e-6, 0.9), st.floats(0.01, 0.9999))
def test_rows_needed_meet_a_fault_with_the_confidence_asked_for_and_one_fewer_does_not(share: float, confidence: float) -> None:
    rows = rows_needed(share, confidence)

    def missed(n: int) -> float:
        return n * math.log1p(-share)

    assert missed(rows) <= math.log1p(-confidence) * (1 - 1e-12)
    assert missed(rows - 1) >= math.log1p(-confidence) * (1 + 1e-12)


@drawn
@given(cases(), st.integers(0, 200))
@example(replace(LONG, q_lens=(0,), kv_lens=(0,)), 5)
def test_rows_are_ascending_and_of_the_case(case: Case, at_least: int) -> None:
    rows = sample_rows(case, at_least).tolist()

    assert rows == sorted(set(rows))
    assert set(rows) <= set(range(case.total_q))
    assert len(rows) >= min(at_least, case.total_q)


@drawn
@given(cases(), st.integers(0, 50))
def test_all_rows_are_judged_where_there_are_few(case: Case, spare: int) -> None:
    assert sample_rows(case, case.total_q + spare).tolist() == list(range(case.total_q))


@drawn
@given(cases(), st.integers(0, 100), st.integers(0, 100))
def test_more_rows_hold_the_fewer(case: Case, few: int, more: int) -> None:
    """Raising the number adds rows and drops none; the same number gives the same rows."""
    fewer = set(sample_rows(case, few).tolist())

    assert fewer == set(sample_rows(case, few).tolist())
    assert fewer <= set(sample_rows(case, few + more).tolist())


@drawn
@given(cases())
def test_the_ends_of_every_sequence_are_judged(case: Case) -> None:
    """First, second, last and last but one, however few rows are asked for."""
    rows = set(sample_rows(case, 1).tolist())
    if case.total_q > 1:
        start = 0
        for n in case.q_lens:
            assert {start + r for r in (0, 1, n - 2, n - 1) if 0 <= r < n} <= rows
            start += n


@pytest.mark.parametrize("group", [1, 4, 6])
def test_both_sides_of_tile_edges_are_judged(group: int) -> None:
    """The first edge, one in the middle and the ragged last tile, for tiles of rows and of packed query heads."""
    case = replace(LONG, family=replace(FAMILY, q_heads=2 * group))
    rows = set(sample_rows(case, 8).tolist())
    for tile in TILES:
        for tokens in {tile, max(1, tile // group)}:
            last = 699 // tokens * tokens
            assert {tokens - 1, tokens, last - 1, last} <= rows
            assert any(r % tokens == 0 and tokens < r < last for r in rows)


@pytest.mark.parametrize("step", [16, *KEY_TILES])
def test_the_window_s_edge_on_and_beside_the_edge_of_a_page_and_of_a_key_tile_is_judged(step: int) -> None:
    case = replace(LONG, family=replace(FAMILY, window=(200, 0)), page_size=16)
    lo = visible_keys(case).lo[sample_rows(case, 8)]

    assert {0, 1, step - 1} <= {int(x) % step for x in lo if x > 0}


def test_rows_of_telling_lengths_are_judged() -> None:
    """Rows that see one key, two, and a key tile's worth, one fewer and one more."""
    case = replace(LONG, kv_lens=(700,))
    seen = visible_keys(case)
    rows = sample_rows(case, 8)
    lengths = set((seen.hi - seen.lo)[rows].tolist())

    assert {1, 2, *(t + d for t in KEY_TILES for d in (-1, 0, 1))} <= lengths


def test_the_other_rows_are_random() -> None:
    """Other seeds judge other rows, and over many of them every row is met."""
    edges = set(sample_rows(LONG, 1).tolist())
    met = [set(sample_rows(replace(LONG, seed=seed), 250).tolist()) for seed in range(40)]

    assert len(edges) < 100
    assert all(edges <= rows and len(rows) == 250 for rows in met)
    assert met[0] != met[1]
    assert set().union(*met) == set(range(700))


def test_a_fault_on_a_hundredth_of_the_rows_is_met() -> None:
    """Must fail with too few rows: 459 random ones miss it with probability 0.01, 40 with 0.7."""
    case = replace(LONG, q_lens=(20_000,), kv_lens=(20_000,))
    faulty = {r for r in range(20_000) if r * 7919 % 100 == 13}
    hits = [bool(faulty & set(sample_rows(replace(case, seed=s), rows_needed(0.01, 0.99)).tolist())) for s in range(20)]

    assert len(faulty) == 200
    assert sum(hits) >= 19
