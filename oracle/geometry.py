"""Batch geometries: how many new tokens and keys each sequence has, dense round the edges of tiles and pages."""

from __future__ import annotations

from collections.abc import Callable

from oracle.streams import Stream

Lengths = tuple[tuple[int, ...], tuple[int, ...]]  # (q_lens, kv_lens)

EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


def _near_edge(stream: Stream, longest: int, page: int, count: int) -> list[int]:
    """`count` lengths in 1..longest, half of them on or beside an edge of a tile or of a page."""
    edges = [n for n in {*EDGES, page - 1, page, page + 1, 2 * page, longest - 1, longest} if 1 <= n <= longest]
    picks = stream.integers(0, len(edges), count).tolist()
    free = stream.integers(1, longest + 1, count).tolist()
    return [sorted(edges)[p] if i % 2 else f for i, (p, f) in enumerate(zip(picks, free, strict=True))]


def _decode(batch: int) -> Callable[[Stream, int, int], Lengths]:
    def lengths(stream: Stream, reach: int, page: int) -> Lengths:
        keys = _near_edge(stream, reach, page, batch)
        keys[:3] = [reach, 1, 2]
        return (1,) * batch, tuple(keys)

    return lengths


def _prefill(stream: Stream, reach: int, page: int) -> Lengths:
    """A whole prompt, no context."""
    n = min(reach, 100 + int(stream.integers(0, 28, 1)))
    return (n,), (n,)


def _prefill_long(stream: Stream, reach: int, page: int) -> Lengths:
    """More than 256 new rows after some context: three tiles of 128."""
    n = 257 + int(stream.integers(0, 32, 1))
    return (n,), (max(reach, n + 40),)


def _speculative(stream: Stream, reach: int, page: int) -> Lengths:
    """Two to eight new tokens a sequence, as a draft model proposes."""
    new = (2, 3, 5, 8)
    return new, tuple(max(n, k) for n, k in zip(new, [reach, *_near_edge(stream, reach, page, 3)], strict=True))


def _mixed(stream: Stream, reach: int, page: int) -> Lengths:
    """Decode rows beside prefill rows, sequences without queries and without keys between them."""
    keys = _near_edge(stream, reach, page, 3)
    return (1, 0, 33, 1, 0, 17, 1, 2), (reach, keys[0], max(33, keys[1]), 0, 0, 17, keys[2], 1)


def _full_tiles(stream: Stream, reach: int, page: int) -> Lengths:
    """Every query tile is full, whatever its size up to 64, behind a context and without one."""
    return (64, 16, 128), (reach, 16, 128)


def _single(stream: Stream, reach: int, page: int) -> Lengths:
    return (1,), (reach,)


def _short_keys(stream: Stream, reach: int, page: int) -> Lengths:
    """More new tokens than keys: the rows before the first key see nothing; and whole sequences within one key tile."""
    return (20, 9, 16, 1), (12, 9, 16, 3)


GEOMETRIES: dict[str, Callable[[Stream, int, int], Lengths]] = {
    "decode-20": _decode(20),
    "decode-70": _decode(70),
    "prefill": _prefill,
    "prefill-257+": _prefill_long,
    "speculative": _speculative,
    "mixed": _mixed,
    "full-tiles": _full_tiles,
    "single": _single,
    "short": _short_keys,
}


def lengths(name: str, *, seed: int, reach: int, page_size: int) -> Lengths:
    """(q_lens, kv_lens) of the geometry called `name`; the longest sequence has about `reach` keys."""
    return GEOMETRIES[name](Stream(seed, f"geometry/{name}"), reach, page_size)


def geometry_of(q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> str:
    """The name of the geometry that has these lengths, in any order of the sequences; "" for none of the table."""
    if set(q_lens) == {1}:
        name = "single" if len(q_lens) == 1 else f"decode-{len(q_lens)}"
        return name if name in GEOMETRIES else ""
    if len(q_lens) == 1:
        return "prefill-257+" if q_lens[0] > 256 else "prefill" if q_lens == kv_lens else ""
    return _BY_LENGTHS.get(tuple(sorted(q_lens)), "")


_BY_LENGTHS = {
    (2, 3, 5, 8): "speculative",
    (0, 0, 1, 1, 1, 2, 17, 33): "mixed",
    (1, 9, 16, 20): "short",
    (16, 64, 128): "full-tiles",
}
