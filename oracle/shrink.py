"""The smallest case that still shows a fault: one step simpler after another, for as long as the fault stays.

Hypothesis shrinks what it drew; this goes on from there on the case itself, where a length is a number and not the place of an
edge in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from oracle.cases import Case
from oracle.families import Family
from oracle.scope import Scope

Step = Callable[[Case], Iterator[Case]]


def smallest(case: Case, scope: Scope, fails: Callable[[Case], bool]) -> Case:
    """A case that `fails` and that no single step makes simpler without losing the fault; `case` itself must fail.

    The steps: fewer sequences, fewer heads, smaller dims, every option off, shorter lengths.
    """
    steps: tuple[Step, ...] = (_fewer_sequences, _Options(scope), _shorter)
    while True:
        before = case
        for step in steps:
            case = _as_far_as_it_goes(step, case, scope, fails)
        if case == before:
            return case


def size(case: Case) -> tuple[int, int, int, int, int]:
    """What makes a case small, the weightiest first: sequences, tokens, options away from their plainest, heads and dims."""
    f = case.family
    options = (
        not f.causal,
        f.window != (-1, -1),
        f.softcap > 0,
        case.sinks != "none",
        case.scales != "none",
        bool(case.cache_dtype),
        case.layout != "plain",
        case.shared_prefix > 0,
        case.padded_seqs > 0,
        case.tail_rows > 0,
        case.give_out,
        case.inputs != "randn",
    )
    return len(case.q_lens), case.total_q + case.total_k, sum(options), f.q_heads * (f.head_dim + f.head_dim_v), case.seed


def _as_far_as_it_goes(step: Step, case: Case, scope: Scope, fails: Callable[[Case], bool]) -> Case:
    while True:
        for simpler in step(case):
            if scope.refuses(simpler) is None and fails(simpler):
                case = simpler
                break
        else:
            return case


def _fewer_sequences(case: Case) -> Iterator[Case]:
    """One sequence alone, half of them, all but one."""
    n = len(case.q_lens)
    if n == 1:
        return
    kept = [[i] for i in range(n)] if n <= 8 else []
    kept += [list(range(n // 2)), list(range(n // 2, n))]
    kept += [[i for i in range(n) if i != left_out] for left_out in range(n)] if n > 2 else []
    for which in kept:
        yield replace(case, q_lens=tuple(case.q_lens[i] for i in which), kv_lens=tuple(case.kv_lens[i] for i in which))


@dataclass(frozen=True, slots=True)
class _Options:
    """The step that turns one option off, or to its plainest value."""

    scope: Scope

    def __call__(self, case: Case) -> Iterator[Case]:
        f, record = case.family, self.scope.record
        d, dv = min(self.scope.dims, key=sum)
        families: tuple[Family, ...] = (
            replace(f, kv_heads=1, q_heads=1),
            replace(f, kv_heads=1, q_heads=f.group),
            replace(f, q_heads=f.kv_heads),
            replace(f, kv_heads=2, q_heads=2 * f.group) if f.kv_heads > 2 else f,
            replace(f, q_heads=2 * f.kv_heads) if f.group > 2 else f,
            replace(f, head_dim=d, head_dim_v=dv, scale=d**-0.5),
            replace(f, scale=f.head_dim**-0.5),
            replace(f, softcap=0.0),
            replace(f, window=(-1, -1)),
            replace(f, window=(f.window[0], -1)),
            replace(f, window=(-1, f.window[1])),
            replace(f, causal=True),
        )
        plain = replace(f, causal=True, window=(-1, -1), softcap=0.0, sinks=False, scale=f.head_dim**-0.5)
        bare = replace(case, shared_prefix=0, padded_seqs=0, tail_rows=0, give_out=False)
        plainest = min(record.page_sizes, key=lambda n: (abs(n - 16), n))
        cases: tuple[Case, ...] = (
            replace(bare, family=plain, sinks="none", scales="none", cache_dtype="", layout="plain"),
            bare,
            *(replace(case, family=family) for family in families),
            replace(case, sinks="none", family=replace(f, sinks=False)),
            replace(case, scales="none"),
            replace(case, scales="kv-scalar" if case.scales != "none" else "none"),
            replace(case, cache_dtype=""),
            replace(case, dtype=record.dtypes[0]),
            replace(case, layout="plain"),
            replace(case, shared_prefix=0),
            replace(case, padded_seqs=0),
            replace(case, padded_seqs=min(1, case.padded_seqs)),
            replace(case, tail_rows=0),
            replace(case, tail_rows=min(1, case.tail_rows)),
            replace(case, give_out=False),
            replace(case, page_size=plainest),
            replace(case, inputs=next(iter(self.scope.input_classes), case.inputs)),
            replace(case, seed=0),
        )
        yield from (c for c in dict.fromkeys(cases) if c != case and size(c) <= size(case))


def _shorter(case: Case) -> Iterator[Case]:
    """One length of one sequence, or the window, cut to 1, or by a half, a quarter ... or by one; no rows asked for."""
    if case.rows and case.total_q <= 40:
        yield replace(case, rows=0)
    for i in range(len(case.q_lens)):
        for q in _less(case.q_lens[i]):
            yield replace(case, q_lens=(*case.q_lens[:i], q, *case.q_lens[i + 1 :]))
        for kv in _less(case.kv_lens[i]):
            yield replace(case, kv_lens=(*case.kv_lens[:i], kv, *case.kv_lens[i + 1 :]))
    for left in _less(case.family.window[0]):
        yield replace(case, family=replace(case.family, window=(left, case.family.window[1])))


def _less(n: int) -> Iterator[int]:
    """Numbers from 1 to n - 1, the smallest first: 1, then n less a half, a quarter ... and 1 of it; 0 is left as it is."""
    if n > 1:
        yield 1
    cut = n // 2
    while cut > 0 and n - cut > 1:
        yield n - cut
        cut //= 2
