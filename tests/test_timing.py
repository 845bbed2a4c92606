"""What is compared takes turns, and its ratio has an interval that holds the truth."""

from __future__ import annotations

import numpy as np
import pytest

from oracle import timing
from oracle.rates import cache_bytes, copies, products
from oracle.timing import LEAST_ROUNDS, block_s, each_call_s, in_turns, median_of, ratio_of, waited_s


class Counter:
    """Work that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def test_every_call_is_timed_and_made_once() -> None:
    work = Counter()

    times = each_call_s(work, 7, "cpu")

    assert work.calls == len(times) == 7 and min(times) >= 0
    assert waited_s(work, "cpu") >= 0 and work.calls == 8


def test_a_block_is_its_median_call_without_its_first_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "each_call_s", lambda work, calls, device: [100.0, 90.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    assert block_s(Counter(), 8, "cpu") == 3.5


def test_rounds_take_turns_and_every_second_one_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    names: dict[timing.Work, str] = {}

    def told(work: timing.Work, calls: int, device: str) -> float:
        order.append(names[work])
        return 1.0

    monkeypatch.setattr(timing, "block_s", told)
    works = {"a": Counter(), "b": Counter(), "c": Counter()}
    names |= {work: name for name, work in works.items()}

    found = in_turns(works, 3, 0.01, "cpu", lambda done, total: None)

    assert order == [*"abc", *"abc", *"cba", *"abc"]  # the first three warm up
    assert {name: len(times) for name, times in found.items()} == {"a": 3, "b": 3, "c": 3}


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    """1000 samples of 12: 0.95 is known to 0.014 at two standard errors."""
    random = np.random.default_rng(0)
    samples = random.lognormal(0.0, 0.3, (200, 12))
    held = [e.low <= 1.0 <= e.high for e in map(median_of, samples.tolist())]

    assert np.mean(held) > 0.90


def test_a_ratio_is_taken_round_by_round() -> None:
    """The machine is twice as slow in every second round: that cancels, and the ratio of medians would not be as sure."""
    slow = np.array([1.0, 2.0] * 5)
    found = ratio_of(list(3.0 * slow), list(slow))

    assert (found.value, found.low, found.high) == (3.0, 3.0, 3.0)


def test_few_rounds_have_no_interval() -> None:
    with pytest.raises(ValueError, match="5 values; expected 6 or more"):
        median_of([1.0] * (LEAST_ROUNDS - 1))


def test_ceilings_do_what_they_say() -> None:
    import torch

    product, copy = products(torch.float32, "cpu"), copies("cpu")

    assert product.amount == 2.0 * 1024**3
    assert copy.amount >= 8 * cache_bytes("cpu")[0] > 0
    copied = copy.work()
    assert isinstance(copied, torch.Tensor) and bool((copied[:4096] != 0).any())
