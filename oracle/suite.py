"""The suite: which cases a kernel is judged on, in which order, with how many judged rows.

The covering array (`oracle/pairs.py`), the structured cases (`oracle/structured.py`), and some shapes a second time.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from oracle.cases import Case
from oracle.families import FAMILIES, Family
from oracle.pairs import declared, grid
from oracle.rows import rows_needed, sample_rows
from oracle.scope import Scope
from oracle.structured import structured

ELEMENTS, QUICK_ELEMENTS = 5_000_000, 250_000  # judged output elements at least
SHARE, CONFIDENCE = 0.01, 0.99  # each case meets a fault on this share of (row, head) pairs with this probability
MOST_DRAWS = 12  # covering arrays of one suite
QUICK_CASES = 13  # of the covering array that the quick profile keeps
PROFILES = ("default", "quick", "deep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The cases of one verdict, in the order they run, and what the kernel's record kept out."""

    profile: str
    seed: int
    families: tuple[str, ...]  # families asked for by name; () = all
    cases: tuple[Case, ...]
    skipped: tuple[tuple[Case, str], ...]  # cases of the whole suite that the kernel has not declared, and why
    own: tuple[Case, ...] = ()  # cases that the user brought: first among the cases, or skipped

    def digest(self) -> str:
        """SHA-256 over the suite's cases: equal suites judge equal calls.  The user's own do not count."""
        return hashlib.sha256(json.dumps([repr(c) for c in self.cases if c not in self.own]).encode()).hexdigest()

    def not_declared(self) -> dict[str, int]:
        """Reason -> cases of the suite that the kernel has not declared.  The user's own do not count."""
        return dict(Counter(reason for case, reason in self.skipped if case not in self.own))


def build(scope: Scope, *, profile: str, seed: int, families: Sequence[str] = ()) -> Suite:
    """The suite of `profile` for a kernel of the given scope.  Same arguments, same cases."""
    whole = structured(scope, seed, families)
    fits = [c for c in whole if scope.refuses(c) is None]
    skipped = [(c, reason) for c in whole if (reason := scope.refuses(c)) is not None]
    arrays: list[tuple[Family | None, dict[str, list[Any]]]] = []
    classes = scope.input_classes
    named: list[Family | None] = [FAMILIES[name] for name in families]
    for family in named or [None]:
        factors, left_out = declared(scope, family, seed)
        skipped += left_out
        if all(factors.values()) and classes:
            arrays.append((family, factors))
    array: list[Case] = []
    cases: list[Case] = []
    for draw in range(MOST_DRAWS):  # a kernel of few heads and small ones needs more cases for as many elements
        array += [c for family, factors in arrays for c in grid(factors, seed, draw, family, classes)]
        if profile == "deep" and draw < 2:
            continue
        cases = _tenth(array, fits) if profile == "quick" else _with_rows(_cheapest_first(fits + array, _twins(array)))
        if families or profile == "quick" or elements(cases) >= ELEMENTS or not arrays:
            break
    return Suite(profile=profile, seed=seed, families=tuple(families), cases=tuple(cases), skipped=tuple(skipped))


def _cheapest_first(cases: list[Case], twins: dict[str, Case]) -> list[Case]:
    """Cheap cases first, so that a fault shows within seconds and on a small case; a twin right after its original."""
    ordered = sorted(cases, key=_work)
    return [c for case in ordered for c in ((case, twins[case.name]) if case.name in twins else (case,))]


def _twins(grid: list[Case]) -> dict[str, Case]:
    """A few cases again as `_twin` makes them: sees what a kernel keeps between calls, its plan of the lengths included."""
    several = [c for c in grid if len(set(zip(c.q_lens, c.kv_lens, strict=True))) > 1] or grid
    return {c.name: _twin(c) for c in several[:: max(1, len(several) // 6)][:6]}


def _twin(case: Case) -> Case:
    """The same shapes with other data, another page table, and the sequences in reverse order."""
    return replace(case, name=f"{case.name}+again", seed=case.seed + 1, q_lens=case.q_lens[::-1], kv_lens=case.kv_lens[::-1])


def _with_rows(cases: list[Case]) -> list[Case]:
    """The cases with their numbers of judged rows, as many as SHARE and CONFIDENCE ask for, raised until ELEMENTS are met."""
    factor = 1.0
    while True:
        sized = [_with_pairs(c, factor) for c in cases]
        if elements(sized) >= ELEMENTS or factor > 8:
            return sized
        factor *= 1.25


def elements(cases: Sequence[Case]) -> int:
    """Output elements that the cases judge."""
    return sum(len(sample_rows(c, c.rows)) * c.family.q_heads * c.family.head_dim_v for c in cases)


def _tenth(grid: list[Case], structured: list[Case]) -> list[Case]:
    """About a tenth of the suite for interpreted kernels: small cases that bring the most new pairs, classes and families."""
    small = [c for c in grid if _work(c) <= 3e7]
    chosen: list[Case] = []
    seen: set[tuple[str, str]] = set()
    while small and (len(chosen) < QUICK_CASES or elements(chosen) < QUICK_ELEMENTS):
        best = max(small, key=lambda c: (len(_features(c) - seen), -_work(c)))
        chosen.append(_with_pairs(best))
        seen |= _features(best)
        small.remove(best)
    families = [c for c in structured if "/" in c.name and c.inputs in ("needle", "ones-v", "first-token") and _work(c) <= 6e7][
        :3
    ]
    real = [c for c in structured if c.captured and c.name.endswith("decode")][:1]
    twin = list(_twins(chosen).values())[:1]
    return [_with_pairs(c) for c in families + real + chosen + twin]


def _with_pairs(case: Case, factor: float = 1.0) -> Case:
    """The case with as many judged rows as SHARE and CONFIDENCE ask for, times a factor."""
    return replace(case, rows=max(8, round(factor * -(-rows_needed(SHARE, CONFIDENCE) // case.family.q_heads))))


def _work(case: Case) -> float:
    """Query-key pairs times head dim: what an interpreted kernel's time grows with."""
    f = case.family
    return sum(q * k for q, k in zip(case.q_lens, case.kv_lens, strict=True)) * f.q_heads * (f.head_dim + f.head_dim_v)


def _features(case: Case) -> set[tuple[str, str]]:
    f = case.family
    values = [
        case.dtype + case.cache_dtype,
        f"d{f.head_dim}/{f.head_dim_v}",
        f"g{f.group}",
        f"page{case.page_size}",
        f"causal{f.causal}",
        f"window{f.window}",
        f"softcap{f.softcap}",
        case.sinks,
        case.scales,
        case.layout,
        case.inputs,
        f"pad{case.padded_seqs > 0}",
        f"out{case.give_out}",
        f"batch{len(case.q_lens)}",
        f"empty{0 in case.kv_lens}",
    ]
    return {(a, b) for i, a in enumerate(values) for b in values[i + 1 :]}
