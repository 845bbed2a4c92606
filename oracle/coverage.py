"""Coverage: what a suite exercised of what must be exercised, as counts.  Too little is no acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Protocol

from oracle.cases import Case
from oracle.families import FAMILIES, Family
from oracle.inputs import INPUT_CLASSES
from oracle.pairs import FACTORS, factor_values
from oracle.pool import QUICK_FILLS, Fill
from oracle.relations.table import RELATIONS, refuses
from oracle.rows import sample_rows
from oracle.scope import Scope
from oracle.structured import CAPTURES
from oracle.suite import ELEMENTS, QUICK_ELEMENTS, Suite
from oracle.verdict import Coverage

OPTIONS: dict[str, Callable[[Case], bool]] = {
    "not causal": lambda c: not c.family.causal,
    "window": lambda c: c.family.window != (-1, -1),
    "softcap": lambda c: c.family.softcap > 0,
    "sinks": lambda c: c.sinks != "none",
    "scales": lambda c: c.scales != "none",
    "num_seqs": lambda c: c.padded_seqs > 0,
    "out given": lambda c: c.give_out,
    "8-bit cache": lambda c: bool(c.cache_dtype),
    "uneven head dims": lambda c: c.family.head_dim != c.family.head_dim_v,
}
UNSEEN_WITHOUT_LSE = (
    "without an LSE: faults of keys, masks and scales a hundred times smaller than the output shows, and wrong LSEs, go unseen"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercised:
    """One case as it was run."""

    case: Case
    fills: tuple[Fill, ...]
    has_lse: bool


def planned(suite: Suite, has_lse: bool) -> list[Exercised]:
    """The cases as they would be run."""
    fills = (Fill.STALE, *QUICK_FILLS) if suite.profile == "quick" else tuple(Fill)
    return [Exercised(case=c, fills=fills, has_lse=has_lse) for c in suite.cases]


def coverage(scope: Scope, suite: Suite, ran: Sequence[Exercised]) -> Coverage:
    """What `ran` covered of what a kernel of this scope must be judged on."""
    cases = [r.case for r in ran]
    counts: dict[str, int] = {}
    missing: list[str] = []
    left_out: list[str] = []
    quick = suite.profile == "quick"

    def need(label: str, count: int, at_least: int = 1, *, quick_too: bool = False) -> None:
        """`quick_too`: the quick profile must cover it as well; it leaves the rest out, and says so."""
        counts[label] = count
        if count < at_least:
            short = label if at_least == 1 else f"{label}: {count} of {at_least}"
            (left_out if quick and not quick_too else missing).append(short)

    families = Counter(c.family.name for c in cases)
    for name in suite.families or [f for f in FAMILIES if _able(scope, FAMILIES[f])]:
        need(f"family {name}", families[name])
    where: dict[str, set[str]] = {}
    for c in cases:
        where.setdefault(c.inputs, set()).add(c.family.name)
    for inputs in INPUT_CLASSES:
        need(f"inputs {inputs} (families)", len(where.get(inputs, ())), 1 if suite.families else 2)
    _options(scope, suite, cases, need)
    values = _pairs(scope, suite, cases)
    counts["value pairs of the parameter table"] = values
    need("sequences without queries", sum(1 for c in cases for q in c.q_lens if q == 0), quick_too=True)
    need("sequences without keys", sum(1 for c in cases for k in c.kv_lens if k == 0), quick_too=True)
    beside = sum(1 for c in cases if 1 in c.q_lens and max(c.q_lens, default=0) > 8)
    need("decode rows beside prefill rows", beside, quick_too=True)
    if not suite.families:
        need("cases beyond 4,096 keys", sum(1 for c in cases if max(c.kv_lens, default=0) > 4096))
        need("cases beyond 32,768 keys", sum(1 for c in cases if max(c.kv_lens, default=0) > 32768))
        if any(_able(scope, family) for family, _ in CAPTURES.values()):
            need("captured inputs", sum(1 for c in cases if c.captured), quick_too=True)
    for fill in Fill:
        if fill.finite or not scope.record.finite_tails:
            need(f"fill {fill}", sum(1 for r in ran if fill in r.fills), quick_too=fill in (Fill.STALE, *QUICK_FILLS))
    judged = [len(sample_rows(c, c.rows or 40)) for c in cases]
    elements = sum(n * c.family.q_heads * c.family.head_dim_v for n, c in zip(judged, cases, strict=True))
    if not suite.families:
        need("judged output elements", elements, QUICK_ELEMENTS if quick else ELEMENTS, quick_too=True)
    unseen: tuple[str, ...] = () if all(r.has_lse for r in ran) else (UNSEEN_WITHOUT_LSE,)
    if scope.record.finite_tails:
        unseen += ("NaN and inf fills are skipped: the record asks for finite values past the plan",)
    return Coverage(
        cases=len(cases),
        elements=elements,
        rows=sum(judged),
        counts=counts,
        missing=tuple(missing),
        left_out=tuple(left_out),
        skipped=dict(Counter(reason for _, reason in suite.skipped)),
        unseen=unseen,
    )


def with_relations(covered: Coverage, scope: Scope, suite: Suite, ran: Mapping[str, int]) -> Coverage:
    """`covered` with the relations, `ran` so many times each: those that the scope allows and that did not run are missing.

    Families asked for by name are judged by their cases alone.
    """
    if suite.families:
        return covered
    skipped = {f"relation {name}: {why}": 1 for name, r in RELATIONS.items() if (why := refuses(r, scope)) is not None}
    asked = {name: r for name, r in RELATIONS.items() if refuses(r, scope) is None}
    absent = {name: r for name, r in asked.items() if not ran.get(name, 0)}
    quick = suite.profile == "quick"
    return replace(
        covered,
        counts=covered.counts | {f"relation {name}": ran.get(name, 0) for name in asked},
        missing=(*covered.missing, *(f"relation {name}" for name, r in absent.items() if r.quick or not quick)),
        left_out=(*covered.left_out, *(f"relation {name}" for name, r in absent.items() if quick and not r.quick)),
        skipped=covered.skipped | skipped,
    )


def _able(scope: Scope, f: Family) -> bool:
    case = Case(
        name=f.name,
        family=f,
        dtype=scope.record.dtypes[0],
        q_lens=(1,),
        kv_lens=(1,),
        page_size=scope.record.page_sizes[0],
        sinks="small" if f.sinks else "none",
    )
    return scope.refuses(case) is None


class _Need(Protocol):
    def __call__(self, label: str, count: int, at_least: int = 1, *, quick_too: bool = False) -> None: ...


def _options(scope: Scope, suite: Suite, cases: Sequence[Case], need: _Need) -> None:
    """Every option that the kernel takes, and every pair of them that one call can have."""
    takes = {
        "not causal": "causal" in scope.parameters,
        "window": "window_size" in scope.parameters,
        "softcap": "softcap" in scope.parameters,
        "sinks": "sinks" in scope.parameters,
        "scales": bool({"q_scale", "k_scale", "v_scale"} & scope.parameters),
        "num_seqs": "num_seqs" in scope.parameters,
        "out given": "out" in scope.parameters,
        "8-bit cache": "e4m3" in scope.cache_dtypes,
        "uneven head dims": bool(scope.record.uneven_head_dims),
    }
    if suite.families:  # a family fixes its mask, softcap and head dims
        takes = {name: taken and name in ("scales", "num_seqs", "out given", "8-bit cache") for name, taken in takes.items()}
    able = [name for name, taken in takes.items() if taken]
    for name in able:
        need(f"option {name}", sum(1 for c in cases if OPTIONS[name](c)), quick_too=True)
    for one, two in combinations(able, 2):
        need(f"options {one} + {two}", sum(1 for c in cases if OPTIONS[one](c) and OPTIONS[two](c)))


def _pairs(scope: Scope, suite: Suite, cases: Sequence[Case]) -> int:
    """Distinct pairs of values of two factors that the cases of the covering array hold."""
    rows = [factor_values(c) for c in cases if "pair-" in c.name]
    return len({(a, row[a], b, row[b]) for row in rows for a, b in combinations(sorted(FACTORS), 2)})
