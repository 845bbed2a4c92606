"""Long runs of made KL, skewed and alike within blocks as real KL is, and the rates that docs/drift.md quotes of them.

`python tests/skewed_runs.py` prints those rates.  The tests of the error bar and of the decision draw from the same runs.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from scipy.stats import t as student

from oracle.checkpoints.clusters import Floats, Integers, coverage
from oracle.checkpoints.decision import operating_curve

BLOCKS, TOKENS = 4096, 128  # of a long run, and of each of its blocks
RATIOS = (0.8, 0.9, 1.0, 1.1, 1.2)
DRAWN = (8, 16, 32, 64, 128)
SAMPLES = 10_000  # a rate of 0.05 is known to 0.002

# Spread of the logarithm of KL that a configuration has for itself, between blocks and between tokens.  The two also share 0.3
# between blocks and 0.7 between tokens: a token that is hard for one is hard for the other.
LIGHT, HEAVY, HEAVIEST = (0.1, 0.3), (0.4, 1.0), (0.6, 1.3)
RUNS = {
    "both light": (LIGHT, LIGHT),
    "candidate heavy": (HEAVY, LIGHT),
    "incumbent heavy": (LIGHT, HEAVY),
    "both heavy": (HEAVY, HEAVY),
    "candidate heaviest": (HEAVIEST, LIGHT),
}


@cache
def long_run(name: str) -> tuple[Floats, Floats, Integers]:
    """KL of the candidate and of the incumbent, and the block, of each token; all (BLOCKS * TOKENS,)."""
    rng = np.random.default_rng(7)

    def spread(between: float, within: float) -> Floats:
        drawn: Floats = np.exp(between * rng.standard_normal((BLOCKS, 1)) + within * rng.standard_normal((BLOCKS, TOKENS)))
        return drawn

    shared = 0.01 * spread(0.3, 0.7)
    candidate, incumbent = ((shared * spread(*own)).ravel() for own in RUNS[name])
    return candidate, incumbent, np.repeat(np.arange(BLOCKS), TOKENS)


@cache
def mixed_run() -> tuple[Floats, Integers]:
    """KL of a light candidate whose every ninth block is eight times as long as the others, and the block, of each token."""
    rng = np.random.default_rng(8)
    kl = [
        0.01 * np.exp(np.hypot(0.3, LIGHT[0]) * rng.standard_normal() + np.hypot(0.7, LIGHT[1]) * rng.standard_normal(length))
        for length in np.where(np.arange(BLOCKS) % 9 == 8, 8 * TOKENS, TOKENS)
    ]
    return np.concatenate(kl), np.repeat(np.arange(BLOCKS), [len(one) for one in kl])


def plain_accepts(name: str, blocks: int, resamples: int) -> float:
    """How often the upper bound of Student's t would accept a candidate that drifts exactly as much as is allowed."""
    candidate, incumbent, _ = long_run(name)
    excess = (candidate / candidate.mean() - incumbent / incumbent.mean()).reshape(BLOCKS, TOKENS).mean(1)
    drawn = excess[np.random.default_rng(1).integers(BLOCKS, size=(resamples, blocks))]
    upper = drawn.mean(1) + student.ppf(0.95, blocks - 1) * drawn.std(1, ddof=1) / np.sqrt(blocks)
    return float((upper <= 0).mean())


def main() -> None:
    """Print the tables, in Markdown."""
    print(
        "| run | blocks | 95 % interval covers | t accepts at the margin | accepts | rejects |",
        "|---|---|---|---|---|---|",
        sep="\n",
    )
    curves = []
    for name in RUNS:
        candidate, incumbent, block = long_run(name)
        curve = operating_curve(candidate, incumbent, block, ratios=RATIOS, blocks_drawn=DRAWN, resamples=SAMPLES, seed=1)
        curves.append((name, curve))
        for rates in curve:
            if rates.ratio == 1:
                covered, plain = coverage(candidate, block, rates.blocks, SAMPLES, 1), plain_accepts(name, rates.blocks, SAMPLES)
                print(f"| {name} | {rates.blocks} | {covered:.3f} | {plain:.3f} | {rates.accept:.3f} | {rates.reject:.3f} |")
    print("\n| run | blocks |", *(f" {ratio:g} |" for ratio in RATIOS), "\n|---|---|", "---|" * len(RATIOS), sep="")
    for name, curve in curves:
        for blocks in DRAWN:
            cells = (f" {rates.accept:.2f} / {rates.reject:.2f} |" for rates in curve if rates.blocks == blocks)
            print(f"| {name} | {blocks} |", *cells, sep="")
    covered = coverage(*mixed_run(), 72, SAMPLES, 1)
    print(f"\nOf 72 blocks, one in nine eight times as long as the others, the 95 % interval covers in {covered:.3f}.")


if __name__ == "__main__":
    main()
