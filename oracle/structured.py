"""Structured cases: every family and input class, long contexts, options beyond a short case, and captured inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oracle.cases import Case, case_seed
from oracle.families import FAMILIES, Family
from oracle.inputs import PROMISED_CLASSES
from oracle.scope import Scope

LONG_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # option -> changes of the family, of the case
    "sinks": ({"sinks": True}, {"sinks": "dominant"}),
    "window": ({"window": (2047, 0)}, {}),
    "window+sinks+8-bit": (
        {"window": (127, 0), "sinks": True},
        {"sinks": "dominant", "cache_dtype": "e4m3", "scales": "kv-per-sequence"},
    ),
    "two-sided": ({"causal": False, "window": (127, 64)}, {}),
    "softcap": ({"softcap": 30.0}, {"inputs": "peaked"}),
    "not-causal": ({"causal": False}, {}),
    "8-bit": ({}, {"cache_dtype": "e4m3", "scales": "kv-per-sequence", "inputs": "positive-v"}),
    "page-256": ({}, {"page_size": 256, "kv_lens": (4_097, 6_200)}),
    "fp16": ({}, {"dtype": "fp16"}),
    "fp32": ({}, {"dtype": "fp32"}),
    "hnd": ({}, {"layout": "hnd"}),
}
BATCH_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the same, of large batches
    "plain": ({}, {}),
    "window+sinks": ({"window": (20, 0), "sinks": True}, {"sinks": "dominant"}),
    "8-bit": ({}, {"cache_dtype": "e4m3", "scales": "kv-per-sequence"}),
}
GRID_LIMIT = 65_535  # programs of a CUDA grid along y and z
GEMMA4_MINI = Family(
    name="gemma4-mini-global",
    q_heads=8,
    kv_heads=1,
    head_dim=512,
    head_dim_v=512,
    scale=1.0,
    source="the small Gemma 4 of this repository, global layers: K and V of one projection",
)
CAPTURES = {  # shipped captures: file -> (family, tokens)
    "smollm2-layer00.safetensors": (FAMILIES["smollm2"], 640),
    "smollm2-layer18.safetensors": (FAMILIES["smollm2"], 640),
    "gemma4-mini-layer03.safetensors": (GEMMA4_MINI, 256),
}


def structured(scope: Scope, seed: int, families: Sequence[str]) -> list[Case]:
    """All structured cases, those that the kernel has not declared among them; with `families`, only theirs."""
    cases = _family_cases(scope, seed, families) + _captured_cases(scope, seed, families)
    if not families:
        cases += (
            _long_cases(scope, seed)
            + _long_option_cases(scope, seed)
            + _batch_cases(scope, seed)
            + _promised_cases(scope, seed)
            + _uncapped_cases(scope, seed)
            + _far_cases(scope, seed)
        )
    return cases


def _family_cases(scope: Scope, seed: int, families: Sequence[str]) -> list[Case]:
    """Every input class in two families, every family at least once; with `families`, every class in each of them."""
    named = [FAMILIES[name] for name in families]
    classes = scope.input_classes or ["randn"]
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
    keys = family.reach if whole else min(family.reach, 400)
    wide = family.q_heads * family.head_dim >= 4096
    q_lens, kv_lens = ((1, 0, 9, 4), (keys, 5, 70, 33)) if wide else ((1, 0, 40, 6), (keys, 5, 130, 70))
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
    d, dv = min(scope.dims, key=sum)
    groups = scope.record.groups
    group = 4 if groups is None or 4 in groups else groups[0]
    return Family(name=f"long-{group}x1-{d}/{dv}", q_heads=group, kv_heads=1, head_dim=d, head_dim_v=dv, scale=d**-0.5)


def _long_cases(scope: Scope, seed: int) -> list[Case]:
    """Beyond 4,096 keys, 32,768 and 65,536, where tails of tables and accumulators show."""
    shapes = [
        ("4k", (1, 5, 30), (4_096, 5_003, 4_608), ("randn", "needle", "positive-v", "probe-v", "first-token")),
        ("32k", (4, 1), (33_001, 32_769), ("randn", "positive-v", "probe-v")),
        ("64k", (1,), (65_700,), ("randn",)),
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
    d, dv = max(scope.dims, key=sum)
    widest = replace(cases[0].family, name=f"long-{d}/{dv}", head_dim=d, head_dim_v=dv, scale=d**-0.5, sinks=False)
    name = "long-4k/widest"
    return [*cases, replace(cases[0], name=name, family=widest, sinks="none", seed=case_seed(seed, name))]


def _batch_cases(scope: Scope, seed: int) -> list[Case]:
    """Each of BATCH_OPTIONS in a decode batch of 260, beyond what 128 or 256 threads or programs hold; then six sequences in a
    batch of more than GRID_LIMIT, the others empty."""
    cases = []
    for option, (family, case) in BATCH_OPTIONS.items():
        name = f"batch-260/{option}"
        plain = Case(
            name=name,
            family=replace(_small_family(scope), **family),
            dtype=_dtype(scope),
            q_lens=(1,) * 260,
            kv_lens=(200, *(1 + i * 37 % 70 for i in range(259))),
            page_size=_page_size(scope, 16),
            seed=case_seed(seed, name),
        )
        cases.append(replace(plain, **case))
    name = "batch-65538"
    idle = (0,) * (GRID_LIMIT - 3)
    q_lens, kv_lens = (1, 1, 1, *idle, 5, 1, 3), (40, 3, 1, *idle, 70, 5, 17)
    return [*cases, replace(cases[0], name=name, q_lens=q_lens, kv_lens=kv_lens, seed=case_seed(seed, name))]


def _far_cases(scope: Scope, seed: int) -> list[Case]:
    """Every format of the kernel in a pool of more than 2^31 elements, with one query a sequence and with more; then ids beyond
    2^16 in a smaller one."""
    formats = [(dtype, "") for dtype in scope.record.dtypes] + [(_dtype(scope), cache) for cache in scope.cache_dtypes]
    shapes = {"decode": ((1, 1, 1), (300, 70, 33)), "prefill": ((9, 20), (300, 150))}
    cases = []
    for dtype, cache in formats:
        for label, (q_lens, kv_lens) in shapes.items():
            name = f"far-pages/{cache or dtype}/{label}"
            cases.append(
                Case(
                    name=name,
                    family=_small_family(scope),
                    dtype=dtype,
                    cache_dtype=cache,
                    q_lens=q_lens,
                    kv_lens=kv_lens,
                    page_size=_page_size(scope, 16),
                    layout="far-pages",
                    scales="kv-per-head" if cache else "none",
                    seed=case_seed(seed, name),
                )
            )
    name = "many-pages"
    return [*cases, replace(cases[0], name=name, layout=name, seed=case_seed(seed, name))]


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


def _uncapped_cases(scope: Scope, seed: int) -> list[Case]:
    """The largest logits in every format without a softcap, which would leave of them what any format holds."""
    return [
        Case(
            name=f"uncapped/{inputs}/{dtype}",
            family=_small_family(scope),
            dtype=dtype,
            q_lens=(1, 30),
            kv_lens=(130, 70),
            page_size=_page_size(scope, 16),
            inputs=inputs,
            seed=case_seed(seed, f"uncapped/{inputs}/{dtype}"),
        )
        for dtype in scope.record.dtypes
        for inputs in ("logits-3e3", "logits-3e4")
        if inputs in scope.input_classes
    ]


def _captured_cases(scope: Scope, seed: int, families: Sequence[str]) -> list[Case]:
    """A prefill chunk of each capture, and one decode step."""
    cases = []
    for file, (family, tokens) in CAPTURES.items():
        if families and family.name not in families:
            continue
        for label, q_len in (("prefill", 96), ("decode", 1)):
            name = f"captured/{file.removesuffix('.safetensors')}/{label}"
            cases.append(
                Case(
                    name=name,
                    family=family,
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
