"""Hypothesis strategy for whole cases: every call that a kernel's scope allows, small ones first.

    @given(cases(scope))
    def test_my_kernel(case): ...

Hypothesis draws whole numbers and picks from lists, the simplest value first; all tensors follow from the case's seed.  So
shrinking ends at one sequence of one token with every option off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from hypothesis import assume
from hypothesis import strategies as st

from oracle.cases import LAYOUTS, SCALES, SINKS, Case
from oracle.families import Family
from oracle.inputs import PROMISED_CLASSES
from oracle.pairs import FACTORS
from oracle.scope import Scope

MOST_SEQS = 5  # drawn one by one; a batch may hold several copies of them
COPIES = (1, 1, 1, 1, 1, 3, 1, 16)
TILES = (16, 32, 48, 64, 96, 128, 192, 256, 320, 512)  # whole tiles of 16 to 128 tokens, and of four splits of them
LONGEST = 640  # keys of one sequence
MOST_QUERIES = 160  # of one sequence
MOST_HEADS = 24  # query heads
MOST_WORK = 1e7  # query-key pairs times query heads times dims of one case: with the next three, about 0.2 s for a trial
MOST_ROWS = 5e5  # query rows times query heads times dims
MOST_POOL = 1e6  # live elements of one case's page pool
MOST_PAGE = 1 << 18  # elements of one page, K and V
ROWS = 128  # rows judged of a case that has more than a trial judges by itself
WINDOWS = (-1, 0, 1, 2, 7, 15, 16, 20, 31, 63, 64, 127)  # keys to the left, besides a page's edge; -1 = no limit
RIGHTS = (-1, 0, 1, 10)
SOFTCAPS = (0.0, 50.0, 30.0, 5.0)
TAILS = (0, 1, 3, 70)  # rows of q past the plan: none, few, more than a tile of 64

T = TypeVar("T")


def one_first(high: int) -> st.SearchStrategy[int]:
    """0..high, shrinking towards 1: an empty sequence is a stranger example than one token."""
    return st.integers(0, high).map(lambda n: 1 - n if n < 2 else n)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """What a case is made of, in elements: it says how many sequences a case may have, and how long they may be."""

    per_key: int  # of the pool, K and V, with as much again that nobody owns
    page_size: int
    per_row: int  # of q and of the output

    def afforded(self, lengths: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(q_lens, kv_lens): as many sequences as a case may have, each cut to an equal share of what it may cost."""
        most_rows = max(1, int(MOST_ROWS / self.per_row))
        lengths = lengths[: max(1, min(most_rows, int(MOST_POOL / (self.per_key * self.page_size))))]
        most_keys = max(2, int(MOST_POOL / self.per_key / len(lengths)))
        kv_lens = tuple(min(kv, most_keys) for _, kv in lengths)
        most_pairs = MOST_WORK / self.per_row / len(lengths)
        cuts = (max(1, min(most_rows // len(lengths), int(most_pairs / max(1, kv)))) for kv in kv_lens)
        return tuple(min(q, cut) for (q, _), cut in zip(lengths, cuts, strict=True)), kv_lens


@cache
def _edges(page_size: int, left: int, longest: int) -> st.SearchStrategy[int]:
    """Lengths 1..longest on an edge of a tile, a page, a split or a window with `left` keys, or one beside it."""
    whole = {*TILES, *(page_size * pages for pages in (1, 2, 3, 4)), left + 1}
    return st.sampled_from(sorted(n for n in {w + d for w in whole for d in (-1, 0, 1)} if 1 <= n <= longest))


@cache
def _whole_pages(page_size: int) -> st.SearchStrategy[int]:
    return st.integers(1, 4).map(lambda pages: pages * page_size)


_FEW, _ANY, _BESIDE, _CHOICE = one_first(4), st.integers(1, LONGEST), st.integers(-1, 8), st.integers(0, 3)


@st.composite
def _sequence(draw: st.DrawFn, page_size: int, left: int) -> tuple[int, int]:
    """(q_len, kv_len): none, few, on or beside an edge, whole pages, or any; a whole prompt and more queries than keys too."""
    kv_len = draw((_FEW, _edges(page_size, left, LONGEST), _whole_pages(page_size), _ANY)[draw(_CHOICE)])
    kind = draw(_CHOICE)
    if kind == 3:
        return min(MOST_QUERIES, max(0, kv_len + draw(_BESIDE))), kv_len
    return draw(_edges(page_size, left, MOST_QUERIES) if kind == 2 else _FEW), kv_len


def _window(page_size: int) -> st.SearchStrategy[tuple[int, int]]:
    """(left, right) keys of a window, -1 = no limit; on or beside an edge of a page or a tile."""
    lefts = sorted({*WINDOWS, page_size - 1, page_size})
    return st.tuples(st.sampled_from(lefts), st.sampled_from(RIGHTS))


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> Case:
    """A case that `scope` does not refuse, named "drawn"; captured inputs are left out.

    Every part of it that the kernel takes varies: lengths, page size, layout, heads, head dims, formats, mask, softcap, sinks,
    scales, input class, what lies past the plan.
    """
    takes, record = scope.parameters, scope.record

    def pick(values: Sequence[T]) -> T:
        return draw(st.sampled_from(values))

    def option(parameter: str, values: Sequence[T]) -> T:
        return pick(values) if parameter in takes else values[0]

    dims = pick(sorted(scope.dims, key=sum))
    page_size = pick(sorted(record.page_sizes, key=lambda size: (abs(size - 16), size)))
    group = pick(sorted(record.groups or FACTORS["group"]))
    per_head = sum(dims)
    kv_heads = min(pick(FACTORS["kv_heads"]), max(1, MOST_HEADS // group), max(1, MOST_PAGE // (page_size * per_head)))
    causal = option("causal", (True, False))
    left, right = draw(_window(page_size)) if option("window_size", (False, True)) else (-1, -1)
    costs = _Costs(per_key=2 * kv_heads * per_head, page_size=page_size, per_row=group * kv_heads * per_head)
    several = draw(st.lists(_sequence(page_size, left), min_size=1, max_size=MOST_SEQS))
    q_lens, kv_lens = costs.afforded(several * pick(COPIES))
    sinks = option("sinks", SINKS)
    family = Family(
        name="drawn",
        q_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=dims[0],
        head_dim_v=dims[1],
        scale=pick((dims[0] ** -0.5, 1.0, 0.07)),
        causal=causal,
        window=(left, right),
        softcap=option("softcap", SOFTCAPS),
        sinks=sinks != "none",
    )
    dtype = pick(record.dtypes)
    case = Case(
        name="drawn",
        family=family,
        dtype=dtype,
        cache_dtype=pick(("", *scope.cache_dtypes)) if dtype != "fp32" else "",
        q_lens=q_lens,
        kv_lens=kv_lens,
        page_size=page_size,
        layout=pick(LAYOUTS),
        inputs=pick((*scope.input_classes, *_promised(scope))),
        scales=pick(_scales(takes)),
        sinks=sinks,
        shared_prefix=pick((0, page_size, 2 * page_size + 1)) if len(q_lens) > 1 else 0,
        padded_seqs=option("num_seqs", (0, 1, 3)),
        tail_rows=pick(TAILS),
        give_out=option("out", (False, True)),
        rows=ROWS if sum(q_lens) > 40 else 0,
        seed=draw(st.integers(0, 2**16)),
    )
    assume(scope.refuses(case) is None)
    return case


def _scales(takes: frozenset[str]) -> list[str]:
    """The kinds of scales that the kernel's keyword arguments allow."""
    if not {"k_scale", "v_scale"} <= takes:
        return ["none"]
    return [kind for kind in SCALES if kind == "none" or kind.startswith("kv-") or "q_scale" in takes]


def _promised(scope: Scope) -> list[str]:
    """Input classes beyond the contract that the kernel's record promises to bear."""
    plain = Family(name="plain", q_heads=1, kv_heads=1, head_dim=scope.dims[0][0], head_dim_v=scope.dims[0][1], scale=1.0)
    record = scope.record
    tried = [
        Case(
            name="", family=plain, dtype=record.dtypes[0], q_lens=(1,), kv_lens=(1,), page_size=record.page_sizes[0], inputs=name
        )
        for name in PROMISED_CLASSES
    ]
    return [case.inputs for case in tried if scope.refuses(case) is None]
