"""Batch geometries: valid lengths, dense round the edges of tiles and pages, and what their names promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.cases import Case
from oracle.families import FAMILIES
from oracle.geometry import EDGES, GEOMETRIES, Lengths, lengths
from oracle.material import visible_keys
from oracle.pairs import EXTENTS, MASKS

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=60)

geometries = st.sampled_from(sorted(GEOMETRIES))
reaches = st.integers(200, 1100)
pages = st.sampled_from((1, 8, 16, 32, 64, 128, 256))


def many(name: str, seeds: int = 30) -> list[Lengths]:
    return [lengths(name, seed=seed, reach=200, page_size=16) for seed in range(seeds)]


@drawn
@given(geometries, st.integers(0, 2**48), reaches, pages)
def test_lengths_go_in_pairs_and_stay_within_reach(name: str, seed: int, reach: int, page: int) -> None:
    """A prompt longer than the reach takes 40 keys more than it has rows."""
    q_lens, kv_lens = lengths(name, seed=seed, reach=reach, page_size=page)

    assert len(q_lens) == len(kv_lens)
    assert min(q_lens) >= 0
    assert min(kv_lens) >= 0
    assert max(kv_lens) <= max(reach, max(q_lens) + 40)


@drawn
@given(geometries, st.integers(0, 2**48), reaches, pages)
def test_the_same_seed_gives_the_same_lengths(name: str, seed: int, reach: int, page: int) -> None:
    assert lengths(name, seed=seed, reach=reach, page_size=page) == lengths(name, seed=seed, reach=reach, page_size=page)


@pytest.mark.parametrize("name", ["decode-20", "decode-70", "prefill", "prefill-257+", "speculative", "mixed"])
def test_other_seeds_give_other_lengths(name: str) -> None:
    assert len(set(many(name))) > 5


@drawn
@given(st.integers(0, 2**48), reaches, pages)
def test_the_longest_sequence_reaches_as_far_as_asked(seed: int, reach: int, page: int) -> None:
    """So that the edge of a window of reach - 70 lies inside it: in all but a plain prompt and short sequences."""
    for name in set(GEOMETRIES) - {"prefill", "short"}:
        assert max(lengths(name, seed=seed, reach=reach, page_size=page)[1]) >= reach


@pytest.mark.parametrize(("name", "batch"), [("decode-20", 20), ("decode-70", 70), ("single", 1)])
def test_decode_has_one_row_a_sequence(name: str, batch: int) -> None:
    """Sequences of one and of two keys are among those of a batch."""
    for q_lens, kv_lens in many(name):
        assert q_lens == (1,) * batch
        assert batch == 1 or {1, 2, 200} <= set(kv_lens)


def test_half_the_lengths_of_a_batch_lie_on_an_edge_or_beside_it() -> None:
    near = {*EDGES, 15, 16, 17, 32, 199, 200}
    keys = [k for _, kv_lens in many("decode-70") for k in kv_lens[3:]]

    assert 0.5 < sum(k in near for k in keys) / len(keys) < 0.65
    assert near <= set(keys)


@pytest.mark.parametrize("page", [1, 8, 64, 256])
def test_the_edges_of_a_page_are_among_the_lengths(page: int) -> None:
    """One key fewer than a page, a page, one more, two pages: where they are in reach."""
    keys = {k for s in range(30) for k in lengths("decode-70", seed=s, reach=600, page_size=page)[1]}

    assert {n for n in (page - 1, page, page + 1, 2 * page) if n > 0} <= keys


def test_a_prompt_has_no_context_and_a_long_one_has_some() -> None:
    """The long one has three tiles of 128 rows."""
    for q_lens, kv_lens in many("prefill"):
        assert q_lens == kv_lens
        assert 100 <= q_lens[0] <= 128
    for q_lens, kv_lens in many("prefill-257+"):
        assert len(q_lens) == 1
        assert q_lens[0] > 256
        assert kv_lens[0] >= q_lens[0] + 40


def test_speculative_sequences_have_two_to_eight_new_tokens() -> None:
    for q_lens, kv_lens in many("speculative"):
        assert q_lens == (2, 3, 5, 8)
        assert all(k >= q for q, k in zip(q_lens, kv_lens, strict=True))


def test_mixed_batches_hold_everything_at_once() -> None:
    """Decode beside prefill rows, sequences without queries, without keys, without either, and more queries than keys."""
    for q_lens, kv_lens in many("mixed"):
        pairs = set(zip(q_lens, kv_lens, strict=True))
        assert 1 in q_lens
        assert max(q_lens) > 32
        assert (1, 0) in pairs
        assert (0, 0) in pairs
        assert any(q == 0 and k > 0 for q, k in pairs)
        assert any(q > k > 0 for q, k in pairs)
        assert q_lens[0] > 0
        assert 0 in q_lens[1:-1]


def test_short_sequences_have_rows_that_see_nothing() -> None:
    """Causal rows before the first key, and rows that do see some, in one sequence."""
    q_lens, kv_lens = many("short", 1)[0]
    case = Case(name="s", family=FAMILIES["llama3"], q_lens=q_lens, kv_lens=kv_lens)
    seen = visible_keys(case)
    count = torch.split(seen.hi - seen.lo, list(q_lens))

    assert any(bool((c == 0).any()) and bool((c > 0).any()) for c in count)
    assert max(kv_lens) <= 16


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_suite_knows_how_large_a_geometry_is(name: str) -> None:
    """EXTENTS holds its rows and its sequences with keys, at the most."""
    rows, sequences = EXTENTS[name]

    assert set(EXTENTS) == set(GEOMETRIES)
    assert max(sum(q_lens) for q_lens, _ in many(name)) <= rows
    assert max(sum(k > 0 for k in kv_lens) for _, kv_lens in many(name)) <= sequences


@pytest.mark.parametrize("mask", MASKS)
def test_most_geometries_have_rows_that_a_mask_tells_apart(mask: str) -> None:
    """In at least three of them some row loses keys to the mask, and some row sees one."""
    causal, window = MASKS[mask]
    family = replace(FAMILIES["llama3"], causal=causal, window=window)
    telling = 0
    for name in GEOMETRIES:
        q_lens, kv_lens = lengths(name, seed=0, reach=max(200, window[0] + 70), page_size=16)
        case = Case(name=name, family=family, q_lens=q_lens, kv_lens=kv_lens)
        seen = visible_keys(case)
        everything = visible_keys(replace(case, family=replace(family, causal=False, window=(-1, -1))))
        fewer = (seen.hi - seen.lo) < (everything.hi - everything.lo)
        telling += bool((fewer & (seen.hi > seen.lo)).any())

    assert telling >= 3 or mask == "full"
