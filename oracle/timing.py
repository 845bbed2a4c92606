"""Work timed in turns on one device: CUDA events or the wall clock, blocks of calls, and what pairs of blocks say.

A rate by itself moves with the machine: a GPU lowers its clock when it runs hot, a CPU has other users.  So everything that is
compared takes turns in one process, a block of each in every round, and what counts is the ratio within a round.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from scipy.stats import bootstrap

from oracle.checkpoints.clusters import Estimate

Work = Callable[[], object]
Told = Callable[[int, int], None]  # rounds done, and in all

LEAST_ROUNDS = 6  # the range of n values holds the median of their distribution with 1 - 2^(1 - n): 0.95 needs 6
RESAMPLES = 9999


def each_call_s(work: Work, calls: int, device: str) -> list[float]:
    """Seconds of each of `calls` calls in a row, none waited for before the next where the device is CUDA."""
    if device == "cpu":
        marks = [time.perf_counter()]
        for _ in range(calls):
            work()
            marks.append(time.perf_counter())
        return [two - one for one, two in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [float(one.elapsed_time(two)) / 1000 for one, two in itertools.pairwise(events)]


def block_s(work: Work, calls: int, device: str) -> float:
    """Seconds of the median call of a block, the first quarter of its calls left out: the clock settles in it."""
    return statistics.median(each_call_s(work, calls, device)[calls // 4 :])


def waited_s(work: Work, device: str) -> float:
    """Seconds by the wall of one call with its result waited for: what a first call costs, compiling included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turns(works: Mapping[str, Work], rounds: int, seconds: float, device: str, told: Told) -> dict[str, tuple[float, ...]]:
    """Name -> seconds of a call in each of `rounds` rounds, after a short block of each that warms it up.

    A round has a block of about `seconds` of every work, in the order named, the next round in the reverse order: what one leaves
    behind, a hot chip or a cold cache, falls on each of two neighbours alike.
    """
    calls = {name: max(3, math.ceil(seconds / block_s(work, 3, device))) for name, work in works.items()}
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds):
        for name in list(works) if number % 2 == 0 else reversed(list(works)):
            found[name].append(block_s(works[name], calls[name], device))
        told(number + 1, rounds)
    return {name: tuple(times) for name, times in found.items()}


def median_of(values: Sequence[float]) -> Estimate:
    """The median of values that were drawn alike, with a 95 % bootstrap interval (percentiles of resamples, the same each time).

    Raises ValueError for fewer than LEAST_ROUNDS values, whose range does not hold the median as often as that says.
    """
    if len(values) < LEAST_ROUNDS:
        raise ValueError(f"{len(values)} values; expected {LEAST_ROUNDS} or more for a 95 % interval of their median")
    found = bootstrap((np.array(values),), np.median, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0))
    low, high = found.confidence_interval
    return Estimate(value=statistics.median(values), low=float(low), high=float(high), se=float(found.standard_error))


def ratio_of(one: Sequence[float], other: Sequence[float]) -> Estimate:
    """The median of one over the other, round by round, as `median_of` gives it."""
    return median_of([a / b for a, b in zip(one, other, strict=True)])
