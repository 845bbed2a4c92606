"""The pictures show what was measured: edges where pages have them, the worst cell where the finding is, NaN as the worst."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oracle.canvas import DARK, LIGHT, Picture
from oracle.cases import Case
from oracle.charts import MOST_COLUMNS, MOST_EDGES, by_position, cells, distribution, edges, heat_map, row_by_row
from oracle.evidence import CaseErrors, Evidence, Histogram
from oracle.families import Family
from oracle.measure import Worst

FAMILY = Family(name="small", q_heads=6, kv_heads=2, head_dim=16, head_dim_v=8, scale=0.25)


def errors_of(by_head: Tensor, *, incumbent: bool = True, kept: bool = True) -> CaseErrors:
    """The errors of one sequence whose every row was judged; they are e of (row, head)."""
    rows = len(by_head)
    row, head = divmod(int(by_head.nan_to_num(math.inf).argmax()), by_head.shape[1])
    return CaseErrors(
        case=Case(name="a $case$", family=FAMILY, q_lens=(rows,), kv_lens=(rows + 30,)),
        rows=torch.arange(rows),
        sequence=torch.zeros(rows, dtype=torch.int64),
        position=torch.arange(rows) + 30,
        candidate=by_head.amax(1),
        incumbent=by_head.amax(1) / 2 if incumbent else None,
        worst=Worst(units=float(by_head.max()), row=row, head=head, column=0, got=1.0, want=0.0, limit=0.1),
        findings=(),
        by_head=by_head if kept else None,
    )


def with_worst(rows: int, row: int, head: int, e: float) -> Tensor:
    by_head = torch.full((rows, 6), 0.25, dtype=torch.float64)
    by_head[row, head] = e
    return by_head


def pictures(one: CaseErrors) -> list[Picture]:
    counted = Histogram().plus(one.candidate)
    of_all = Evidence(cases=(one,), candidate=counted, incumbent=counted)
    found = [by_position(one), distribution(counted, counted), row_by_row(of_all), heat_map(one)]
    return [picture for picture in found if picture is not None]


@given(st.integers(-40, 70_000), st.integers(0, 70_000), st.integers(1, 512))
def test_page_edges_lie_at_multiples_of_the_page_size(first: int, length: int, size: int) -> None:
    """All of them, or where they are too many to see, every so many."""
    found, step = edges(first, first + length, size)
    every = [edge for edge in range(0, first + length + 1, size) if edge >= first]

    assert found == [edge for edge in every if edge // size % step == 0]
    assert len(found) <= MOST_EDGES
    assert step == 1 or len(every) > MOST_EDGES


@pytest.mark.parametrize("rows", [7, MOST_COLUMNS, MOST_COLUMNS + 1, 5 * MOST_COLUMNS - 3])
@pytest.mark.parametrize("e", [9.0, math.inf])
def test_the_worst_cell_of_a_map_is_at_its_row_and_head(rows: int, e: float) -> None:
    one = errors_of(with_worst(rows, rows - 2, 4, e))
    assert one.by_head is not None
    shown = cells(one.by_head)
    head, column = divmod(int(shown.argmax()), shown.shape[1])

    assert (one.worst.row, one.worst.head) == (rows - 2, head) == (rows - 2, 4)
    assert column == (rows - 2) // -(-rows // MOST_COLUMNS)
    assert shown.shape[1] <= MOST_COLUMNS and shown.max() == e


def test_nan_has_a_place_of_its_own_in_every_picture() -> None:
    named = [("NaN" in p.light, "NaN" in p.dark) for p in pictures(errors_of(with_worst(20, 3, 1, math.inf)))]

    assert named == [(True, True)] * 4
    assert not any("NaN" in p.light for p in pictures(errors_of(with_worst(20, 3, 1, 9.0))))


@pytest.mark.parametrize("e", [0.0, 0.5, 1e9, math.inf])
def test_whatever_the_errors_there_are_four_pictures_and_the_same_every_time(e: float) -> None:
    one = errors_of(with_worst(20, 3, 1, e))

    assert len(pictures(one)) == 4
    assert pictures(one) == pictures(one)


def test_the_limit_and_both_kernels_are_named_in_the_legend() -> None:
    position, shares, *_ = pictures(errors_of(with_worst(20, 3, 1, 2.0)))

    for picture in (position, shares):
        assert "limit, e = 1" in picture.light and "incumbent" in picture.light and "candidate" in picture.light
        assert LIGHT.limit in picture.light and DARK.limit in picture.dark
    assert "page edge, every 16 keys" in position.light


def test_without_incumbent_there_is_no_comparison_and_without_map_no_map() -> None:
    assert row_by_row(Evidence(cases=(errors_of(with_worst(9, 3, 1, 2.0), incumbent=False),))) is None
    assert heat_map(errors_of(with_worst(9, 3, 1, 2.0), kept=False)) is None
    assert "incumbent" not in by_position(errors_of(with_worst(9, 3, 1, 2.0), incumbent=False)).light


def test_a_picture_of_many_rows_does_not_grow_with_them() -> None:
    """A batch of tens of thousands of sequences is drawn as pixels."""
    many = pictures(errors_of(torch.rand(30_000, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))))

    assert max(len(picture.light) for picture in many) < 400_000
