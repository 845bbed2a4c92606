"""Batch lengths that relations start from: every sequence has a key, and no query stands before the first one."""

from __future__ import annotations

from oracle.contract import Record
from oracle.geometry import Lengths
from oracle.streams import Stream

SHORT, LONG = (20, 70), (150, 280)  # keys of one tile, or a little more, and of several
ROWS = 64  # where kernels commonly change from one tile to another: 63, 64 and 65 rows are always compared


def _some(stream: Stream, low: int, high: int, count: int = 1) -> list[int]:
    """`count` numbers from `low` to `high`, both included."""
    return [int(n) for n in stream.integers(low, high + 1, count)]


def mixed(stream: Stream, page: int, record: Record) -> list[Lengths]:
    """Decode beside short prefills, of few keys and then of several tiles, which alone show how they are split."""
    return [((1, 3, 5), tuple(_some(stream, low, high, 3))) for low, high in (SHORT, LONG)]


def short_prompt(stream: Stream, page: int, record: Record) -> list[Lengths]:
    """Whole prompts: their first rows see few keys."""
    return [((n, 1), (n, n + 1)) for n in _some(stream, 6, 12, 2)]


def prompt(stream: Stream, page: int, record: Record) -> list[Lengths]:
    """A whole prompt of more than a page; then three rows on and beside every declared threshold of keys."""
    batches: list[Lengths] = [((n,), (n,)) for n in _some(stream, 18, 40, 2)]
    return batches + [((3,), (t + 1,)) for t in record.thresholds if t > 1]


def decode(stream: Stream, page: int, record: Record) -> list[Lengths]:
    """One new token a sequence."""
    return [((1,) * 4, tuple(_some(stream, 12, 70, 4))) for _ in range(2)]


def two_pages(stream: Stream, page: int, record: Record) -> list[Lengths]:
    """Two sequences of at least one full page."""
    return [((2, 3), (page + more, page + 1)) for more in _some(stream, 3, 30, 2)]


def prefixed(stream: Stream, page: int, record: Record) -> list[Lengths]:
    """Three sequences of at least two full pages."""
    return [((2, 1, 3), (2 * page, 2 * page + more, 2 * page + 3)) for more in _some(stream, 1, 20, 2)]


def alike(stream: Stream, page: int, record: Record) -> list[Lengths]:
    """Four sequences of equal lengths, so that any may stand in another's place, of few keys and then of several tiles."""
    return [((3,) * 4, tuple(_some(stream, low, high)) * 4) for low, high in (SHORT, LONG)]


def company(stream: Stream, page: int, record: Record) -> list[Lengths]:
    """A long decode step and a short one among prefills."""
    return [((1, 4, 1, 9), (long, 20, 5, 33)) for long in _some(stream, *LONG, 2)]


def many_rows(stream: Stream, page: int, record: Record) -> list[Lengths]:
    """A decode batch of one sequence more than ROWS + 1, and than each declared threshold + 1; up to eight are of several tiles.

    Of two such sequences with one head, tiles of 64 and of 128 keys gave the same bits with two seeds of twelve; of eight, never.
    """
    batches: list[Lengths] = []
    for n in (ROWS + 2, *(t + 2 for t in record.thresholds)):
        several = max(2, min(8, n // 4))
        batches.append(((1,) * n, (200, 130, *_some(stream, *LONG, several - 2), *_some(stream, 2, 20, n - several))))
    return batches


def one_long(stream: Stream, page: int, record: Record) -> list[Lengths]:
    """A decode step of about a thousand keys among short ones."""
    return [((1,) * 9, (long, *_some(stream, 3, 20, 8))) for long in _some(stream, 1000, 1400, 1)]
