"""The decision on drift: its rulings, how often they are wrong, and how many blocks it would take."""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from skewed_runs import BLOCKS, RUNS, TOKENS, long_run, plain_accepts

from oracle.checkpoints.clusters import LEAST_BLOCKS, Estimate, block_sums, blocks_to_tell, guarded_bounds
from oracle.checkpoints.decision import MARGIN, Decision, Ruling, above_floor, decide, operating_curve
from oracle.checkpoints.divergence import Divergence
from oracle.checkpoints.loading import CheckpointError
from oracle.checkpoints.texts import Text

RESAMPLES = 2000
BY_CHANCE = 3 * math.sqrt(0.05 * 0.95 / RESAMPLES)  # a rate of 5 % is measured higher than by this once in 700 times
seeds = st.integers(0, 2**32 - 1)


def text_of(blocks: int, tokens: int = TOKENS) -> Text:
    block = torch.arange(blocks).repeat_interleave(tokens)
    position = torch.arange(tokens).repeat(blocks)
    return Text(
        block=block, document=block * 0, position=position, token=position * 0, documents=("a.txt",), blocks=((0,),) * blocks
    )  # fmt: skip


def drifted(kl: np.ndarray | torch.Tensor) -> Divergence:
    """With this KL at each token; NaN where it is not finite."""
    column = torch.as_tensor(kl, dtype=torch.float64)
    ok = column.isfinite()
    return Divergence(
        kl=column, kl_reverse=column, js=column, agree1=ok, agree5=column, nll_reference=column, nll_candidate=column,
        confidence=column, finite=ok,
    )  # fmt: skip


def ruled(ratio: float, blocks: int = 64, seed: int = 0) -> Decision:
    """On the first blocks of a run whose candidate has this share of the KL allowed, over the whole run."""
    ours, theirs, _ = long_run("both light")
    scale = ratio * (1 + MARGIN) * theirs.mean() / ours.mean()
    here = slice(seed * blocks * TOKENS, (seed + 1) * blocks * TOKENS)
    return decide("new", "old", drifted(scale * ours[here]), drifted(theirs[here]), text_of(blocks))


@pytest.mark.parametrize(("ratio", "ruling"), [(0.8, Ruling.ACCEPT), (1.0, Ruling.INCONCLUSIVE), (1.2, Ruling.REJECT)])
def test_less_drift_is_accepted_more_rejected_and_in_between_is_inconclusive(ratio: float, ruling: Ruling) -> None:
    d = ruled(ratio)

    assert d.ruling == ruling
    assert (d.ruling == Ruling.ACCEPT) == (d.excess.high <= 0)
    assert (d.ruling == Ruling.REJECT) == (d.excess.low > 0)
    assert d.blocks == 64
    assert d.excess.value == pytest.approx(d.kl_candidate.value - 1.05 * d.kl_incumbent.value, rel=1e-9)
    assert d.excess.low < d.excess.value < d.excess.high
    assert "new" in d.reason and "old" in d.reason and "\n" not in d.reason


@pytest.mark.parametrize("run", RUNS)
def test_at_the_margin_a_false_ruling_either_way_comes_at_most_once_in_twenty(run: str) -> None:
    ours, theirs, block = long_run(run)
    curve = operating_curve(ours, theirs, block, ratios=(1.0,), blocks_drawn=(16, 32, 64, 128), resamples=RESAMPLES, seed=0)

    for rates in curve:
        assert rates.accept <= 0.05 + BY_CHANCE, rates
        assert rates.reject <= 0.05 + BY_CHANCE, rates


def test_plain_t_bounds_accept_a_candidate_with_the_heavier_tail_too_often() -> None:
    assert plain_accepts("candidate heaviest", 32, RESAMPLES) > 0.05 + BY_CHANCE


def test_the_operating_curve_falls_with_drift_and_steepens_with_blocks() -> None:
    ours, theirs, block = long_run("both light")
    ratios, blocks = (0.8, 0.9, 1.0, 1.1, 1.2), (32, 128)
    curve = operating_curve(ours, theirs, block, ratios=ratios, blocks_drawn=blocks, resamples=RESAMPLES, seed=0)
    few, many = curve[: len(ratios)], curve[len(ratios) :]

    assert [(r.blocks, r.ratio) for r in curve] == [(b, r) for b in blocks for r in ratios]
    for part in (few, many):
        assert [r.accept for r in part] == sorted((r.accept for r in part), reverse=True)
        assert [r.reject for r in part] == sorted(r.reject for r in part)
        assert all(r.accept + r.reject + r.inconclusive == pytest.approx(1) for r in part)
    assert few[1].accept < many[1].accept and few[3].reject < many[3].reject
    assert few[0].accept > 0.95 and many[1].accept > 0.95
    assert operating_curve(ours, theirs, block, ratios=ratios, blocks_drawn=blocks, resamples=RESAMPLES, seed=0) == curve


def test_the_operating_curve_is_that_of_decide() -> None:
    ours, theirs, block = long_run("both light")
    text = text_of(8)
    rng = np.random.default_rng(3)
    drawn = rng.integers(BLOCKS, size=(200, 8))
    scaled = 0.85 * 1.05 * theirs.mean() / ours.mean() * ours
    parts = [[v.reshape(BLOCKS, TOKENS)[row].ravel() for v in (scaled, theirs)] for row in drawn]
    rulings = [decide("new", "old", drifted(a), drifted(b), text).ruling for a, b in parts]
    (rates,) = operating_curve(ours, theirs, block, ratios=(0.85,), blocks_drawn=(8,), resamples=200, seed=3)

    assert rates.accept == rulings.count(Ruling.ACCEPT) / 200
    assert rates.reject == rulings.count(Ruling.REJECT) / 200


@settings(max_examples=60)
@given(seeds, st.integers(LEAST_BLOCKS, 40), st.floats(0, 2))
def test_bounds_hold_the_plain_t_bounds_and_move_with_the_values(seed: int, blocks: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 50, size=blocks).astype(float)
    sums = counts * (rng.lognormal(0, spread, size=blocks) - 1)
    low, high = guarded_bounds(sums, counts, 0.05)
    mean = sums.sum() / counts.sum()
    pulls = (sums - mean * counts) / (counts.sum() - counts)
    effective = counts.sum() ** 2 / (counts**2).sum()
    reach = stats.t.ppf(0.95, max(1, effective - 1)) * math.sqrt((blocks - 1) / blocks * (pulls**2).sum())
    close = pytest.approx

    assert low <= mean - reach + 1e-12 and high >= mean + reach - 1e-12
    assert tuple(map(float, guarded_bounds(3 * sums, counts, 0.05))) == close((3 * low, 3 * high), rel=1e-9, abs=1e-12)
    assert tuple(map(float, guarded_bounds(-sums, counts, 0.05))) == close((-high, -low), rel=1e-9, abs=1e-12)
    moved = guarded_bounds(sums + counts, counts, 0.05)
    assert tuple(map(float, moved)) == close((low + 1, high + 1), rel=1e-6, abs=1e-9)


def test_equal_blocks_leave_no_doubt_and_one_that_stands_out_leaves_much() -> None:
    equal = np.full(20, 3.0)
    assert [float(bound) for bound in guarded_bounds(equal, np.ones(20), 0.05)] == [3.0, 3.0]

    equal[7] = 60.0
    _, high = guarded_bounds(equal, np.ones(20), 0.05)
    assert high - equal.mean() > 2 * stats.t.ppf(0.95, 19) * stats.sem(equal)


@pytest.mark.parametrize("blocks", [LEAST_BLOCKS, 16, 64])
def test_with_the_blocks_it_asks_for_a_copy_of_the_sample_is_told_and_with_fewer_it_is_not(blocks: int) -> None:
    d = ruled(0.97, blocks, seed=1)
    assert d.ruling is Ruling.INCONCLUSIVE
    assert d.blocks_needed is not None and d.blocks_needed > blocks

    # the same mean and spread from many blocks: copies of the sample, whose skewness is as measured and better known
    ours, theirs, _ = long_run("both light")
    here = slice(blocks * TOKENS, 2 * blocks * TOKENS)
    scale = 0.97 * (1 + MARGIN) * theirs.mean() / ours.mean()
    sums, counts = block_sums(scale * ours[here] - (1 + MARGIN) * theirs[here], np.repeat(np.arange(blocks), TOKENS))
    enough = math.ceil(1.5 * d.blocks_needed / blocks)
    low, high = guarded_bounds(np.tile(sums, enough), np.tile(counts, enough), 0.05)
    assert low > 0 or high <= 0
    half = max(1, d.blocks_needed // (2 * blocks))
    low, high = guarded_bounds(np.tile(sums, half), np.tile(counts, half), 0.05)
    assert low <= 0 < high


def test_a_mean_of_exactly_nothing_asks_for_no_number_of_blocks() -> None:
    assert blocks_to_tell(np.array([1.0, -1, 2, -2]), np.ones(4), 0.05) is None


def test_a_number_of_blocks_is_named_only_where_inconclusive() -> None:
    assert ruled(0.8).blocks_needed is None
    assert ruled(1.2).blocks_needed is None
    d = ruled(1.0)
    assert d.blocks_needed is not None and str(d.blocks_needed) in d.reason


@pytest.mark.parametrize("blocks", range(LEAST_BLOCKS))
def test_too_few_blocks_decide_nothing(blocks: int) -> None:
    kl = np.random.default_rng(0).lognormal(size=blocks * 10)
    d = decide("new", "old", drifted(kl / 100), drifted(kl), text_of(blocks, 10))

    assert d.ruling is Ruling.INCONCLUSIVE
    assert (d.excess.low, d.excess.high, d.blocks, d.blocks_needed) == (-math.inf, math.inf, blocks, None)
    assert f"at least {LEAST_BLOCKS}" in d.reason


def test_a_token_that_is_not_finite_where_the_incumbents_is_rejects() -> None:
    ours, theirs, _ = (column[: 64 * TOKENS].copy() for column in long_run("both light"))
    both, mine = 0.5 * ours, 0.5 * ours
    both[5] = theirs[5] = math.nan
    mine[7] = math.nan
    text = text_of(64)

    assert decide("new", "old", drifted(both), drifted(theirs), text).ruling is Ruling.ACCEPT
    assert decide("new", "old", drifted(0.5 * ours), drifted(theirs), text).ruling is Ruling.ACCEPT
    d = decide("new", "old", drifted(mine), drifted(theirs), text)
    assert d.ruling is Ruling.REJECT and d.reason == "new is not finite on 1 token where old is"
    assert math.isfinite(d.excess.high)
    one = decide("new", "old", drifted(mine[:TOKENS]), drifted(theirs[:TOKENS]), text_of(1))
    assert one.ruling is Ruling.REJECT
    nothing = decide("new", "old", drifted(np.full(TOKENS, math.nan)), drifted(ours[:TOKENS]), text_of(1))
    assert nothing.ruling is Ruling.REJECT and nothing.blocks == 0


def test_no_drift_is_no_worse_than_any_and_any_is_worse_than_none() -> None:
    kl = long_run("both light")[0][: 8 * TOKENS]
    nothing, some, text = drifted(0 * kl), drifted(kl), text_of(8)
    neither = decide("new", "old", nothing, nothing, text)

    assert neither.ruling is Ruling.ACCEPT
    assert neither.reason == "new does not drift at all, and neither does old"
    assert astuple(neither.excess) == (0.0, 0.0, 0.0, 0.0)
    assert decide("new", "old", nothing, some, text).ruling is Ruling.ACCEPT
    assert decide("new", "old", nothing, some, text).reason == "new does not drift at all"
    assert decide("new", "old", some, nothing, text).ruling is Ruling.REJECT
    assert decide("new", "old", some, some, text).ruling is Ruling.ACCEPT
    assert decide("new", "old", some, some, text, margin=0.0).ruling is Ruling.ACCEPT  # equal is no worse


@pytest.mark.parametrize("margin", [-0.1, math.nan, math.inf])
def test_a_margin_that_is_none_is_refused(margin: float) -> None:
    kl = drifted(np.ones(40))
    with pytest.raises(CheckpointError, match=f"margin is {margin}, expected 0 or more"):
        decide("new", "old", kl, kl, text_of(4, 10), margin)


def test_a_wider_margin_accepts_what_a_narrower_one_rejects() -> None:
    ours, theirs, _ = long_run("both light")
    a, b, text = drifted(ours[: 64 * TOKENS]), drifted(theirs[: 64 * TOKENS] / 1.5), text_of(64)

    assert decide("new", "old", a, b, text, margin=0.05).ruling is Ruling.REJECT
    assert decide("new", "old", a, b, text, margin=1.0).ruling is Ruling.ACCEPT


def test_divergences_of_another_length_are_refused() -> None:
    a, b = drifted(np.ones(40)), drifted(np.ones(39))
    with pytest.raises(ValueError, match="got 40 and 39 divergences for 40 scored positions"):
        decide("new", "old", a, b, text_of(4, 10))
    with pytest.raises(ValueError, match="drift decision: got"):
        above_floor(a, a, text_of(4, 9))


def test_only_drift_clearly_above_the_floors_is_above_it() -> None:
    floor, other, _ = (column[: 64 * TOKENS] for column in long_run("both light"))
    text = text_of(64)
    not_finite = other.copy()
    not_finite[3] = math.nan

    assert above_floor(drifted(1.5 * other), drifted(floor), text)
    assert not above_floor(drifted(other), drifted(floor), text)
    assert not above_floor(drifted(0.5 * other), drifted(floor), text)
    assert not above_floor(drifted(floor), drifted(floor), text)
    assert above_floor(drifted(not_finite), drifted(floor), text)
    few = slice(0, 3 * TOKENS)
    assert not above_floor(drifted(50 * other[few]), drifted(floor[few]), text_of(3))


def test_the_comparison_is_paired_so_that_what_both_share_does_not_blur_it() -> None:
    shared = np.repeat(np.random.default_rng(0).lognormal(0, 2, size=64), TOKENS)
    slightly = 1.1 * shared

    assert above_floor(drifted(slightly), drifted(shared), text_of(64))
    apart = np.roll(shared, TOKENS)  # the same values, on other blocks
    assert not above_floor(drifted(slightly), drifted(apart), text_of(64))


def test_estimates_of_both_are_those_of_the_tokens_compared() -> None:
    ours, theirs, _ = (column[: 8 * TOKENS].copy() for column in long_run("both light"))
    theirs[::3] = math.nan
    d = decide("new", "old", drifted(ours), drifted(theirs), text_of(8))
    kept = np.isfinite(theirs)

    assert isinstance(d.kl_candidate, Estimate)
    assert d.kl_candidate.value == pytest.approx(ours[kept].mean(), rel=1e-12)
    assert d.kl_incumbent.value == pytest.approx(theirs[kept].mean(), rel=1e-12)
