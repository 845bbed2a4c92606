"""Error bars of figures over text blocks.  Tokens of one block resemble each other, so blocks are what is counted, not tokens.

The mean over tokens is a ratio of two sums over G blocks, m = sum(S_g) / N, N = sum(n_g), with S_g the sum of a block's values
and n_g its tokens.  Its standard error is that of the delete-one-block jackknife, with residuals u_g = S_g - m n_g

    se^2 = (G - 1) / G sum(v_g^2),  v_g = u_g / (N - n_g) = m less m without block g,    interval m -+ t se.

For blocks of one length this is CR1, G / (G - 1) sum(u_g^2) / N^2, the usual cluster-robust error; for unequal ones, where CR1 is
too small, it is CR3 (Cameron and Miller 2015, "A practitioner's guide to cluster-robust inference", J. Human Resources 50(2),
sections II and VI).  t is Student's with max(1, G* - 1) degrees of freedom, G* = N^2 / sum(n_g^2) <= G the effective number of
blocks (Kish 1965): G - 1 for equal blocks.

The interval is symmetric.  Two-sided it covers what it says; one-sided it does not where blocks are skewed, as KL is: with a
heavy right tail most samples miss the tail, and take both the mean and its error for too small.  `guarded_bounds` is for
decisions.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

LEAST_BLOCKS = 4  # with one of them left out, three are the fewest whose skewness is not 0 by necessity
SKEW_ERRORS = 2.0  # standard errors by which the skewness may be worse than measured (docs/drift.md has the rates)
MOST_BLOCKS = 1 << 32  # a mean that takes more to tell from 0 is 0, as far as anyone will know
RESAMPLES = 1000  # of blocks, for percentiles
_STEEPEST = 1.0  # skewness over sqrt(blocks): no sample goes beyond
_STEPS = np.linspace(0, 1, 65)[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure with its error bar by text block.

    One block says nothing about the next: from one, `se` is infinite and the interval is everything.  From none, `value` is NaN.
    """

    value: float
    low: float  # 95 % interval, two-sided (except where its owner says otherwise)
    high: float
    se: float  # standard error

    def mapped(self, function: Callable[[float], float], slope: float) -> Estimate:
        """The estimate of an increasing `function` of this figure, its slope at `value` given (delta method)."""
        se = abs(slope) * self.se if math.isfinite(self.se) else math.inf
        return Estimate(value=function(self.value), low=function(self.low), high=function(self.high), se=se)


def block_sums(values: Floats, block: Integers) -> tuple[Floats, Floats]:
    """For each block that occurs, in ascending order, the sum of its `values` and its number of tokens; both (blocks,)."""
    _, which = np.unique(block, return_inverse=True)
    return np.bincount(which, weights=values).astype(np.float64), np.bincount(which).astype(np.float64)


def clustered_mean(values: Floats, block: Integers) -> Estimate:
    """The mean of `values` (N,) with its 95 % interval, clustered by `block` (N,)."""
    sums, counts = block_sums(values, block)
    if len(sums) < 2:
        only = float(sums[0] / counts[0]) if len(sums) else math.nan
        return Estimate(value=only, low=-math.inf, high=math.inf, se=math.inf)
    value, se, _ = _ratio(sums, counts)
    reach = se * _quantile(0.025, _effective(counts))
    return Estimate(value=float(value), low=float(value - reach), high=float(value + reach), se=float(se))


def guarded_bounds(sums: Floats, counts: Floats, tail: float) -> tuple[Floats, Floats]:
    """Lower and upper bound of the mean, each meant to be missed in at most the share `tail` of samples; both (...,).

    `sums` and `counts` (..., blocks) are as `block_sums` gives them, at least LEAST_BLOCKS of them; leading axes are samples.
    docs/drift.md has the rates measured on skewed blocks.

    Hall's cubic transformation takes the skewness g of the blocks out of a studentised mean T (P. Hall 1992, "On the removal of
    skewness by transformation", J. R. Statist. Soc. B 54): with k = g / sqrt(G),  T + k T^2 / 3 + k^2 T^3 / 27 + k / 6  is nearer
    to Student's t than T is, and its inverse at -t gives the upper bound.  A sample that misses the tail also takes g for too
    small, so g is not taken as measured: the bound is the farthest that any skewness gives from 0 (the plain bound of t) to
    SKEW_ERRORS jackknife standard errors beyond g.
    """
    blocks = sums.shape[-1]
    value, se, influence = _ratio(sums, counts)
    skew, error = _skewness(influence)
    quantile = _quantile(tail, _effective(counts))
    low = value - se * _guarded_quantile(quantile, SKEW_ERRORS * error - skew, blocks)
    high = value + se * _guarded_quantile(quantile, SKEW_ERRORS * error + skew, blocks)
    return low, high


def blocks_to_tell(sums: Floats, counts: Floats, tail: float) -> int | None:
    """How many blocks would put one of the `guarded_bounds` on the mean's own side of 0.

    `sums` and `counts` (blocks,) are a sample whose bounds lie on both sides.  Mean, spread and skewness are taken to stay as
    they are; the standard error, and the jackknife's, shrink with the root of the number of blocks.  None where the mean is 0,
    or more than MOST_BLOCKS would be needed.
    """
    value, se, influence = _ratio(sums, counts)
    skew, error = _skewness(influence)
    toward = -np.sign(value) * skew  # a mean below 0 is told by its upper bound

    def tells(blocks: int) -> bool:
        times = blocks / len(sums)
        quantile = _quantile(tail, times * _effective(counts))
        worst = toward + SKEW_ERRORS * error / math.sqrt(times)
        return bool(se / math.sqrt(times) * _guarded_quantile(quantile, worst, blocks) < abs(value))

    if not tells(MOST_BLOCKS):
        return None
    return len(sums) + bisect_left(range(len(sums), MOST_BLOCKS), True, key=tells)


def clustered_percentiles(values: Floats, block: Integers, points: Sequence[float], seed: int = 0) -> list[Estimate]:
    """The percentiles of `values` (N,) at `points` (0 to 100), each with its 95 % interval from a bootstrap over blocks.

    A percentile lies at p (n - 1) in the sorted values, counted from 0, and between two of them linearly (numpy's default, and
    that of llama.cpp's perplexity tool).  Whole blocks are drawn with replacement, RESAMPLES times, the same draws for the same
    seed; the interval is the middle 95 % of what the samples give (Efron's percentile interval), `se` their standard deviation.
    """
    names, which = np.unique(block, return_inverse=True)
    if not len(names):
        return [Estimate(value=math.nan, low=-math.inf, high=math.inf, se=math.inf) for _ in points]
    order = np.argsort(values, kind="stable")
    values, which = values[order], which[order]
    whole = _weighted_percentiles(values, np.ones(len(values), dtype=np.int64), points)
    if len(names) < 2:
        return [Estimate(value=float(value), low=-math.inf, high=math.inf, se=math.inf) for value in whole]
    draws = np.random.default_rng(seed).multinomial(len(names), np.full(len(names), 1 / len(names)), size=RESAMPLES)
    drawn = np.array([_weighted_percentiles(values, draw[which], points) for draw in draws])
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    se = drawn.std(axis=0, ddof=1)
    return [Estimate(value=float(whole[i]), low=float(low[i]), high=float(high[i]), se=float(se[i])) for i in range(len(points))]


def coverage(values: Floats, block: Integers, blocks_drawn: int, resamples: int, seed: int) -> float:
    """Share of `resamples` samples of `blocks_drawn` blocks, at least 2, whose 95 % interval holds the mean of the long run.

    The long run is `values` (N,) with their `block` (N,); blocks are drawn from it with replacement.  An honest bar gives 0.95.
    """
    sums, counts = block_sums(values, block)
    drawn = np.random.default_rng(seed).integers(len(sums), size=(resamples, blocks_drawn))
    value, se, _ = _ratio(sums[drawn], counts[drawn])
    reach = se * _quantile(0.025, _effective(counts[drawn]))
    return float((np.abs(value - sums.sum() / counts.sum()) <= reach).mean())


def _ratio(sums: Floats, counts: Floats) -> tuple[Floats, Floats, Floats]:
    """Mean (...,), its standard error (...,), and each block's pull on it (..., blocks), of samples of at least two blocks."""
    blocks, tokens = sums.shape[-1], counts.sum(-1, keepdims=True)
    value = sums.sum(-1, keepdims=True) / tokens
    influence = (sums - value * counts) / (tokens - counts)
    se = np.sqrt((blocks - 1) / blocks * np.square(influence).sum(-1))
    return value[..., 0], se, influence


def _effective(counts: Floats) -> Floats:
    """Effective number of blocks (...,)."""
    return np.asarray(counts.sum(-1) ** 2 / np.square(counts).sum(-1), dtype=np.float64)


def _quantile(tail: float, effective: Floats) -> Floats:
    """Student's t beyond which lies `tail`, for that many effective blocks."""
    return np.asarray(student.ppf(1 - tail, np.maximum(effective - 1, 1)), dtype=np.float64)


def _guarded_quantile(quantile: Floats, skew: Floats, blocks: int) -> Floats:
    """Standard errors to the far side of the tail: the most that Hall's inverse gives for a skewness from 0 to `skew` (...,)."""
    k = np.clip(skew / math.sqrt(blocks), 1e-9, _STEEPEST)[..., None] * _STEPS
    inverse = 3 / k * (1 - np.cbrt(1 - k * (quantile[..., None] + k / 6)))
    return np.asarray(np.maximum(inverse.max(-1), quantile), dtype=np.float64)


def _skewness(u: Floats) -> tuple[Floats, Floats]:
    """Skewness of `u` (..., blocks) and its jackknife standard error, both (...,); the skewness of equal values is 0."""
    blocks = u.shape[-1]
    largest = np.abs(u).max(-1, keepdims=True)
    u = u / np.where(largest > 0, largest, 1)  # so that cubes of small numbers do not underflow
    powers = [u**i for i in (1, 2, 3)]
    skew = _skewness_of(*(power.mean(-1) for power in powers))
    without = _skewness_of(*((power.sum(-1, keepdims=True) - power) / (blocks - 1) for power in powers))
    error = np.sqrt((blocks - 1) * without.var(-1))
    return skew, error


def _skewness_of(first: Floats, second: Floats, third: Floats) -> Floats:
    """Skewness from the means of the first three powers."""
    variance = second - first**2
    spread = variance > 1e-12 * second  # below that it is what rounding left
    cubed = third - 3 * first * second + 2 * first**3
    return np.asarray(np.where(spread, cubed / np.where(spread, variance, 1) ** 1.5, 0.0), dtype=np.float64)


def _weighted_percentiles(ascending: Floats, weights: Integers, points: Sequence[float]) -> Floats:
    """Percentiles (points,) of the sample that holds each of the `ascending` values as often as its weight says."""
    upto = np.cumsum(weights)
    place = np.array(points) / 100 * (upto[-1] - 1)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, upto[-1] - 1)
    lower, upper = (ascending[np.searchsorted(upto, at, side="right")] for at in (below, above))
    return np.asarray(lower + (place - below) * (upper - lower), dtype=np.float64)
