"""Is a configuration's drift no worse than that of one already accepted?  A paired, one-sided test over text blocks.

Both are measured from the same reference on the same tokens, so what is tested is the mean, over tokens, of

    excess = KL(candidate) - (1 + margin) KL(incumbent),

with bounds that keep their promise for skewed blocks (`clusters.guarded_bounds`): the plain t bound accepts up to twice too often
when the candidate's drift has the heavier tail, which is just when it should not (docs/drift.md has the rates).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from oracle.checkpoints.clusters import (
    LEAST_BLOCKS,
    Estimate,
    Floats,
    Integers,
    block_sums,
    blocks_to_tell,
    clustered_mean,
    guarded_bounds,
)
from oracle.checkpoints.divergence import Divergence
from oracle.checkpoints.loading import CheckpointError

if TYPE_CHECKING:
    from oracle.checkpoints.texts import Text

MARGIN = 0.05
TAIL = 0.05  # accepting at the margin, or rejecting there, happens at most this often


class Ruling(StrEnum):
    """What the test says of the candidate."""

    ACCEPT = "accept"
    REJECT = "reject"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A candidate's drift against an incumbent's, on the tokens where both are finite.  KL from the reference, nats."""

    candidate: str  # configuration
    incumbent: str  # configuration
    margin: float  # by how much of the incumbent's drift the candidate's may exceed it
    kl_candidate: Estimate  # mean
    kl_incumbent: Estimate  # mean
    excess: Estimate  # mean of KL(candidate) - (1 + margin) KL(incumbent); low and high are the one-sided 95 % bounds
    ruling: Ruling
    blocks: int  # with a token that is finite in both
    blocks_needed: int | None  # of this kind, for a ruling by what is measured now; only where inconclusive and it can be told
    reason: str  # one sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How often the test rules which way for a candidate whose true drift is known."""

    blocks: int
    ratio: float  # the candidate's true mean KL over (1 + margin) times the incumbent's: 1 = at the margin
    accept: float
    reject: float
    inconclusive: float


def decide(candidate: str, incumbent: str, ours: Divergence, theirs: Divergence, text: Text, margin: float = MARGIN) -> Decision:
    """Whether `candidate`, measured as `ours`, drifts no more than `incumbent`, measured as `theirs` on the same `text`.

    Accept when the upper bound of the excess is at most 0, reject when the lower bound is above 0, else inconclusive.  A token
    that is not finite in the candidate where it is in the incumbent rejects by itself.  Fewer than LEAST_BLOCKS blocks decide
    nothing else.  Raises CheckpointError for a margin that is negative or not finite, ValueError when the lengths differ.
    """
    if not (math.isfinite(margin) and margin >= 0):
        raise CheckpointError(f"drift decision on {candidate}: margin is {margin}, expected 0 or more; 0.05 allows 5 % more")
    kl_ours, kl_theirs, block = _paired(ours, theirs, text)
    broken = int((theirs.finite & ~ours.finite).sum())
    mean_ours, mean_theirs = clustered_mean(kl_ours, block), clustered_mean(kl_theirs, block)
    excess, needed = _excess(kl_ours - (1 + margin) * kl_theirs, block)
    blocks = len(np.unique(block))
    ruling, reason = _ruling(excess, blocks, needed)
    if broken:
        ruling, needed = Ruling.REJECT, None
        reason = f"{candidate} is not finite on {_count(broken, 'token')} where {incumbent} is"
    elif blocks >= LEAST_BLOCKS and not kl_ours.any():
        reason = f"{candidate} does not drift at all" + ("" if kl_theirs.any() else f", and neither does {incumbent}")
    elif blocks >= LEAST_BLOCKS:
        means = f"mean KL {mean_ours.value:.4g} nats of {candidate} against {mean_theirs.value:.4g} of {incumbent}"
        reason = f"{means}, over {blocks} blocks, {100 * margin:g} % more allowed: {reason}"
    return Decision(
        candidate=candidate,
        incumbent=incumbent,
        margin=margin,
        kl_candidate=mean_ours,
        kl_incumbent=mean_theirs,
        excess=excess,
        ruling=ruling,
        blocks=blocks,
        blocks_needed=needed,
        reason=reason,
    )


def above_floor(ours: Divergence, floor: Divergence, text: Text) -> bool:
    """Whether a configuration's mean KL is clearly above that of the floor, a second, equally correct kernel.

    Paired on the same tokens, by block: True where the one-sided 95 % lower bound of the mean difference is above 0, or where the
    configuration is not finite on a token on which the floor is.  Otherwise, and with fewer than LEAST_BLOCKS blocks, the
    configuration is not distinguishable from the floor, or is below it.  Raises ValueError when the lengths differ.
    """
    kl_ours, kl_floor, block = _paired(ours, floor, text)
    difference, _ = _excess(kl_ours - kl_floor, block)
    return difference.low > 0 or bool((floor.finite & ~ours.finite).any())


def operating_curve(
    ours: Floats,
    theirs: Floats,
    block: Integers,
    *,
    ratios: Sequence[float],
    blocks_drawn: Sequence[int],
    resamples: int,
    seed: int,
    margin: float = MARGIN,
) -> tuple[Rates, ...]:
    """How often `decide` rules which way, for each number in `blocks_drawn` and each true ratio in `ratios`.

    A long run, `ours` and `theirs` (N,) with their `block` (N,), both of a positive mean, stands for the truth: blocks are drawn
    from it with replacement, `ours` scaled so that its mean over the whole run is `ratio` (1 + margin) times that of `theirs`.
    """
    sums_ours, counts = block_sums(ours, block)
    sums_theirs, _ = block_sums(theirs, block)
    allowed = (1 + margin) * sums_theirs
    rng = np.random.default_rng(seed)
    result = []
    for drawn_blocks in blocks_drawn:
        drawn = rng.integers(len(counts), size=(resamples, drawn_blocks))
        for ratio in ratios:
            excess = ratio * allowed.sum() / sums_ours.sum() * sums_ours - allowed
            low, high = guarded_bounds(excess[drawn], counts[drawn], TAIL)
            accept, reject = float((high <= 0).mean()), float((low > 0).mean())
            rates = Rates(blocks=drawn_blocks, ratio=ratio, accept=accept, reject=reject, inconclusive=1 - accept - reject)
            result.append(rates)
    return tuple(result)


def _paired(ours: Divergence, theirs: Divergence, text: Text) -> tuple[Floats, Floats, Integers]:
    """KL of both, and the blocks, where both are finite."""
    if not ours.kl.shape == theirs.kl.shape == text.block.shape:
        lengths = f"{len(ours.kl)} and {len(theirs.kl)} divergences for {len(text.block)} scored positions"
        raise ValueError(f"drift decision: got {lengths}, expected as many of each")
    both = ours.finite & theirs.finite
    return ours.kl[both].cpu().numpy(), theirs.kl[both].cpu().numpy(), text.block[both.cpu()].cpu().numpy()


def _excess(values: Floats, block: Integers) -> tuple[Estimate, int | None]:
    """The mean of `values` with its one-sided bounds, and the blocks needed for one of them to lie on 0's other side."""
    mean = clustered_mean(values, block)
    sums, counts = block_sums(values, block)
    if len(sums) < LEAST_BLOCKS:
        return Estimate(value=mean.value, low=-math.inf, high=math.inf, se=mean.se), None
    low, high = (float(bound) for bound in guarded_bounds(sums, counts, TAIL))
    needed = None if low > 0 or high <= 0 else blocks_to_tell(sums, counts, TAIL)
    return Estimate(value=mean.value, low=low, high=high, se=mean.se), needed


def _ruling(excess: Estimate, blocks: int, needed: int | None) -> tuple[Ruling, str]:
    """The ruling on an excess, and what of it rules."""
    if blocks < LEAST_BLOCKS:
        return Ruling.INCONCLUSIVE, f"{_count(blocks, 'block')} with a finite token: at least {LEAST_BLOCKS} are needed to tell"
    if excess.high <= 0:
        return Ruling.ACCEPT, f"the excess is at most {excess.high:.2g}"
    if excess.low > 0:
        return Ruling.REJECT, f"the excess is at least {excess.low:.2g}"
    between = f"the excess lies between {excess.low:.2g} and {excess.high:.2g}"
    return Ruling.INCONCLUSIVE, between if needed is None else f"{between}, about {needed} blocks would tell"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
