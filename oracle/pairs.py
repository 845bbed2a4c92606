"""The covering array: every pair of values of two parameters of a call stands in some case of the suite.

A fault that slips through names the value or the pair that is missing: add it to FACTORS, it is a line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any

from covertable import make

from oracle.cases import LAYOUTS, SCALES, SINKS, Case, case_seed
from oracle.families import Family
from oracle.geometry import GEOMETRIES, geometry_of, lengths
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
    "softcap": (0.0, 30.0, 0.75),
    "sinks": SINKS,
    "scales": SCALES,
    "scale": ("1/sqrt(d)", "1", "0.07"),
    "geometry": tuple(GEOMETRIES),
    "layout": tuple(name for name in LAYOUTS if name != "many-pages"),  # dear, and "far-pages" has ids as high
    "padded_seqs": (0, 3),
    "give_out": (True, False),
}
PLACEMENT: dict[str, tuple[Any, ...]] = {  # further factors, of what lies where: rows of q past the plan, shared pages
    "tail_rows": (3, 0, 1, 70),
    "shared_prefix": (0, "some"),
}
EXTENTS: dict[str, tuple[int, int]] = {  # geometry -> (query rows, sequences), for keeping a case's cost in bounds
    "decode-20": (20, 20),
    "decode-70": (70, 70),
    "full-tiles": (208, 3),
    "prefill": (128, 1),
    "prefill-257+": (288, 1),
    "speculative": (18, 4),
    "mixed": (55, 6),
    "single": (1, 1),
    "short": (46, 4),
}
BLUNT = ("constant-v", "ones-v", "probe-v")  # input classes that do not show one lane or row in the place of another
MOST_WORK = 1.2e9  # query-key pairs times heads times dims of one case
MOST_POOL = 1.2e7  # elements of one case's page pool


def declared(scope: Scope, family: Family | None, seed: int) -> tuple[dict[str, list[Any]], list[tuple[Case, str]]]:
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
    table = FACTORS | PLACEMENT
    plain = {name: values[0] for name, values in table.items()}
    plain |= {"sinks": "none", "scales": "none", "page_size": scope.record.page_sizes[0], "dtype": scope.record.dtypes[0]}
    plain["dims"] = next((d for d in FACTORS["dims"] if d in scope.dims), scope.dims[0])
    plain["group"] = scope.record.groups[0] if scope.record.groups else 1
    factors: dict[str, list[Any]] = {}
    skipped = []
    inputs = next(iter(scope.input_classes), "randn")
    for name, values in table.items():
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
        factors["dims"] += [d for d in scope.dims if d not in FACTORS["dims"]]
        factors["page_size"] += [p for p in scope.record.page_sizes if p not in FACTORS["page_size"]]
    return factors, skipped


def grid(factors: dict[str, list[Any]], seed: int, draw: int, family: Family | None, classes: list[str]) -> list[Case]:
    """The covering array: every pair of values of two factors stands in some case."""
    rows = covering_rows(factors, salt=f"{seed}/{draw}", whole=family is not None)
    prefix = f"{family.name}/" if family else ""
    turns = [classes[(i + draw * 7) % len(classes)] for i in range(len(rows))]
    return [
        _case(row, f"{prefix}pair-{draw}{i:03d}", seed, family, inputs)
        for i, (row, inputs) in enumerate(zip(rows, _sharpest_where_alone(rows, turns), strict=True))
    ]


def _sharpest_where_alone(rows: list[dict[str, Any]], turns: list[str]) -> list[str]:
    """The input classes `turns`, one a row, in an order that gives those of BLUNT to rows whose pairs stand elsewhere too."""
    times = Counter(pair for row in rows for pair in _value_pairs(row))
    alone = [sum(times[pair] == 1 for pair in _value_pairs(row)) for row in rows]
    blunt = [inputs for inputs in turns if inputs in BLUNT]
    sharp = [inputs for inputs in turns if inputs not in BLUNT]
    spared = sorted(range(len(rows)), key=alone.__getitem__)[: len(blunt)]
    return [blunt.pop() if i in spared else sharp.pop() for i in range(len(rows))]


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
    "page_size": lambda n: abs(n - 16),  # pages of one key are no cheaper, and dear where each takes a page of memory
    "layout": lambda name: name == "layers-in-page",
}


def _value_pairs(row: dict[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def _affordable(row: dict[str, Any]) -> bool:
    rows, sequences = EXTENTS[row["geometry"]]
    reach = max(200, MASKS[row["mask"]][1][0] + 70)
    (d, dv), kv_heads = row["dims"], row["kv_heads"]
    slots = 2 * sequences * max(row["page_size"], reach // 2 if sequences > 1 else reach)
    layers = 3 if row["layout"] in ("layers-in-page", "far-pages") else 1
    pool = slots * kv_heads * 2 * max(d, dv) * layers
    if row["layout"] == "far-pages":  # each page lies in a page of memory of its own, 2,048 elements at least
        pool = max(pool, slots // row["page_size"] * 2048)
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
    q_lens, kv_lens = lengths(row["geometry"], seed=seed, reach=family.reach, page_size=row["page_size"])
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
        shared_prefix=_prefix(row["page_size"]) if row["shared_prefix"] == "some" else 0,
        padded_seqs=row["padded_seqs"],
        tail_rows=row["tail_rows"],
        give_out=row["give_out"],
        seed=seed,
    )


def _prefix(page_size: int) -> int:
    """About 48 shared keys: whole pages and one key more."""
    return page_size * max(1, 48 // page_size) + 1


def factor_values(case: Case) -> dict[str, Any]:
    """The value of every factor that `case` has; one that is not in the table where the case was not made from it."""
    f = case.family
    masks = {mask: name for name, mask in MASKS.items()}
    return {
        "dtype": f"{case.dtype}/{case.cache_dtype}" if case.cache_dtype else case.dtype,
        "dims": (f.head_dim, f.head_dim_v),
        "group": f.group,
        "kv_heads": f.kv_heads,
        "page_size": case.page_size,
        "mask": masks.get((f.causal, f.window), f"causal {f.causal}, window {f.window}"),
        "softcap": f.softcap,
        "sinks": case.sinks,
        "scales": case.scales,
        "scale": "1/sqrt(d)" if f.scale == f.head_dim**-0.5 else f"{f.scale:g}",
        "geometry": geometry_of(case.q_lens, case.kv_lens),
        "layout": case.layout,
        "padded_seqs": case.padded_seqs,
        "give_out": case.give_out,
        "tail_rows": case.tail_rows,
        "shared_prefix": "some" if case.shared_prefix else 0,
    }
