"""The figures of one configuration's drift, each with an error bar by text block.  Nats, fp64.

The definitions are those of llama.cpp's perplexity tool with `--kl-divergence` (mean KL, mean and RMS of the change of the true
token's probability, share of same best tokens, both perplexities and their paired ln-ratio, percentiles by linear interpolation),
so that figures can be compared; its error bars count tokens, these count blocks (`clusters`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from oracle.checkpoints.clusters import Estimate as Estimate
from oracle.checkpoints.clusters import Floats, Integers, clustered_mean, clustered_percentiles
from oracle.checkpoints.divergence import Divergence

if TYPE_CHECKING:
    from oracle.checkpoints.texts import Text

KL_POINTS = (50.0, 90.0, 99.0, 99.9)
DP_POINTS = (0.1, 1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)
CONFIDENCE_EDGES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
FIRST_OCTAVE = 64  # positions in the first band; each later band is as long as all before it
WORST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A part of the finite tokens: never empty."""

    label: str
    tokens: int
    kl: Estimate
    agree1: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """A token that drifted far."""

    index: int  # into the scored positions
    kl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one configuration's drift measures.  Tokens that are not finite are counted, and left out of all the rest."""

    tokens: int  # scored, those that are not finite included
    blocks: int  # with a scored token
    not_finite: int  # tokens
    kl: Estimate  # mean KL(reference || candidate)
    kl_reverse: Estimate
    js: Estimate
    kl_percentiles: dict[str, Estimate]  # "50", "90", "99", "99.9"
    kl_max: float  # NaN where no token is finite
    worst: tuple[Worst, ...]  # the ten largest, largest first
    agree1: Estimate  # share of tokens with the same best token
    agree5: Estimate
    perplexity_reference: Estimate  # exp of the mean NLL of the true tokens; interval = exp of that mean's
    perplexity_candidate: Estimate
    ln_ratio: Estimate  # mean of NLL(candidate) - NLL(reference), paired: ln of the ratio of the perplexities
    dp_mean: Estimate  # mean change of the true token's probability, candidate less reference
    dp_rms: Estimate
    dp_percentiles: dict[str, float]  # "0.1" to "99.9"
    by_position: tuple[Band, ...]  # "0-63", "64-127", "128-255", ...
    by_confidence: tuple[Band, ...]  # of the reference's largest probability: "0-0.25" to "0.95-1"
    by_document: tuple[Band, ...]


def figures(d: Divergence, text: Text) -> Figures:
    """The figures of `d`, whose tokens stand in the order of `text`.  Raises ValueError when they are not as many."""
    if d.kl.shape != text.block.shape:
        raise ValueError(f"figures: got {len(d.kl)} divergences, expected one for each of {len(text.block)} scored positions")
    finite = d.finite.cpu().numpy()
    block, document, position = (t.cpu().numpy()[finite] for t in (text.block, text.document, text.position))
    kl, kl_reverse, js, agree1, agree5, nll_reference, nll_candidate, confidence = (
        column.double().cpu().numpy()[finite]
        for column in (d.kl, d.kl_reverse, d.js, d.agree1, d.agree5, d.nll_reference, d.nll_candidate, d.confidence)
    )
    dp = np.exp(-nll_candidate) - np.exp(-nll_reference)
    octave = _octave(position)
    dp_percentiles = np.percentile(dp, DP_POINTS) if len(dp) else np.full(len(DP_POINTS), math.nan)
    return Figures(
        tokens=len(finite),
        blocks=len(np.unique(text.block.cpu().numpy())),
        not_finite=int((~finite).sum()),
        kl=clustered_mean(kl, block),
        kl_reverse=clustered_mean(kl_reverse, block),
        js=clustered_mean(js, block),
        kl_percentiles=dict(zip(map(_name, KL_POINTS), clustered_percentiles(kl, block, KL_POINTS), strict=True)),
        kl_max=float(kl.max()) if len(kl) else math.nan,
        worst=_worst(kl, np.flatnonzero(finite)),
        agree1=clustered_mean(agree1, block),
        agree5=clustered_mean(agree5, block),
        perplexity_reference=_perplexity(nll_reference, block),
        perplexity_candidate=_perplexity(nll_candidate, block),
        ln_ratio=clustered_mean(nll_candidate - nll_reference, block),
        dp_mean=clustered_mean(dp, block),
        dp_rms=_root(clustered_mean(dp**2, block)),
        dp_percentiles={_name(point): float(value) for point, value in zip(DP_POINTS, dp_percentiles, strict=True)},
        by_position=_bands(octave, {i: _octave_label(i) for i in np.unique(octave).tolist()}, kl, agree1, block),
        by_confidence=_bands(_confidence_band(confidence), _CONFIDENCE_LABELS, kl, agree1, block),
        by_document=_bands(document, dict(enumerate(text.documents)), kl, agree1, block),
    )


def _perplexity(nll: Floats, block: Integers) -> Estimate:
    mean = clustered_mean(nll, block)
    return mean.mapped(_exp, _exp(mean.value))


def _exp(x: float) -> float:
    """exp, infinite where it overflows: an upper limit from two blocks may lie anywhere."""
    return math.exp(x) if x < 700 or math.isnan(x) else math.inf


def _root(square: Estimate) -> Estimate:
    """The root of a mean square.  One that is exactly 0 has no slope, but no error either."""
    root = math.sqrt(square.value)
    return square.mapped(lambda x: math.sqrt(max(x, 0.0)), 0.5 / root if root > 0 else 0.0)


def _worst(kl: Floats, index: Integers) -> tuple[Worst, ...]:
    largest = np.argsort(-kl, kind="stable")[:WORST]
    return tuple(Worst(index=int(index[i]), kl=float(kl[i])) for i in largest)


def _octave(position: Integers) -> Integers:
    """0 for positions under FIRST_OCTAVE, then one more with each doubling; exact, as frexp is."""
    exponent = np.frexp(position // (FIRST_OCTAVE // 2))[1].astype(np.int64)
    return np.maximum(exponent - 1, 0)


def _octave_label(octave: int) -> str:
    end = FIRST_OCTAVE << octave
    return f"{end // 2 if octave else 0}-{end - 1}"


_CONFIDENCE_LABELS = {i: f"{low:g}-{high:g}" for i, (low, high) in enumerate(pairwise(CONFIDENCE_EDGES))}


def _confidence_band(confidence: Floats) -> Integers:
    """Bands hold their lower edge; the last holds 1 too."""
    return np.asarray(np.searchsorted(CONFIDENCE_EDGES[1:-1], confidence, side="right"), dtype=np.int64)


def _bands(band: Integers, labels: dict[int, str], kl: Floats, agree1: Floats, block: Integers) -> tuple[Band, ...]:
    """The bands that hold a token, in order."""
    result = []
    for number in np.unique(band).tolist():
        mine = band == number
        kl_mean = clustered_mean(kl[mine], block[mine])
        result.append(Band(label=labels[number], tokens=int(mine.sum()), kl=kl_mean, agree1=float(agree1[mine].mean())))
    return tuple(result)


def _name(point: float) -> str:
    return f"{point:g}"
