"""What a trigram model makes of the held-out documents: the yardstick of the small Gemma 4.

    python ci/trigram.py

counts the training documents, prints the perplexity on the held-out ones, and writes it to checkpoints/gemma4-mini/trigram.json.

The model is modified Kneser-Ney, interpolated (Chen and Goodman, "An empirical study of smoothing techniques for language
modeling", 1999, section 3): three discounts an order, from the counts of counts.  Trigrams are counted as they occur, bigrams and
unigrams by how many different tokens they follow.  Unigrams are smoothed by adding one.  A document is <bos> <bos> text <eos>:
<bos> is never predicted, <eos> is not scored.  Perplexity is exp of the mean of -ln p over all tokens of all documents.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from corpus import BOS, EOS, MODEL, VOCABULARY, encode, heldout_texts, training_texts
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Shares = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One order of the model.  An n-gram's key is its tokens as digits of base V, its context's the same without the last."""

    keys: Ids  # (N,) ascending
    kept: Shares  # (N,) what the discount leaves: (count - discount) / count of the context
    contexts: Ids  # (M,) ascending
    backoff: Shares  # (M,) what the discounts take from a context: the weight of the order below
    discounts: tuple[float, float, float]  # of counts 1, 2, and 3 or more


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigram:
    """A trigram model over a vocabulary of V tokens."""

    unigram: Shares  # (V,) probabilities
    bigram: Order
    trigram: Order

    def probability(self, first: Ids, second: Ids, third: Ids) -> Shares:
        """p(third | first second), float64, for arrays of token ids of one shape (N,)."""
        base = len(self.unigram)
        context = second
        p = _interpolated(self.bigram, context, context * base + third, self.unigram[third])
        context = first * base + second
        return _interpolated(self.trigram, context, context * base + third, p)


def discounts_of(counts: Ids) -> tuple[float, float, float]:
    """D1, D2, D3+ from how many n-grams have count 1, 2, 3, 4 (equation 26 of the paper).  Raises ValueError where undefined."""
    n = np.bincount(np.minimum(counts, 5), minlength=6)[1:5].tolist()
    if 0 in n[:3]:
        raise ValueError(f"discounts: counts of counts 1 to 4 are {n}, expected the first three above 0; count a longer text")
    y = n[0] / (n[0] + 2 * n[1])
    found = (1 - 2 * y * n[1] / n[0], 2 - 3 * y * n[2] / n[1], 3 - 4 * y * n[3] / n[2])
    if min(found) < 0:
        raise ValueError(f"discounts: counts of counts 1 to 4 are {n}, which makes a negative one; count a longer text")
    return found


def order_of(keys: Ids, counts: Ids, base: int) -> Order:
    """The order whose n-grams are `keys` (N,), distinct and ascending, with `counts` (N,), at least 1; `base` is V."""
    discounts = discounts_of(counts)
    taken = np.array((0.0, *discounts))[np.minimum(counts, 3)]
    contexts, group = np.unique(keys // base, return_inverse=True)
    total = np.bincount(group, weights=counts)
    return Order(
        keys=keys,
        kept=(counts - taken) / total[group],
        contexts=contexts,
        backoff=np.bincount(group, weights=taken) / total,
        discounts=discounts,
    )


def train(documents: Sequence[Ids], vocabulary: int) -> Trigram:
    """The model of `documents`, token ids without <bos> and <eos>, over tokens below `vocabulary`."""
    padded = [np.concatenate(([BOS, BOS], ids, [EOS])).astype(np.int64) for ids in documents]
    events = [(ids[:-2] * vocabulary + ids[1:-1]) * vocabulary + ids[2:] for ids in padded]
    keys, counts = np.unique(np.concatenate(events), return_counts=True)
    pairs, followed = np.unique(keys % vocabulary**2, return_counts=True)
    continued = np.bincount(pairs % vocabulary, minlength=vocabulary) + 1
    return Trigram(
        unigram=continued / continued.sum(),
        bigram=order_of(pairs, followed, vocabulary),
        trigram=order_of(keys, counts, vocabulary),
    )


def surprises(model: Trigram, ids: Ids) -> Shares:
    """-ln p, in nats, of each token of a document (N,), given without <bos> and <eos>."""
    padded = np.concatenate(([BOS, BOS], ids)).astype(np.int64)
    return -np.log(model.probability(padded[:-2], padded[1:-1], padded[2:]))


def _interpolated(order: Order, context: Ids, key: Ids, below: Shares) -> Shares:
    """What the order keeps for each key plus the backoff of its context times `below`; a context never seen passes `below` on."""
    return _find(order.keys, order.kept, key, 0.0) + _find(order.contexts, order.backoff, context, 1.0) * below


def _find(keys: Ids, values: Shares, wanted: Ids, absent: float) -> Shares:
    """The value of each wanted key, `absent` where it has none."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], absent)


def main() -> None:
    """Trains, scores, prints and writes."""
    heldout = heldout_texts()
    model = train([ids[1:].astype(np.int64) for ids in encode(training_texts())], VOCABULARY)
    scored = np.concatenate([surprises(model, ids[1:].astype(np.int64)) for ids in encode(list(heldout.values()))])
    found = {
        "perplexity": float(np.exp(scored.mean())),
        "tokens": len(scored),
        "bits_per_byte": float(scored.sum() / np.log(2) / sum(len(text.encode()) for text in heldout.values())),
        "trigrams": len(model.trigram.keys),
        "bigrams": len(model.bigram.keys),
        "discounts": {"bigram": model.bigram.discounts, "trigram": model.trigram.discounts},
    }
    (MODEL / "trigram.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
