"""Did a quantity move, or did it stay?  Paired log ratios, an interval, and two one-sided tests.

That a difference is not significant does not show that there is none.  So "it stayed" is a finding of its own: that the ratio is
under 1 + margin, and that it is over 1 / (1 + margin), must both be shown, each at 5 % (TOST).  A sentence that joins findings
with "and" needs all of them, so it is said falsely no more often than the one that is false is found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from oracle.checkpoints.clusters import Estimate

LEVEL = 0.05  # of each one-sided test; the interval that goes with both is one of 1 - 2 LEVEL
POWER = 0.8  # with which the number of repeats that is named would decide
MOST = 100_000  # repeats: what takes more is not named


class Ruling(StrEnum):
    """What the pairs show."""

    MOVED = "moved"
    STAYED = "stayed"  # equivalent within the margin
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One quantity, before and after."""

    name: str
    unit: str  # "s" or "bytes"
    before: float  # geometric mean over the repeats
    after: float
    ratio: Estimate  # after over before: geometric mean of the pairs, 95 % t interval of its logarithm
    p_stayed: float  # of the worse of the two one-sided tests
    ruling: Ruling
    repeats_to_decide: int | None  # None where it is decided, or would take more than MOST


def change(
    name: str,
    unit: str,
    before: Sequence[float],
    after: Sequence[float],
    margin: float,
    log_ratios: Sequence[float] | None = None,
) -> Change:
    """What pairs of positive numbers show of a quantity; `log_ratios` is ln(after / before) of each where that is known better.

    It stayed where both one-sided tests at ln(1 + margin) reject at LEVEL; else it moved where the 95 % interval leaves 1 out.
    Raises ValueError for fewer than two pairs or a number that is not positive.
    """
    if len(before) < 2 or len(before) != len(after) or not all(0 < x < math.inf for x in (*before, *after)):
        raise ValueError(f"{name}: {len(before)} and {len(after)} repeats of it; expected two pairs of positive numbers or more")
    logs = np.log(np.array(after) / np.array(before)) if log_ratios is None else np.array(log_ratios)
    limit, mean, sd = math.log1p(margin), float(logs.mean()), float(logs.std(ddof=1))
    half = float(student.ppf(0.975, len(logs) - 1)) * sd / math.sqrt(len(logs))
    p = _p_stayed(logs, limit)
    stayed, moved = p <= LEVEL, abs(mean) > half
    ruling = Ruling.STAYED if stayed else Ruling.MOVED if moved else Ruling.CANNOT_TELL
    return Change(
        name=name,
        unit=unit,
        before=float(np.exp(np.log(before).mean())),
        after=float(np.exp(np.log(after).mean())),
        ratio=Estimate(value=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), se=sd / math.sqrt(len(logs))),
        p_stayed=p,
        ruling=ruling,
        repeats_to_decide=repeats_to_decide(abs(mean), sd, limit) if ruling is Ruling.CANNOT_TELL else None,
    )


def _p_stayed(logs: np.ndarray, limit: float) -> float:
    """The larger p of the two one-sided t tests that the mean of `logs` lies within `limit` of 0."""
    if bool((logs == logs[0]).all()):  # no spread, as bytes have none: t is not defined, and the answer is plain
        return 0.0 if abs(float(logs[0])) < limit else 1.0
    above = float(ttest_1samp(logs, -limit, alternative="greater").pvalue)
    below = float(ttest_1samp(logs, limit, alternative="less").pvalue)
    return max(above, below)


def repeats_to_decide(mean: float, sd: float, limit: float) -> int | None:
    """The least repeats that tell one or the other with POWER or more, if |mean| and spread stay as they are; None over MOST.

    Where the mean is 0, either of the two tests may fail: so each is given half of what POWER leaves.
    """
    n = np.unique(np.concatenate([np.arange(3, 200), np.geomspace(200, MOST, 315).astype(np.int64)]))
    root, power = np.sqrt(n), student.ppf((1 + POWER) / 2, n - 1)
    stays = (student.ppf(1 - LEVEL, n - 1) + power) * sd / root <= limit - mean
    moves = (student.ppf(0.975, n - 1) + power) * sd / root <= mean
    enough = n[stays | moves]
    return int(enough[0]) if len(enough) else None
