"""The suite: every pair of declared values, every class and family, and nothing that a kernel has not declared."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.cases import Case
from oracle.contract import OPTIONAL, Precision, Record
from oracle.families import FAMILIES
from oracle.inputs import INPUT_CLASSES
from oracle.pairs import FACTORS, MASKS, MOST_POOL, MOST_WORK, covering_rows
from oracle.rows import rows_needed, sample_rows
from oracle.scope import Scope
from oracle.structured import LONG_OPTIONS
from oracle.suite import ELEMENTS, QUICK_ELEMENTS, Suite, build, elements

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=8)

WIDE = Record(
    dtypes=("bf16", "fp16", "fp32"), cache_dtypes=("e4m3",), head_dims=(40, 64, 80, 96, 128, 256, 512),
    uneven_head_dims=((192, 128), (128, 64), (64, 128), (576, 512)), page_sizes=(1, 8, 16, 32, 64, 128, 256),
    precision=Precision(subtract_first=True),
)  # fmt: skip
ALL = frozenset(OPTIONAL)
FULL = Scope(record=WIDE, parameters=ALL)
NARROW = Scope(record=Record(head_dims=(64,), groups=(1,), page_sizes=(16,)), parameters=frozenset())


def scope(without: frozenset[str] = frozenset(), **record: Any) -> Scope:
    """A kernel of fewer values, whose suite is built faster."""
    plain = replace(WIDE, head_dims=(64, 128, 512), uneven_head_dims=((192, 128),), page_sizes=(16, 32, 64), groups=(1, 3, 4, 8))
    return Scope(record=replace(plain, **record), parameters=ALL - without)


@pytest.fixture(scope="module")
def default() -> Suite:
    return build(FULL, profile="default", seed=0)


def grid(suite: Suite) -> list[Case]:
    """The cases of the covering array, without their twins."""
    return [c for c in suite.cases if "pair-" in c.name and "+again" not in c.name]


def work(case: Case) -> float:
    f = case.family
    return sum(q * k for q, k in zip(case.q_lens, case.kv_lens, strict=True)) * f.q_heads * (f.head_dim + f.head_dim_v)


# Pairs


def pairs(factors: dict[str, list[Any]]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """All pairs of values of two factors."""
    return {((a, x), (b, y)) for a, b in combinations(sorted(factors), 2) for x in factors[a] for y in factors[b]}


def held(rows: list[dict[str, Any]]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return {((a, row[a]), (b, row[b])) for row in rows for a, b in combinations(sorted(row), 2)}


def test_every_pair_of_values_stands_in_some_row() -> None:
    """Also after the rows that cost too much have been taken apart."""
    factors = {name: list(values) for name, values in FACTORS.items()}

    assert pairs(factors) - held(covering_rows(factors, salt="1/0")) == set()


@drawn
@given(st.data())
def test_every_pair_of_declared_values_stands_in_some_row(data: st.DataObject) -> None:
    """Whatever few values a kernel declares, all of them large ones among them."""
    factors = {
        name: data.draw(st.lists(st.sampled_from(values), min_size=1, max_size=4, unique=True))
        for name, values in FACTORS.items()
    }

    assert pairs(factors) - held(covering_rows(factors, salt="0/0")) == set()


@pytest.mark.parametrize(
    "large", [{"dims": [(512, 512), (576, 512)]}, {"group": [16], "kv_heads": [8], "dims": [(512, 512)]}, {"page_size": [256]}]
)
def test_pairs_of_large_values_are_not_given_up(large: dict[str, list[Any]]) -> None:
    """A kernel for head dim 512 alone is judged on batches of seventy as well."""
    factors = {name: list(values) for name, values in FACTORS.items()} | large
    rows = covering_rows(factors, salt="0/0")

    assert pairs(factors) - held(rows) == set()
    assert any(row["geometry"] == "decode-70" for row in rows)


def test_a_missing_row_would_show() -> None:
    """Must fail: the array without its first row lacks a pair."""
    factors = {name: list(values) for name, values in FACTORS.items()}

    assert pairs(factors) - held(covering_rows(factors, salt="0/0", whole=True)[1:]) != set()


def test_the_rows_of_a_wide_kernel_are_affordable_but_for_a_few(default: Suite) -> None:
    """A handful hold a pair that no smaller row could."""
    large = [c for c in grid(default) if work(c) > MOST_WORK]

    assert len(large) <= 3
    assert max(work(c) for c in default.cases) < 3 * MOST_WORK
    assert max(c.total_k * c.family.kv_heads * 2 * c.family.head_dim for c in grid(default)) < MOST_POOL


def test_a_row_becomes_the_case_that_it_describes(default: Suite) -> None:
    """Every value of every factor stands in some case."""
    cases = grid(default)
    seen: dict[str, set[Any]] = {
        "dtype": {f"{c.dtype}/{c.cache_dtype}".rstrip("/") for c in cases},
        "dims": {(c.family.head_dim, c.family.head_dim_v) for c in cases},
        "group": {c.family.group for c in cases},
        "kv_heads": {c.family.kv_heads for c in cases},
        "page_size": {c.page_size for c in cases},
        "mask": {next(n for n, m in MASKS.items() if m == (c.family.causal, c.family.window)) for c in cases},
        "softcap": {c.family.softcap for c in cases},
        "sinks": {c.sinks for c in cases},
        "scales": {c.scales for c in cases},
        "scale": {{1.0: "1", 0.07: "0.07"}.get(c.family.scale, "1/sqrt(d)") for c in cases},
        "geometry": set(FACTORS["geometry"]),  # tests of its own
        "layout": {c.layout for c in cases},
        "padded_seqs": {c.padded_seqs for c in cases},
        "give_out": {c.give_out for c in cases},
    }

    assert {name: set(values) for name, values in FACTORS.items()} == seen
    assert {len(c.q_lens) for c in cases} >= {1, 4, 8, 20, 70}
    assert all((c.sinks != "none") == c.family.sinks for c in cases)


@pytest.mark.parametrize("seed", range(3))
def test_every_format_meets_the_largest_logits_without_a_softcap(seed: int) -> None:
    """Under a cap no logit leaves the range of fp16: a kernel that keeps them in fp16 would pass."""
    record = Record(dtypes=("bf16", "fp16", "fp32"), head_dims=(64,))
    cases = build(Scope(record=record, parameters=ALL), profile="default", seed=seed).cases
    met = {(c.dtype, c.inputs) for c in cases if not c.family.softcap and not c.cache_dtype and max(c.kv_lens) > 64}

    assert met >= {(dtype, inputs) for dtype in record.dtypes for inputs in ("logits-3e3", "logits-3e4")}


def test_every_way_to_limit_a_window_is_judged() -> None:
    """Left, right, both, neither, under the causal rule and without; -1 is no limit."""
    ways = {(causal, left >= 0, right >= 0) for causal, (left, right) in MASKS.values()}

    assert ways >= {(False, a, b) for a in (False, True) for b in (False, True)} | {(True, False, False), (True, True, True)}
    assert any(causal and right > 0 for causal, (_, right) in MASKS.values())


# The same arguments


def test_the_same_arguments_give_the_same_cases(default: Suite) -> None:
    again = build(FULL, profile="default", seed=0)

    assert again == default
    assert again.digest() == default.digest()


def test_another_seed_gives_other_cases(default: Suite) -> None:
    """Other lengths, other pairs of values in a case, other numbers: a kernel cannot be tuned to the suite."""
    other = build(FULL, profile="default", seed=1)

    assert other.digest() != default.digest()
    assert not {c.seed for c in other.cases} & {c.seed for c in default.cases}
    assert {c.kv_lens for c in grid(other)} - {c.kv_lens for c in grid(default)}
    assert {c.family.name for c in grid(other)} - {c.family.name for c in grid(default)}


def test_no_two_cases_share_a_name_or_a_seed(default: Suite) -> None:
    assert max(Counter(c.name for c in default.cases).values()) == 1
    assert max(Counter(c.seed for c in default.cases if not c.name.startswith("promised")).values()) == 1


# What a kernel has not declared


@pytest.mark.parametrize(
    ("one", "gone"),
    [
        (scope(frozenset({"causal"})), lambda c: not c.family.causal),
        (scope(frozenset({"window_size"})), lambda c: c.family.window != (-1, -1)),
        (scope(frozenset({"softcap"})), lambda c: c.family.softcap != 0),
        (scope(frozenset({"sinks"})), lambda c: c.sinks != "none"),
        (scope(frozenset({"k_scale"})), lambda c: c.scales != "none"),
        (scope(frozenset({"q_scale"})), lambda c: c.scales in ("scalar", "per-head", "per-sequence")),
        (scope(frozenset({"num_seqs"})), lambda c: c.padded_seqs > 0),
        (scope(dtypes=("fp16",)), lambda c: c.dtype != "fp16"),
        (scope(cache_dtypes=()), lambda c: c.cache_dtype != ""),
        (scope(head_dims=(64,), uneven_head_dims=()), lambda c: (c.family.head_dim, c.family.head_dim_v) != (64, 64)),
        (scope(uneven_head_dims=()), lambda c: c.family.head_dim != c.family.head_dim_v),
        (scope(page_sizes=(32, 64)), lambda c: c.page_size not in (32, 64)),
        (scope(groups=(4, 8)), lambda c: c.family.group not in (4, 8)),
        (scope(precision=Precision()), lambda c: c.inputs == "logits-1e36"),
        (scope(precision=Precision(flush_to_zero=True)), lambda c: c.inputs == "tiny-v"),
    ],
    ids=["causal", "window", "softcap", "sinks", "k_scale", "q_scale", "num_seqs", "dtype", "cache", "dims", "uneven", "page",
         "group", "subtract-first", "flush"],
)  # fmt: skip
def test_a_kernel_gets_no_case_that_it_has_not_declared_and_what_it_misses_is_counted(
    default: Suite, one: Scope, gone: Any
) -> None:
    """Must-fail: the wide kernel does get such cases.  Factors shrink; skipped cases carry their reasons."""
    narrow = build(one, profile="default", seed=0)

    assert any(gone(c) for c in default.cases)
    assert not any(gone(c) for c in narrow.cases)
    assert all(one.refuses(c) is None for c in narrow.cases)
    assert len(narrow.skipped) > len(build(scope(), profile="quick", seed=0).skipped)
    assert all(one.refuses(c) == reason for c, reason in narrow.skipped)


def test_the_wide_kernel_misses_nothing(default: Suite) -> None:
    assert default.skipped == ()


@pytest.mark.parametrize(
    "record",
    [
        {"head_dims": (72,), "uneven_head_dims": ()},
        {"head_dims": (512,), "uneven_head_dims": (), "groups": (8,), "page_sizes": (64,)},
        {"head_dims": (), "uneven_head_dims": ((96, 64),)},
        {"groups": (3, 10)},
        {"page_sizes": (48,)},
        {"dtypes": ("fp32",), "cache_dtypes": ()},
        {"dtypes": ("fp16",)},
    ],
)
def test_values_outside_the_table_are_judged_where_a_kernel_declares_them(record: dict[str, Any]) -> None:
    """A full covering array, long contexts included, for a head dim, a group or a page size that the table does not have."""
    one = scope(**record)
    suite = build(one, profile="default", seed=0)

    assert len(grid(suite)) > 40
    assert any(max(c.kv_lens) > 32_768 for c in suite.cases)
    for dims in one.record.head_dims:
        assert any(c.family.head_dim == dims for c in grid(suite))
    for group in one.record.groups or ():
        assert any(c.family.group == group for c in grid(suite))
    for page in one.record.page_sizes:
        assert any(c.page_size == page for c in grid(suite))
    if one.record.cache_dtypes:
        assert any(c.cache_dtype for c in grid(suite))
    assert {c.inputs for c in suite.cases} >= set(INPUT_CLASSES)


# Classes, families, long contexts


def test_every_class_is_judged_in_two_families_and_in_the_array(default: Suite) -> None:
    """And every family with two classes at the least."""
    table = [c for c in default.cases if c.family.name in FAMILIES]
    for inputs in INPUT_CLASSES:
        assert len({c.family.name for c in table if c.inputs == inputs}) >= 2
        assert sum(c.inputs == inputs for c in grid(default)) >= 4
    for family in FAMILIES:
        assert len({c.inputs for c in table if c.family.name == family}) >= 2


def test_the_edge_of_every_family_s_window_lies_inside_one_case(default: Suite) -> None:
    """Wide windows too, whose other cases are shorter."""
    for family in FAMILIES.values():
        if family.window[0] >= 0:
            reach = max(max(c.kv_lens) for c in default.cases if c.family == family)
            assert reach > family.window[0] + 1


def test_long_contexts_are_judged_with_every_option(default: Suite) -> None:
    """Beyond 4,096 keys: plain, under each option, and at the largest head dim; probe-v reads every page of them."""
    long = [c for c in default.cases if max(c.kv_lens) > 4096]

    assert {c.name for c in long} >= {f"long-4k/{option}" for option in (*LONG_OPTIONS, "widest")}
    assert any(c.sinks == "dominant" for c in long)
    assert any(c.family.window[0] == 2047 for c in long)
    assert any(c.cache_dtype and c.scales != "none" for c in long)
    assert any(c.family.head_dim == 576 for c in long)
    assert {c.dtype for c in long} == {"bf16", "fp16", "fp32"}
    assert any(c.inputs == "probe-v" for c in long)
    assert any(c.inputs == "probe-v" and max(c.kv_lens) > 32_768 for c in long)


def test_captures_are_judged_as_a_prompt_s_end_and_as_a_decode_step(default: Suite) -> None:
    captured = [c for c in default.cases if c.captured]

    assert sorted(c.q_lens for c in captured) == [(1,)] * 3 + [(96,)] * 3
    assert {c.kv_lens for c in captured} == {(640,), (256,)}


@pytest.mark.parametrize("families", [("gemma4-global",), ("llama3", "gpt-oss-full"), ("smollm2",)])
def test_families_asked_for_by_name_are_the_only_ones(families: tuple[str, ...]) -> None:
    """With every class in each of them, and a covering array of what a family leaves open."""
    suite = build(FULL, profile="default", seed=0, families=families)

    assert {c.family.name for c in suite.cases} == set(families)
    for name in families:
        mine = [c for c in suite.cases if c.family.name == name]
        assert {c.inputs for c in mine} >= set(INPUT_CLASSES)
        assert {c.scales for c in mine} == set(FACTORS["scales"])
        assert {c.page_size for c in mine} == set(FACTORS["page_size"])
        assert all(c.family == FAMILIES[name] for c in mine)
    assert any(c.captured for c in suite.cases) == ("smollm2" in families)


def test_a_family_that_a_kernel_cannot_take_is_skipped_not_passed() -> None:
    """The family's own sinks are not left out to make it fit."""
    one = Scope(record=WIDE, parameters=ALL - {"sinks"})
    suite = build(one, profile="default", seed=0, families=("gpt-oss-full",))

    assert suite.cases == ()
    assert {reason for _, reason in suite.skipped} == {"no sinks"}


# Order, rows, profiles


def test_cheap_cases_come_first(default: Suite) -> None:
    cases = [c for c in default.cases if "+again" not in c.name]

    assert [work(c) for c in cases] == sorted(work(c) for c in cases)


def test_a_twin_follows_its_original_with_equal_shapes_and_other_data(default: Suite) -> None:
    """The sequences in reverse order, another page table, the same shapes of every tensor."""
    twins = [(i, c) for i, c in enumerate(default.cases) if c.name.endswith("+again")]
    assert len(twins) == 6
    for i, twin in twins:
        original = default.cases[i - 1]
        assert twin.name == f"{original.name}+again"
        assert twin.seed != original.seed
        assert replace(twin, name="", seed=0, q_lens=(), kv_lens=()) == replace(original, name="", seed=0, q_lens=(), kv_lens=())
        assert (twin.q_lens, twin.kv_lens) == (original.q_lens[::-1], original.kv_lens[::-1])
    assert any(c.q_lens != c.q_lens[::-1] or c.kv_lens != c.kv_lens[::-1] for _, c in twins)


def test_the_default_profile_judges_five_million_elements(default: Suite) -> None:
    """Of a wide record, of the default one, and of one with so few heads that it takes several arrays."""
    for one in (FULL, Scope(record=Record(), parameters=frozenset()), NARROW):
        assert elements(build(one, profile="default", seed=0).cases) >= ELEMENTS
    assert elements(build(NARROW, profile="quick", seed=0).cases) >= QUICK_ELEMENTS
    assert elements(default.cases) == sum(
        len(sample_rows(c, c.rows)) * c.family.q_heads * c.family.head_dim_v for c in default.cases
    )


def test_each_case_judges_as_many_rows_as_a_fault_in_a_hundred_asks_for(default: Suite) -> None:
    """(row, head) pairs: 459 of them, or all."""
    assert all(min(c.total_q, len(sample_rows(c, c.rows))) * c.family.q_heads >= rows_needed(0.01, 0.99)
               for c in default.cases if c.total_q * c.family.q_heads >= 459 + c.family.q_heads)  # fmt: skip


@pytest.mark.parametrize("one", [FULL, Scope(record=Record(), parameters=ALL), Scope(record=Record(), parameters=frozenset())])
def test_the_quick_profile_is_about_a_tenth(one: Scope) -> None:
    """Of the cases; a hundredth of the work, since interpreted kernels are slow.  Every option of the kernel is among them."""
    whole, quick = (build(one, profile=p, seed=0) for p in ("default", "quick"))

    assert 0.05 < len(quick.cases) / len(whole.cases) < 0.15
    assert sum(map(work, quick.cases)) < 0.1 * sum(map(work, whole.cases))
    assert elements(quick.cases) >= QUICK_ELEMENTS
    assert any(c.captured for c in quick.cases)
    assert any(c.name.endswith("+again") for c in quick.cases)
    assert any(c.family.name in FAMILIES for c in quick.cases)


def test_the_deep_profile_holds_three_arrays(default: Suite) -> None:
    deep = build(FULL, profile="deep", seed=0)

    assert set(default.cases) - set(deep.cases) <= {c for c in default.cases if "+again" in c.name}
    assert len(grid(deep)) > 2.5 * len(grid(default))
