"""Coverage: a full scope misses nothing, and whatever is taken away is missed by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from oracle.cases import Case
from oracle.contract import OPTIONAL, Precision, Record
from oracle.coverage import OPTIONS, UNSEEN_WITHOUT_LSE, Exercised, coverage, planned, with_relations
from oracle.families import FAMILIES
from oracle.inputs import INPUT_CLASSES
from oracle.pool import QUICK_FILLS, Fill
from oracle.relations.judge import planned_relations
from oracle.relations.table import RELATIONS
from oracle.scope import Scope
from oracle.suite import ELEMENTS, build
from oracle.verdict import Coverage

WIDE = Record(
    dtypes=("bf16", "fp16", "fp32"), cache_dtypes=("e4m3",), head_dims=(40, 64, 80, 96, 128, 256, 512),
    uneven_head_dims=((192, 128), (128, 64), (64, 128), (576, 512)), page_sizes=(1, 8, 16, 32, 64, 128, 256),
    precision=Precision(subtract_first=True),
)  # fmt: skip
ALL = frozenset(OPTIONAL)
FULL = Scope(record=WIDE, parameters=ALL)
SUITE = build(FULL, profile="default", seed=0)
QUICK = build(FULL, profile="quick", seed=0)
RAN = planned(SUITE, has_lse=True)
WHOLE = [replace(r, case=replace(r.case, rows=10**6)) for r in RAN]  # all rows judged: faster to count


def missing_where(change: Callable[[Case], Case]) -> set[str]:
    """What is missed where cases are changed like this; counts are cut off."""
    changed = [replace(r, case=change(r.case)) for r in WHOLE]
    assert changed != WHOLE
    return {label.split(": ")[0] for label in coverage(FULL, SUITE, changed).missing}


def pair_labels(option: str) -> set[str]:
    """The option and every pair that it is part of."""
    return {f"option {option}"} | {
        label
        for label in coverage(FULL, SUITE, WHOLE).counts
        if label.startswith("options ") and option in label[8:].split(" + ")
    }


def of_family(**changes: Any) -> Callable[[Case], Case]:
    return lambda case: replace(case, family=replace(case.family, **changes))


# each option taken out of a case, with all else as it was
WITHOUT: dict[str, Callable[[Case], Case]] = {
    "not causal": of_family(causal=True),
    "window": of_family(window=(-1, -1)),
    "softcap": of_family(softcap=0.0),
    "sinks": lambda case: replace(case, sinks="none"),
    "scales": lambda case: replace(case, scales="none"),
    "num_seqs": lambda case: replace(case, padded_seqs=0),
    "out given": lambda case: replace(case, give_out=False),
    "8-bit cache": lambda case: replace(case, cache_dtype=""),
    "uneven head dims": lambda case: replace(case, family=replace(case.family, head_dim=case.family.head_dim_v)),
}


def test_a_suite_for_a_wide_kernel_misses_nothing() -> None:
    """And counts everything that it could miss, with more than one case behind nearly all of it."""
    whole = coverage(FULL, SUITE, RAN)

    assert whole.missing == whole.left_out == whole.unseen == ()
    assert whole.skipped == {}
    assert whole.cases == len(SUITE.cases)
    assert whole.elements >= ELEMENTS
    assert min(whole.counts.values()) >= 2
    assert set(WITHOUT) == set(OPTIONS)
    assert sum(label.startswith("options ") for label in whole.counts) == len(OPTIONS) * (len(OPTIONS) - 1) // 2


@pytest.mark.parametrize(
    "scope",
    [
        FULL,
        Scope(record=Record(), parameters=ALL),
        Scope(record=Record(), parameters=frozenset()),
        Scope(record=Record(), parameters=frozenset({"k_scale", "v_scale", "out"})),
        Scope(record=replace(WIDE, head_dims=(512,), uneven_head_dims=(), groups=(8,), page_sizes=(64,)), parameters=ALL),
        Scope(record=replace(WIDE, dtypes=("fp16",)), parameters=ALL),
        Scope(record=Record(head_dims=(64,), groups=(1,)), parameters=frozenset({"causal", "out"})),
    ],
    ids=["wide", "no record", "no option", "kv scales", "one head dim", "fp16", "small"],
)
def test_the_default_suite_of_any_scope_covers_what_it_declares(scope: Scope) -> None:
    suite = build(scope, profile="default", seed=1)

    assert coverage(scope, suite, planned(suite, has_lse=True)).missing == ()


def test_zero_cases_miss_everything() -> None:
    """Every single thing that is counted, but for the pairs of values, which are only counted."""
    nothing = coverage(FULL, SUITE, [])

    assert set(nothing.counts.values()) == {0}
    assert {label.split(": ")[0] for label in nothing.missing} == set(nothing.counts) - {"value pairs of the parameter table"}
    assert (nothing.cases, nothing.rows, nothing.elements) == (0, 0, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_did_not_run_is_missed(family: str) -> None:
    """And nothing else is."""
    other = replace(FAMILIES[family], name="other")

    assert missing_where(lambda c: replace(c, family=other) if c.family.name == family else c) == {f"family {family}"}


@pytest.mark.parametrize("inputs", INPUT_CLASSES)
def test_an_input_class_that_did_not_run_is_missed(inputs: str) -> None:
    """Nor is one family enough for a class."""
    other = "flat" if inputs == "randn" else "randn"
    assert missing_where(lambda c: replace(c, inputs=other) if c.inputs == inputs else c) == {f"inputs {inputs} (families)"}

    only = next(c.family.name for c in SUITE.cases if c.inputs == inputs)
    elsewhere = {
        label.split(": ")[0]
        for label in coverage(
            FULL,
            SUITE,
            [
                replace(r, case=replace(r.case, inputs=other)) if r.case.inputs == inputs and r.case.family.name != only else r
                for r in WHOLE
            ],
        ).missing
    }
    assert elsewhere == {f"inputs {inputs} (families)"}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_did_not_run_is_missed_with_every_pair_of_it(option: str) -> None:
    """And nothing else is."""
    assert missing_where(WITHOUT[option]) == pair_labels(option)


@pytest.mark.parametrize(
    ("one", "two"), [("softcap", "sinks"), ("window", "8-bit cache"), ("scales", "num_seqs"), ("not causal", "uneven head dims")]
)
def test_a_pair_of_options_that_did_not_meet_is_missed(one: str, two: str) -> None:
    """By itself: each of the two ran, and met others."""

    def apart(case: Case) -> Case:
        if not (OPTIONS[one](case) and OPTIONS[two](case)):
            return case
        return WITHOUT[one](case)

    assert missing_where(apart) == {f"options {one} + {two}"}


def filled(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(1, n) for n in lengths)


def shortened(limit: int) -> Callable[[Case], Case]:
    return lambda case: replace(case, kv_lens=tuple(min(n, limit) for n in case.kv_lens))


@pytest.mark.parametrize(
    ("missed", "change"),
    [
        ({"sequences without queries"}, lambda c: replace(c, q_lens=filled(c.q_lens))),
        ({"sequences without keys"}, lambda c: replace(c, kv_lens=filled(c.kv_lens))),
        ({"decode rows beside prefill rows"}, lambda c: replace(c, q_lens=tuple(2 if n == 1 else n for n in c.q_lens))),
        ({"cases beyond 4,096 keys", "cases beyond 32,768 keys"}, shortened(4096)),
        ({"cases beyond 32,768 keys"}, shortened(32_768)),
        ({"captured inputs"}, lambda c: replace(c, captured="")),
        ({"judged output elements"}, of_family(q_heads=1, kv_heads=1)),
    ],
    ids=["queries", "keys", "mixed", "4k", "32k", "captured", "elements"],
)  # fmt: skip
def test_a_kind_of_batch_that_did_not_run_is_missed(missed: set[str], change: Callable[[Case], Case]) -> None:
    """And nothing else is."""
    assert missing_where(change) == missed


@pytest.mark.parametrize("fill", Fill)
def test_a_fill_that_was_not_tried_is_missed(fill: Fill) -> None:
    """By itself; one that the record promises away is not, and the verdict says so."""
    ran = [replace(r, fills=tuple(f for f in r.fills if f is not fill)) for r in WHOLE]
    assert coverage(FULL, SUITE, ran).missing == (f"fill {fill}",)

    finite = Scope(record=replace(WIDE, finite_tails=True), parameters=ALL)
    told = coverage(finite, SUITE, ran)
    assert told.missing == ((f"fill {fill}",) if fill.finite else ())
    assert any("finite values past the plan" in text for text in told.unseen)


def test_too_few_elements_are_missed_with_their_number() -> None:
    few = coverage(FULL, SUITE, RAN[:100])

    assert few.elements < ELEMENTS
    assert f"judged output elements: {few.elements} of {ELEMENTS}" in few.missing


def test_elements_and_rows_are_those_that_ran() -> None:
    one = coverage(FULL, SUITE, RAN[:1])
    case = RAN[0].case

    assert one.rows > 0
    assert one.elements == one.rows * case.family.q_heads * case.family.head_dim_v


def test_a_kernel_without_an_lse_is_told_what_goes_unseen() -> None:
    assert coverage(FULL, SUITE, planned(SUITE, has_lse=False)).unseen == (UNSEEN_WITHOUT_LSE,)
    assert coverage(FULL, SUITE, [*RAN[:-1], replace(RAN[-1], has_lse=False)]).unseen == (UNSEEN_WITHOUT_LSE,)


def test_skipped_cases_are_counted_by_reason() -> None:
    """Never as run."""
    scope = Scope(record=Record(), parameters=frozenset())
    suite = build(scope, profile="default", seed=0)
    counted = coverage(scope, suite, planned(suite, has_lse=False))

    assert sum(counted.skipped.values()) == len(suite.skipped)
    assert {"no softcap", "no sinks", "no window_size", "no fp32"} <= set(counted.skipped)


# What is not declared is not asked for, and what is taken is


@pytest.mark.parametrize(
    ("parameter", "option"),
    [("causal", "not causal"), ("window_size", "window"), ("softcap", "softcap"), ("sinks", "sinks"), ("num_seqs", "num_seqs"),
     ("out", "out given")],
)  # fmt: skip
def test_an_option_is_asked_for_exactly_where_it_is_taken(parameter: str, option: str) -> None:
    def labels(parameters: frozenset[str]) -> Sequence[str]:
        return list(coverage(Scope(record=WIDE, parameters=parameters), SUITE, WHOLE).counts)

    assert any(option in label for label in labels(ALL) if label.startswith("option"))
    assert not any(option in label.split(" + ") for label in labels(ALL - {parameter}) if label.startswith("option"))


@pytest.mark.parametrize(
    "taken", [{"q_scale"}, {"k_scale"}, {"v_scale"}, {"k_scale", "v_scale"}, {"q_scale", "k_scale", "v_scale"}]
)
def test_a_scale_that_is_taken_must_be_given(taken: set[str]) -> None:
    """One alone, which no case gives, is missed: an argument that is never given could be ignored unseen."""
    scope = Scope(record=WIDE, parameters=frozenset(taken))
    suite = build(scope, profile="default", seed=0)
    missed = "option scales" in coverage(scope, suite, planned(suite, has_lse=True)).missing

    assert missed == (not {"k_scale", "v_scale"} <= taken)


# Families by name, and the quick profile


def restricted(families: tuple[str, ...], left: Callable[[Exercised], bool] = lambda r: True) -> Coverage:
    suite = build(FULL, profile="default", seed=0, families=families)
    return coverage(FULL, suite, [r for r in planned(suite, has_lse=True) if left(r)])


@pytest.mark.parametrize("families", [("llama3",), ("gemma4-global", "gpt-oss-sliding")])
def test_families_asked_for_by_name_are_all_that_is_asked_for(families: tuple[str, ...]) -> None:
    """Every class in one family is enough; no long contexts, no captures, none of the options that a family fixes."""
    told = restricted(families)

    assert told.missing == ()
    assert {label for label in told.counts if label.startswith("family ")} == {f"family {name}" for name in families}
    assert not any("keys" in label and "beyond" in label for label in told.counts)
    assert {label for label in told.counts if label.startswith("option ")} == {
        f"option {name}" for name in ("scales", "num_seqs", "out given", "8-bit cache")
    }


def test_a_family_asked_for_that_did_not_run_is_missed() -> None:
    told = restricted(("llama3", "mqa"), lambda r: r.case.family.name == "mqa")

    assert told.missing == ("family llama3",)


def test_a_class_that_did_not_run_in_a_family_asked_for_is_missed() -> None:
    told = restricted(("llama3",), lambda r: r.case.inputs != "ties")

    assert told.missing == ("inputs ties (families)",)


def test_the_quick_profile_says_what_it_leaves_out() -> None:
    """It misses nothing that it must have: every option, the kinds of batch, three fills, captured inputs."""
    told = coverage(FULL, QUICK, planned(QUICK, has_lse=True))

    assert told.missing == ()
    assert {"cases beyond 4,096 keys", "cases beyond 32,768 keys"} <= set(told.left_out)
    assert {f for r in planned(QUICK, has_lse=True) for f in r.fills} == {Fill.STALE, *QUICK_FILLS}


@pytest.mark.parametrize("option", OPTIONS)
def test_the_quick_profile_must_try_every_option_as_well(option: str) -> None:
    ran = [replace(r, case=WITHOUT[option](r.case)) for r in planned(QUICK, has_lse=True)]

    assert coverage(FULL, QUICK, ran).missing == (f"option {option}",)


# Relations


def test_a_relation_that_the_scope_allows_and_that_did_not_run_is_missed() -> None:
    covered = coverage(FULL, SUITE, WHOLE)
    ran = planned_relations(FULL, quick=False)

    whole = with_relations(covered, FULL, SUITE, ran)
    assert whole.missing == () and {f"relation {name}" for name in RELATIONS} <= set(whole.counts)
    for name in RELATIONS:
        assert with_relations(covered, FULL, SUITE, ran | {name: 0}).missing == (f"relation {name}",)
    assert set(with_relations(covered, FULL, SUITE, {}).missing) == {f"relation {name}" for name in RELATIONS}


def test_a_relation_that_the_scope_rules_out_is_skipped_by_name() -> None:
    scope = Scope(record=WIDE, parameters=ALL - {"softcap"})
    told = with_relations(coverage(scope, SUITE, WHOLE), scope, SUITE, planned_relations(scope, quick=False))

    assert told.skipped == {"relation softcap-of-all: no softcap": 1}
    assert "relation softcap-of-all" not in told.counts and told.missing == ()


def test_the_quick_profile_leaves_most_relations_out_and_says_so() -> None:
    covered = coverage(FULL, QUICK, planned(QUICK, has_lse=True))
    few = planned_relations(FULL, quick=True)
    told = with_relations(covered, FULL, QUICK, few)

    assert told.missing == () and {f"relation {name}" for name in set(RELATIONS) - set(few)} <= set(told.left_out)
    assert set(with_relations(covered, FULL, QUICK, {}).missing) == {f"relation {name}" for name in few}
