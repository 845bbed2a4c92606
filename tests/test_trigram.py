"""The trigram model: the paper's formulas on small texts, one token at a time, and exact normalisation."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

CI = Path(__file__).resolve().parent.parent / "ci"
VOCABULARY = 40


@pytest.fixture(scope="module")
def trigram() -> Iterator[ModuleType]:
    sys.path.insert(0, str(CI))
    yield importlib.import_module("trigram")
    sys.path.remove(str(CI))
    for name in ("trigram", "corpus"):
        del sys.modules[name]


def documents(seed: int) -> list[np.ndarray]:
    """Five documents of 3..39, skewed, so that counts of one, two, three and more occur."""
    generator = np.random.default_rng(seed)
    weights = 1 / np.arange(1, VOCABULARY - 2)
    return [generator.choice(np.arange(3, VOCABULARY), 200, p=weights / weights.sum()).astype(np.int64) for _ in range(5)]


class Naive:
    """Chen and Goodman's equations 24 to 26, by counting in dictionaries."""

    def __init__(self, texts: Sequence[np.ndarray]) -> None:
        padded = [[2, 2, *text.tolist(), 1] for text in texts]
        self.three = Counter(tuple(text[i : i + 3]) for text in padded for i in range(len(text) - 2))
        self.two = Counter(gram[1:] for gram in self.three)
        self.one = Counter(gram[1:] for gram in self.two)

    def probability(self, *gram: int) -> float:
        if not gram[1:]:
            return (self.one[gram] + 1) / (sum(self.one.values()) + VOCABULARY)
        counts = self.three if len(gram) == 3 else self.two
        n = [sum(count == k for count in counts.values()) for k in range(5)]
        y = n[1] / (n[1] + 2 * n[2])
        discount = [0.0, *(k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3))]
        below = self.probability(*gram[1:])
        seen = [count for other, count in counts.items() if other[:-1] == gram[:-1]]
        if not seen:
            return below
        gamma = sum(discount[min(count, 3)] for count in seen) / sum(seen)
        return max(counts[gram] - discount[min(counts[gram], 3)], 0.0) / sum(seen) + gamma * below


@given(seed=st.integers(0, 7), data=st.data())
def test_probabilities_are_those_of_the_papers_equations(trigram: ModuleType, seed: int, data: st.DataObject) -> None:
    texts = documents(seed)
    model, naive = trigram.train(texts, VOCABULARY), Naive(texts)
    gram = data.draw(st.tuples(*[st.integers(0, VOCABULARY - 1)] * 3))

    found = model.probability(*(np.array([token]) for token in gram))[0]

    assert found == pytest.approx(naive.probability(*gram), rel=1e-12)


@given(seed=st.integers(0, 7), first=st.integers(0, VOCABULARY - 1), second=st.integers(0, VOCABULARY - 1))
def test_probabilities_over_the_vocabulary_sum_to_one_in_seen_and_unseen_contexts(
    trigram: ModuleType, seed: int, first: int, second: int
) -> None:
    model = trigram.train(documents(seed), VOCABULARY)
    third = np.arange(VOCABULARY)

    p = model.probability(np.full(VOCABULARY, first), np.full(VOCABULARY, second), third)

    assert p.min() > 0
    assert p.sum() == pytest.approx(1, abs=1e-13)  # some hundred roundings of 1.1e-16


def test_each_token_of_a_document_is_scored_once_with_the_two_before_it(trigram: ModuleType) -> None:
    texts = documents(0)
    model, naive = trigram.train(texts, VOCABULARY), Naive(texts)
    text = [3, 4, 5, 3]

    found = trigram.surprises(model, np.array(text))

    expected = [naive.probability(*gram) for gram in ((2, 2, 3), (2, 3, 4), (3, 4, 5), (4, 5, 3))]
    assert np.exp(-found) == pytest.approx(expected, rel=1e-12)


def test_a_text_that_was_counted_surprises_less_than_its_shuffle(trigram: ModuleType) -> None:
    phrase = np.tile(np.array([3, 4, 5, 6, 7, 8, 9, 10, 11]), 9)
    model = trigram.train([phrase, *documents(1)], VOCABULARY)

    counted = trigram.surprises(model, phrase).mean()

    assert counted < trigram.surprises(model, np.random.default_rng(0).permutation(phrase)).mean()


@pytest.mark.parametrize("counts", [[1, 1, 1, 2, 4], [5, 6, 7], [1, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3]])
def test_counts_that_define_no_discounts_are_refused(trigram: ModuleType, counts: list[int]) -> None:
    with pytest.raises(ValueError, match="counts of counts"):
        trigram.discounts_of(np.array(counts))
