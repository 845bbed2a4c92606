"""Faults that the suite has never seen: drawn from the parameter table, damaged outputs, the share that is rejected."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.cases import Case
from oracle.contract import Record
from oracle.families import Family
from oracle.geometry import GEOMETRIES, geometry_of, lengths
from oracle.heldout import DAMAGES, EXTENTS, HeldOut, Share, draw, survivors
from oracle.pairs import FACTORS, PLACEMENT, factor_values

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=40)

FAMILY = Family(name="small", q_heads=4, kv_heads=2, head_dim=64, head_dim_v=64, scale=0.125)
CASE = Case(name="mixed", family=FAMILY, q_lens=(3, 2, 1), kv_lens=(21, 0, 9))
RECORD = Record()


@given(seed=st.integers(0, 10**6), count=st.integers(1, 40))
@drawn
def test_the_same_seed_draws_the_same_faults_of_values_that_the_table_has(seed: int, count: int) -> None:
    faults = draw(seed, count)

    assert faults == draw(seed, count) and len(faults) == count
    for fault in faults:
        assert len(dict(fault.when)) == len(fault.when) <= 2
        assert all(value in (FACTORS | PLACEMENT)[factor] for factor, value in fault.when)


def test_another_seed_draws_others_and_all_kinds_occur() -> None:
    faults = draw(1, 60)

    assert faults != draw(2, 60)
    assert {(f.extent, len(f.when)) for f in faults} == {(extent, n) for extent in EXTENTS for n in (1, 2)}
    assert {f.damage for f in faults} == set(DAMAGES)


@given(
    extent=st.sampled_from(EXTENTS),
    at=st.integers(0, 2**16),
    damage=st.sampled_from(DAMAGES),
    shape=st.tuples(st.integers(1, 9), st.integers(2, 5), st.integers(2, 9)),
)
@drawn
def test_only_the_row_head_or_lane_is_damaged(extent: str, at: int, damage: str, shape: tuple[int, int, int]) -> None:
    out = torch.arange(1.0, 1.0 + shape[0] * shape[1] * shape[2]).reshape(shape)
    moved = HeldOut(when=(), extent=extent, at=at, damage=damage).damaged(out) != out
    size = shape[EXTENTS.index(extent)]
    struck = moved.movedim(EXTENTS.index(extent), 0).flatten(1).any(1)

    assert int(struck.sum()) == (-(-(size - at % min(5, size)) // min(5, size)) if extent == "row" else 1) or size == 1
    assert size == 1 or bool(moved.movedim(EXTENTS.index(extent), 0)[struck].all())


def test_a_fault_strikes_where_its_values_occur_and_nowhere_else() -> None:
    values = factor_values(CASE)
    here = (("page_size", 16), ("group", 2))

    assert HeldOut(when=here, extent="row", at=0, damage="large").strikes(CASE)
    assert not HeldOut(when=here, extent="row", at=0, damage="large").strikes(replace(CASE, page_size=64))
    assert values["mask"] == "causal" and values["scale"] == "1/sqrt(d)" and values["geometry"] == ""


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_geometry_is_known_by_its_lengths_in_any_order(name: str) -> None:
    q_lens, kv_lens = lengths(name, seed=5, reach=300, page_size=16)

    assert geometry_of(q_lens, kv_lens) == geometry_of(q_lens[::-1], kv_lens[::-1]) == name


def test_a_fault_that_the_cases_meet_is_rejected_one_that_they_do_not_survives_and_one_that_changes_nothing_is_none() -> None:
    met = HeldOut(when=(("page_size", 16),), extent="head", at=1, damage="large")
    missed = HeldOut(when=(("page_size", 16), ("group", 12)), extent="head", at=1, damage="large")
    single = replace(CASE, family=replace(FAMILY, q_heads=1, kv_heads=1), page_size=8)
    identical = HeldOut(when=(("page_size", 8),), extent="head", at=0, damage="neighbour")

    assert survivors([met, missed, identical], [CASE, single], RECORD) == ([], [missed, identical])


def test_a_fault_below_the_bound_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oracle.heldout.LARGE", 2.0**-8)
    below = HeldOut(when=(("page_size", 16),), extent="lane", at=1, damage="large")

    assert survivors([below], [CASE], RECORD) == ([below], [])


def test_the_share_counts_faults_that_change_something() -> None:
    fault = HeldOut(when=(("group", 3),), extent="lane", at=1, damage="large")
    share = Share(drawn=12, harmless=2, survivors=(fault,))

    assert share.rejected == 0.9
    assert str(share) == "90.0% of 10 faults rejected (2 more change no bit); slipped through: lane large when group = 3"
    assert Share(drawn=0, harmless=0, survivors=()).rejected == 0.0
