"""The suite: which cases a kernel is judged on.

A pairwise covering array over the parameter table, every family and input class, long contexts, captures, and repeated
shapes.  A fault that slips through names the value or the pair that is missing: add it to FACTORS, it is a line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from covertable import make

from oracle.cases import LAYOUTS, SCALES, SINKS, Case, case_seed
from oracle.families import FAMILIES, Family
from oracle.geometry import GEOMETRIES, lengths
from oracle.inputs import EXTRA_NAMES, INPUT_CLASSES, PROMISED_CLASSES
from oracle.rows import rows_needed, sample_rows
from oracle.scope import Scope

MASKS: dict[str, tuple[bool, tuple[int, int]]] = {  # causal, window
    "causal": (True, (-1, -1)),
    "full": (False, (-1, -1)),
    "window-1": (True, (0, 0)),
    "window-21": (True, (20, 0)),
    "window-64": (True, (63, 0)),
    "window-128": (True, (127, 0)),
    "window-1001": (True, (1000, 0)),
    "two-sided": (False, (30, 10)),
    "left-only": (False, (20, -1)),
    "right-only": (False, (-1, 10)),
    "causal-right": (True, (30, 10)),  # the causal rule hides what the window would show
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": ("bf16", "fp16", "fp32", "bf16/e4m3", "fp16/e4m3"),  # of q / of the cache where it differs
    "dims": (
        (64, 64),
        (80, 80),
        (96, 96),
        (128, 128),
        (256, 256),
        (512, 512),
        (192, 128),
        (128, 64),
        (64, 128),
        (40, 40),
        (576, 512),
    ),
    "group": (1, 2, 4, 5, 6, 7, 8, 12, 16),
    "kv_heads": (1, 2, 3, 4, 8),
    "page_size": (1, 8, 16, 32, 64, 128, 256),
    "mask": tuple(MASKS),
    "softcap": (0.0, 30.0),
    "sinks": SINKS,
    "scales": SCALES,
    "scale": ("1/sqrt(d)", "1", "0.07"),
    "geometry": tuple(GEOMETRIES),
    "layout": LAYOUTS,
    "padded_seqs": (0, 3),
    "give_out": (True, False),
}
EXTENTS: dict[str, tuple[int, int]] = {  # geometry -> (query rows, sequences), for keeping a case's cost in bounds
    "decode-20": (20, 20),
    "decode-70": (70, 70),
    "prefill": (128, 1),
    "prefill-257+": (288, 1),
    "speculative": (18, 4),
    "mixed": (55, 6),
    "single": (1, 1),
    "short": (46, 4),
}
LONG_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # option -> changes of the family, of the case
    "sinks": ({"sinks": True}, {"sinks": "dominant"}),
    "window": ({"window": (2047, 0)}, {}),
    "softcap": ({"softcap": 30.0}, {"inputs": "peaked"}),
    "not-causal": ({"causal": False}, {}),
    "8-bit": ({}, {"cache_dtype": "e4m3", "scales": "kv-per-sequence"}),
    "fp16": ({}, {"dtype": "fp16"}),
    "fp32": ({}, {"dtype": "fp32"}),
    "hnd": ({}, {"layout": "hnd"}),
}
MOST_WORK = 1.2e9  # query-key pairs times heads times dims of one case
MOST_POOL = 1.2e7  # elements of one case's page pool
ELEMENTS, QUICK_ELEMENTS = 5_000_000, 250_000  # judged output elements at least
SHARE, CONFIDENCE = 0.01, 0.99  # each case meets a fault on this share of (row, head) pairs with this probability
MOST_DRAWS = 12  # covering arrays of one suite
QUICK_CASES = 13  # of the covering array that the quick profile keeps
PROFILES = ("default", "quick", "deep")
CAPTURES = {  # shipped captures: file -> (family, tokens)
    "smollm2-layer00.safetensors": ("smollm2", 640),
    "smollm2-layer18.safetensors": ("smollm2", 640),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The cases of one verdict, in the order they run, and what the kernel's record kept out."""

    profile: str
    seed: int
    families: tuple[str, ...]  # families asked for by name; () = all
    cases: tuple[Case, ...]
    skipped: tuple[tuple[Case, str], ...]  # cases of the whole suite that the kernel has not declared, and why

    def digest(self) -> str:
        """SHA-256 over the cases: equal suites judge equal calls."""
        return hashlib.sha256(json.dumps([repr(c) for c in self.cases]).encode()).hexdigest()


def input_classes(scope: Scope) -> list[str]:
    """Input classes that the covering array draws from: those that bring the extras, for a kernel that needs some."""
    if not scope.extras:
        return list(INPUT_CLASSES)
    return [name for name, extras in EXTRA_NAMES.items() if scope.extras <= set(extras)]


def build(scope: Scope, *, profile: str, seed: int, families: Sequence[str] = ()) -> Suite:
    """The suite of `profile` for a kernel of the given scope.  Same arguments, same cases."""
    structured = _family_cases(scope, seed, families) + _captured_cases(scope, seed, families)
    if not families:
        structured += _long_cases(scope, seed) + _long_option_cases(scope, seed) + _promised_cases(scope, seed)
    fits = [c for c in structured if scope.refuses(c) is None]
    skipped = [(c, reason) for c in structured if (reason := scope.refuses(c)) is not None]
    arrays: list[tuple[Family | None, dict[str, list[Any]]]] = []
    classes = input_classes(scope)
    named: list[Family | None] = [FAMILIES[name] for name in families]
    for family in named or [None]:
        factors, left_out = _declared(scope, family, seed)
        skipped += left_out
        if all(factors.values()) and classes:
            arrays.append((family, factors))
    grid: list[Case] = []
    cases: list[Case] = []
    for draw in range(MOST_DRAWS):  # a kernel of few heads and small ones needs more cases for as many elements
        grid += [c for family, factors in arrays for c in _grid(factors, seed, draw, family, classes)]
        if profile == "deep" and draw < 2:
            continue
        cases = _tenth(grid, fits) if profile == "quick" else _with_rows(_cheapest_first(fits + grid, _twins(grid)))
        if families or profile == "quick" or elements(cases) >= ELEMENTS or not arrays:
            break
    return Suite(profile=profile, seed=seed, families=tuple(families), cases=tuple(cases), skipped=tuple(skipped))


def _declared(scope: Scope, family: Family | None, seed: int) -> tuple[dict[str, list[Any]], list[tuple[Case, str]]]:
    """FACTORS without the values that the kernel has not declared; a stand-in case and a reason for each one dropped."""
    fixed: dict[str, Any] = {}
    if family is not None:
        fixed = {
            "dims": (family.head_dim, family.head_dim_v),
            "group": family.group,
            "kv_heads": family.kv_heads,
            "mask": None,
            "softcap": family.softcap,
            "scale": None,
        }
        if not family.sinks:
            fixed["sinks"] = "none"
    plain = {name: values[0] for name, values in FACTORS.items()}
    plain |= {"sinks": "none", "scales": "none", "page_size": scope.record.page_sizes[0], "dtype": scope.record.dtypes[0]}
    plain["dims"] = next((d for d in FACTORS["dims"] if _dims_declared(scope, d)), _record_dims(scope)[0])
    plain["group"] = scope.record.groups[0] if scope.record.groups else 1
    factors: dict[str, list[Any]] = {}
    skipped = []
    inputs = next(iter(input_classes(scope)), "randn")
    for name, values in FACTORS.items():
        if name in fixed:
            factors[name] = [fixed[name]]
            continue
        factors[name] = []
        own_sinks = name == "sinks" and family is not None and family.sinks  # such a family is never judged without
        for value in values[1:] if own_sinks else values:
            case = _case(plain | fixed | {name: value}, f"{name}={value}", seed, family, inputs)
            reason = scope.refuses(case)
            if reason is None:
                factors[name].append(value)
            else:
                skipped.append((case, reason))
    extra = [g for g in scope.record.groups or () if g not in FACTORS["group"]]
    if "group" not in fixed:
        factors["group"] += extra
        factors["dims"] += [d for d in _record_dims(scope) if d not in FACTORS["dims"]]
        factors["page_size"] += [p for p in scope.record.page_sizes if p not in FACTORS["page_size"]]
    return factors, skipped


def _record_dims(scope: Scope) -> list[tuple[int, int]]:
    return [*((d, d) for d in scope.record.head_dims), *scope.record.uneven_head_dims]


def _dims_declared(scope: Scope, dims: tuple[int, int]) -> bool:
    return dims in _record_dims(scope)


def _grid(factors: dict[str, list[Any]], seed: int, draw: int, family: Family | None, classes: list[str]) -> list[Case]:
    """The covering array: every pair of values of two factors stands in some case."""
    rows = covering_rows(factors, salt=f"{seed}/{draw}", whole=family is not None)
    prefix = f"{family.name}/" if family else ""
    return [
        _case(row, f"{prefix}pair-{draw}{i:03d}", seed, family, classes[(i + draw * 7) % len(classes)])
        for i, row in enumerate(rows)
    ]


def covering_rows(factors: dict[str, list[Any]], *, salt: str, whole: bool = False) -> list[dict[str, Any]]:
    """Rows in which every pair of values of two factors stands somewhere; kept affordable unless `whole`."""
    rows: list[dict[str, Any]] = make(factors, strength=2, salt=salt)
    return rows if whole else _within_means(rows, factors)


def _within_means(rows: list[dict[str, Any]], factors: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """The rows that a suite of a hundred cases can afford, and for each other row smaller ones that hold its pairs.

    A row that is too large is taken apart: its shape as a single query, and its geometry with few heads and with small ones.
    A pair that still stands nowhere gets the smallest row that holds it, whatever that costs.
    """
    kept = [row for row in rows if _affordable(row)]
    seen = set().union(*map(_value_pairs, kept)) if kept else set()
    small = {name: min(factors[name], key=size) for name, size in _SIZES.items()}
    for row in rows:
        for cheaper in (
            row,
            row | {"geometry": small["geometry"]},
            row | {name: small[name] for name in ("group", "kv_heads")},
            row | {name: small[name] for name in ("dims", "mask", "page_size", "layout")},
        ):
            if (new := _value_pairs(cheaper) - seen) and _affordable(cheaper):
                kept.append(cheaper)
                seen |= new
    for row in rows:
        for pair in sorted(_value_pairs(row) - seen, key=repr):
            if pair not in seen:
                kept.append(row | small | dict(pair))
                seen |= _value_pairs(kept[-1])
    return kept


_SIZES: dict[str, Callable[[Any], Any]] = {
    "geometry": lambda name: EXTENTS[name][0],
    "group": lambda n: n,
    "kv_heads": lambda n: n,
    "dims": sum,
    "mask": lambda name: MASKS[name][1][0],
    "page_size": lambda n: n,
    "layout": lambda name: name == "layers-in-page",
}


def _value_pairs(row: dict[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def _affordable(row: dict[str, Any]) -> bool:
    rows, sequences = EXTENTS[row["geometry"]]
    reach = max(200, MASKS[row["mask"]][1][0] + 70)
    (d, dv), kv_heads = row["dims"], row["kv_heads"]
    slots = 2 * sequences * max(row["page_size"], reach // 2 if sequences > 1 else reach)
    layers = 3 if row["layout"] == "layers-in-page" else 1
    pool = slots * kv_heads * 2 * max(d, dv) * layers
    return bool(rows * reach * row["group"] * kv_heads * (d + dv) <= MOST_WORK and pool <= MOST_POOL)


def _case(row: dict[str, Any], name: str, seed: int, family: Family | None, inputs: str) -> Case:
    """The case that a row of the covering array describes."""
    seed = case_seed(seed, name)
    if family is None:
        d, dv = row["dims"]
        causal, window = MASKS[row["mask"]]
        scale = {"1/sqrt(d)": d**-0.5, "1": 1.0, "0.07": 0.07}[row["scale"]]
        family = Family(
            name=f"{row['group']}x{row['kv_heads']}-{d}/{dv}-{row['mask']}",
            q_heads=row["group"] * row["kv_heads"],
            kv_heads=row["kv_heads"],
            head_dim=d,
            head_dim_v=dv,
            scale=scale,
            causal=causal,
            window=window,
            softcap=row["softcap"],
            sinks=row["sinks"] != "none",
        )
    q_lens, kv_lens = lengths(row["geometry"], seed=seed, reach=_reach(family), page_size=row["page_size"])
    dtype, _, cache_dtype = row["dtype"].partition("/")
    return Case(
        name=name,
        family=family,
        dtype=dtype,
        cache_dtype=cache_dtype,
        q_lens=q_lens,
        kv_lens=kv_lens,
        page_size=row["page_size"],
        layout=row["layout"],
        inputs=inputs,
        scales=row["scales"],
        sinks=row["sinks"],
        padded_seqs=row["padded_seqs"],
        give_out=row["give_out"],
        seed=seed,
    )


def _reach(family: Family) -> int:
    """Keys of the longest sequence: past the window, so that its edge lies inside."""
    return max(200, family.window[0] + 70)


def _family_cases(scope: Scope, seed: int, families: Sequence[str]) -> list[Case]:
    """Every input class in two families, every family at least once; with `families`, every class in each of them."""
    named = [FAMILIES[name] for name in families]
    classes = input_classes(scope) or ["randn"]
    able = [f for f in FAMILIES.values() if scope.refuses(_family_case(f, classes[0], scope, seed)) is None]
    chosen: list[tuple[Family, str]] = []
    if named:
        chosen = [(f, inputs) for f in named for inputs in classes]
    elif able:
        count = max(2 * len(classes), len(able))
        chosen = [
            (
                able[(i + i // len(classes)) % len(able)] if len(able) % len(classes) == 0 else able[i % len(able)],
                classes[i % len(classes)],
            )
            for i in range(count)
        ]
    unable = [f for f in FAMILIES.values() if f not in able and not named]
    first = {f.name: inputs for f, inputs in reversed(chosen)}
    cases = [_family_case(f, inputs, scope, seed, whole=first[f.name] == inputs) for f, inputs in chosen]
    return cases + [_family_case(f, "randn", scope, seed) for f in unable]


def _family_case(family: Family, inputs: str, scope: Scope, seed: int, *, whole: bool = True) -> Case:
    """A mixed batch of the family; `whole` puts a wide window's edge inside, which one case of the family does."""
    name = f"{family.name}/{inputs}"
    reach = _reach(family) if whole else min(_reach(family), 400)
    wide = family.q_heads * family.head_dim >= 4096
    q_lens, kv_lens = ((1, 0, 9, 4), (reach, 5, 70, 33)) if wide else ((1, 0, 40, 6), (reach, 5, 130, 70))
    return Case(
        name=name,
        family=family,
        dtype=_dtype(scope),
        q_lens=q_lens,
        kv_lens=kv_lens,
        page_size=_page_size(scope, 16),
        layout="layers-in-page" if family.kv_heads * family.head_dim <= 1024 else "kv-in-page",
        inputs=inputs,
        sinks="small" if family.sinks else "none",
        seed=case_seed(seed, name),
    )


def _dtype(scope: Scope) -> str:
    """bf16, or what the kernel has instead."""
    return "bf16" if "bf16" in scope.record.dtypes else scope.record.dtypes[0]


def _page_size(scope: Scope, wanted: int) -> int:
    """The declared page size nearest to the one wanted."""
    return min(scope.record.page_sizes, key=lambda size: abs(size - wanted))


def _small_family(scope: Scope) -> Family:
    """Few heads of the smallest head dim that the kernel has declared: what long contexts are affordable in."""
    d, dv = min(_record_dims(scope), key=sum)
    groups = scope.record.groups
    group = 4 if groups is None or 4 in groups else groups[0]
    return Family(name=f"long-{group}x1-{d}/{dv}", q_heads=group, kv_heads=1, head_dim=d, head_dim_v=dv, scale=d**-0.5)


def _long_cases(scope: Scope, seed: int) -> list[Case]:
    """Beyond 4,096 keys and beyond 32,768, where tails of tables and accumulators show."""
    shapes = [
        ("4k", (1, 5, 30), (4_097, 5_003, 4_500), ("randn", "needle", "positive-v", "probe-v", "first-token")),
        ("32k", (4, 1), (33_001, 32_769), ("randn", "positive-v", "probe-v")),
    ]
    cases = []
    for label, q_lens, kv_lens, classes in shapes:
        for i, inputs in enumerate(classes):
            name = f"long-{label}/{inputs}"
            cases.append(
                Case(
                    name=name,
                    family=_small_family(scope),
                    dtype=_dtype(scope),
                    q_lens=q_lens,
                    kv_lens=kv_lens,
                    page_size=_page_size(scope, 16 if i % 2 else 64),
                    inputs=inputs,
                    seed=case_seed(seed, name),
                )
            )
    return cases


def _long_option_cases(scope: Scope, seed: int) -> list[Case]:
    """Each of LONG_OPTIONS beyond 4,096 keys: a short case of an option says nothing of its long loop."""
    cases = []
    for option, (family, case) in LONG_OPTIONS.items():
        name = f"long-4k/{option}"
        plain = Case(
            name=name,
            family=replace(_small_family(scope), **family),
            dtype=_dtype(scope),
            q_lens=(1, 5),
            kv_lens=(4_097, 5_003),
            page_size=_page_size(scope, 16),
            seed=case_seed(seed, name),
        )
        cases.append(replace(plain, **case))
    d, dv = max(_record_dims(scope), key=sum)
    widest = replace(cases[0].family, name=f"long-{d}/{dv}", head_dim=d, head_dim_v=dv, scale=d**-0.5, sinks=False)
    name = "long-4k/widest"
    return [*cases, replace(cases[0], name=name, family=widest, sinks="none", seed=case_seed(seed, name))]


def _promised_cases(scope: Scope, seed: int) -> list[Case]:
    return [
        Case(
            name=f"promised/{inputs}/{dtype}",
            family=_small_family(scope),
            dtype=dtype,
            q_lens=(60,),
            kv_lens=(300,),
            page_size=_page_size(scope, 16),
            inputs=inputs,
            seed=case_seed(seed, inputs),
        )
        for inputs, dtype in (("tiny-v", "bf16"), ("tiny-v", "fp16"), ("logits-1e36", "bf16"))
        if inputs in PROMISED_CLASSES
    ]


def _captured_cases(scope: Scope, seed: int, families: Sequence[str]) -> list[Case]:
    """A prefill chunk of each capture, and one decode step."""
    cases = []
    for file, (family, tokens) in CAPTURES.items():
        if families and family not in families:
            continue
        for label, q_len in (("prefill", 96), ("decode", 1)):
            name = f"captured/{file.removesuffix('.safetensors')}/{label}"
            cases.append(
                Case(
                    name=name,
                    family=FAMILIES[family],
                    dtype=_dtype(scope),
                    page_size=_page_size(scope, 16),
                    q_lens=(q_len,),
                    kv_lens=(tokens,),
                    inputs="captured",
                    captured=file,
                    seed=case_seed(seed, name),
                )
            )
    return cases


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
