"""A part of the exam: one mutant of most kinds, put to the real suite.  `make exam` puts all of them to it."""

from __future__ import annotations

import pytest

from oracle.exam import judge_mutant
from oracle.mutants.table import MUTANTS
from oracle.preparation import shared_preparation
from oracle.trial import Prepare

PART = (  # one a kind, those that an emulated kernel is quickest to run
    "window_page_granular",
    "offset_ignored",
    "top_left",
    "pages_sorted",
    "scale_inverted",
    "softcap_in_log2",
    "q_scaled_in_place",
    "hnd_read_as_nhd_in_8_bit",
    "tail_leaks_a_little",
    "row_before_first",
    "zeros_in_some_rows",
    "last_lse_not_written",
    "padding_zeroed",
    "page_stride_rebuilt",
    "key_appended",
    "empty_lse_zero",
    "lengths_taken_for_equal",
    "grid_over_64",
    "page_offset_int32",
    "sink_twice",
)


@pytest.fixture(scope="module")
def prepare() -> Prepare:
    """Equal cases are prepared once."""
    return shared_preparation()


@pytest.mark.parametrize("name", PART)
def test_a_mutant_is_rejected_by_the_quick_profile_for_a_reason_that_names_its_fault(name: str, prepare: Prepare) -> None:
    judged = judge_mutant(name, 0, prepare)

    assert judged.understood and judged.profile == "quick", judged


def test_the_part_is_of_as_many_kinds() -> None:
    assert len({MUTANTS[name].kind for name in PART}) == len(PART) == 20
