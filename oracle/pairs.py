"""The covering array: every pair of values of two parameters of a call stands in some case of the suite.

A fault that slips through names the value or the pair that is missing: add it to FACTORS, it is a line.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

from covertable import make

from oracle.cases import LAYOUTS, SCALES, SINKS, Case, case_seed
from oracle.families import Family
from oracle.geometry import GEOMETRIES, lengths
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
    plain = {name: values[0] for name, values in FACTORS.items()}
    plain |= {"sinks": "none", "scales": "none", "page_size": scope.record.page_sizes[0], "dtype": scope.record.dtypes[0]}
    plain["dims"] = next((d for d in FACTORS["dims"] if d in scope.dims), scope.dims[0])
    plain["group"] = scope.record.groups[0] if scope.record.groups else 1
    factors: dict[str, list[Any]] = {}
    skipped = []
    inputs = next(iter(scope.input_classes), "randn")
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
        factors["dims"] += [d for d in scope.dims if d not in FACTORS["dims"]]
        factors["page_size"] += [p for p in scope.record.page_sizes if p not in FACTORS["page_size"]]
    return factors, skipped


def grid(factors: dict[str, list[Any]], seed: int, draw: int, family: Family | None, classes: list[str]) -> list[Case]:
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
        padded_seqs=row["padded_seqs"],
        give_out=row["give_out"],
        seed=seed,
    )
