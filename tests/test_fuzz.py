"""A search finds rare faults, makes them small, says them in five lines, and turns no correct kernel away."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.accept import Candidate
from oracle.case_text import in_words
from oracle.casefile import CaseFile, read
from oracle.cases import Case
from oracle.contract import OPTIONAL, Call, Record
from oracle.errors import InputError
from oracle.exercised import OPTIONS, pair_counts
from oracle.families import Family
from oracle.fuzz import Limits, Searched, named, search
from oracle.isolation.locate import load
from oracle.isolation.outcome import Description, Failure, FailureKind, Returned
from oracle.isolation.process import KernelProcess
from oracle.judged import sorted_out
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import record_of
from oracle.replay_text import found_text, searched_text
from oracle.scope import Scope
from oracle.shrink import size, smallest
from oracle.trial import Trial, prepare
from oracle.verdict import Finding, Reason

WRONG = Path(__file__).with_name("wrong_by_path.py")
FOREVER = math.inf
SMALL = replace(
    record_of(Arithmetic()), head_dims=(40, 64), uneven_head_dims=(), page_sizes=(16, 8, 1)
)  # as quick as a search gets


@cache
def wrong() -> ModuleType:
    """The wrong kernels; their file imports its neighbour, whose folder no other test needs on sys.path."""
    before = list(sys.path)
    try:
        return load(f"{WRONG}:textbook")[1]
    finally:
        sys.path[:] = before


class Here(KernelProcess):
    """A kernel called in this process: starting one takes longer than a hundred examples."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        super().__init__("here")
        self._kernel = kernel
        self.started = 0

    def close(self) -> None:
        self.started += 1

    def describe(self) -> Description | Failure:
        raise NotImplementedError

    def call(self, call: Call, timeout_s: float, want_lse: bool = False) -> Returned | Failure:
        keywords, storage = call.keywords(), None
        if call.out is not None:
            storage = _bytes(call.out).clone()
            like = call.out
            keywords["out"] = storage.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())
        try:
            result = self._kernel(call.q, call.k_cache, call.v_cache, **keywords, return_lse=want_lse)
        except ArithmeticError as problem:
            return Failure(kind=FailureKind.EXCEPTION, text=f"raised {problem}")
        out, lse = result if want_lse else (result, None)
        return Returned(out=out, out_storage=storage, lse=lse, seconds=0.0, changed_inputs=())


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def candidate(kernel: Callable[..., Any], record: Record = SMALL, parameters: tuple[str, ...] = OPTIONAL) -> Candidate:
    description = Description(
        target="here",
        parameters=parameters,
        required=(),
        has_var_keyword=False,
        record=record,
        source_sha256=None,
        doc="",
        version=None,
    )
    scope = Scope(record=record, parameters=frozenset(parameters))
    return Candidate(name="here", process=Here(kernel), description=description, record=record, scope=scope)


@cache
def searched(name: str, seed: int = 0, examples: int = 100) -> Searched:
    """What a search shows of a kernel of WRONG."""
    return search(candidate(getattr(wrong(), name)), seed, Limits(search_s=FOREVER, shrink_s=FOREVER, examples=examples))


def test_a_correct_kernel_is_not_turned_away() -> None:
    seen = searched("textbook", examples=20)

    assert seen.found is None and not seen.interrupted
    assert len(seen.cases) == len(set(seen.cases)) == 20
    assert 0 < seen.max_e_det <= 1 and seen.max_e_lse > 0
    assert searched_text(seen).startswith("nothing found: 20 examples in ")


QUICK = ("heads_modulo_and_not_divided", "tail_of_the_last_page_times_zero")  # to shrink; ci/fuzz.py has all of them


@pytest.mark.parametrize("name", QUICK)
def test_a_rare_fault_is_found_and_made_small(name: str) -> None:
    one = searched(name).found

    assert one is not None and one.finished and one.alone
    assert one.judged.reason in wrong().FAULTS[name]
    case = one.judged.case
    assert len(case.q_lens) <= 2 and case.total_q + case.total_k <= 40
    assert (case.layout, case.padded_seqs, case.tail_rows, case.inputs) == ("plain", 0, 0, "randn")


def test_same_seed_same_cases_and_another_seed_others() -> None:
    first = searched("textbook", examples=20).cases

    assert searched("textbook", examples=12).cases == first[:12]
    assert set(searched("textbook", seed=1, examples=6).cases[1:]) - set(first[:6])  # both begin with the simplest one


def test_the_smallest_case_is_drawn_first() -> None:
    assert in_words(searched("textbook", examples=20).cases[0]) == (
        "1 query on 1 key; 1 query head on 1 kv head, head dim 40, bf16, pages of 16; causal; randn inputs"
    )


def test_a_kernel_that_raises_is_found_too() -> None:
    def raises(q: Tensor, k_cache: Tensor, v_cache: Tensor, **keywords: Any) -> Any:
        if keywords["softcap"]:
            raise ArithmeticError("made up")
        return wrong().textbook(q, k_cache, v_cache, **keywords)

    one = search(candidate(raises), 0, Limits(search_s=FOREVER, shrink_s=FOREVER, examples=100)).found

    assert one is not None and one.judged.reason is Reason.EXCEPTION
    assert len(one.judged.case.q_lens) == 1 and one.judged.case.family.softcap > 0


def test_what_shows_only_after_other_calls_is_said_to() -> None:
    """A kernel that answers every fourth call with zeros, of which its first call in a process is none."""
    process: Here
    made = 0

    def every_fourth(q: Tensor, k_cache: Tensor, v_cache: Tensor, **keywords: Any) -> Any:
        nonlocal made
        made += 1
        out = wrong().textbook(q, k_cache, v_cache, **keywords)
        fresh = process.started > 0
        return torch.zeros_like(out) if isinstance(out, Tensor) and made > 20 and not fresh else out

    one = candidate(every_fourth)
    assert isinstance(one.process, Here)
    process = one.process
    seen = search(one, 0, Limits(search_s=FOREVER, shrink_s=0.0, examples=100)).found

    assert seen is not None and seen.alone is False and not seen.finished
    text = found_text("here", seen, Path("case.toml"))
    assert "it shows only after other calls" in text and "shrinking was cut short" in text


def test_first_cases_that_differ_when_called_again_are_found() -> None:
    """Each case is called eight times, and the first ones once more at the end."""
    times: Counter[bytes] = Counter()

    def right_eight_times(q: Tensor, k_cache: Tensor, v_cache: Tensor, **keywords: Any) -> Any:
        live = int(keywords["cu_seqlens_q"][-1 if keywords["num_seqs"] is None else keywords["num_seqs"]])
        data = q[:live].contiguous().view(torch.uint8).numpy().tobytes()
        times[data] += 1
        result = wrong().textbook(q, k_cache, v_cache, **keywords)
        if times[data] > 8 and keywords["return_lse"]:
            result[0][:live] = 0.0
        return result

    one = search(candidate(right_eight_times), 0, Limits(search_s=FOREVER, examples=2)).found

    assert one is not None and one.judged.reason is Reason.LATER_CALL and one.alone is False
    assert one.judged.faults[0].case == one.judged.case.name


@pytest.mark.parametrize(("name", "finds"), [("textbook", False), ("heads_modulo_and_not_divided", True)])
def test_an_interrupt_keeps_what_was_found(name: str, finds: bool) -> None:
    """Ctrl-C at the tenth example, or at the first one after something was found."""
    done = 0

    def progress(seconds: float, what: str) -> None:
        nonlocal done
        done += 1
        if "shrinking" in what or (done == 10 and not finds):
            raise KeyboardInterrupt

    seen = search(candidate(getattr(wrong(), name)), 0, Limits(search_s=FOREVER, examples=100), progress)

    assert seen.interrupted
    assert (seen.found is not None) == finds
    assert len(seen.cases) == done - 1


def test_a_kernel_without_input_classes_is_wrong_usage() -> None:
    one = candidate(print)
    one.scope = replace(one.scope, extras=frozenset({"nobody_brings_this"}))

    with pytest.raises(InputError, match="no input class brings the case extras"):
        search(one, 0, Limits(search_s=FOREVER))


def test_five_lines_say_what_where_and_how_to_see_it_again() -> None:
    one = searched("heads_modulo_and_not_divided").found
    assert one is not None
    lines = found_text("my.py:kernel", one, Path("there/case.toml")).splitlines()

    assert [line.split()[0] for line in lines[:5]] == ["called", "wrong", "got", "where", "replay"]
    assert lines[0].startswith("called   my.py:kernel: 1 query on ")
    assert "error-exceeds-bound" in lines[1] or "lse-exceeds-bound" in lines[1]
    assert "; expected " in lines[2] and ", within " in lines[2]
    assert lines[3].startswith("where    row 0 (sequence 0, query 0 of 1, position 0 of 1, page 0 slot 0), head ")
    assert lines[4] == "replay   oracle replay there/case.toml"


# What counts

PLAIN = Case(
    name="plain",
    family=Family(name="f", q_heads=2, kv_heads=1, head_dim=64, head_dim_v=64, scale=1.0),
    dtype="fp32",
    q_lens=(3,),
    kv_lens=(70,),
)


@pytest.mark.parametrize(
    ("limit", "name", "reasons"),
    [
        ("b", "inspect", [Reason.ERROR]),
        ("b_det", "faults", [Reason.ERROR]),
        ("b_lse", "inspect", [Reason.LSE]),
        ("b_lse_det", "faults", [Reason.LSE]),
    ],
)
def test_an_error_within_the_worst_case_is_to_be_inspected_and_one_beyond_is_a_fault(
    limit: str, name: str, reasons: list[Reason]
) -> None:
    """1.2 times the limit, at the element where the worst case allows the most beyond it."""
    prepared = prepare(PLAIN, SMALL)
    bound, exact = prepared.truth.bound, prepared.truth.exact
    natural, worst = (bound.b_lse, bound.b_lse_det) if "lse" in limit else (bound.b, bound.b_det)
    at = torch.unravel_index((worst / natural).argmax(), worst.shape)
    assert float(worst[at] / natural[at]) > 2
    wrong = {"out": exact.out.clone(), "lse": exact.lse.clone()}
    wrong["lse" if "lse" in limit else "out"][at] += 1.2 * getattr(bound, limit)[at]

    def kernel(q: Tensor, k_cache: Tensor, v_cache: Tensor, *, out: Tensor, return_lse: bool, **keywords: Any) -> Any:
        out[:3] = wrong["out"]
        return (out, torch.cat([wrong["lse"], torch.zeros(len(q) - 3, 2)]).float()) if return_lse else out

    judged = sorted_out(prepared, Trial(Here(kernel), SMALL).run(prepared))

    assert {"faults": judged.faults, "inspect": judged.inspect} == {
        name: judged.seen.findings,
        ({"faults", "inspect"} - {name}).pop(): (),
    }
    assert [f.reason for f in judged.seen.findings] == reasons


@pytest.mark.parametrize("reason", [Reason.ERROR, Reason.NOT_FINITE, Reason.LEAK, Reason.CANARY])
def test_what_is_no_rounding_is_a_fault_however_small_the_errors(reason: Reason) -> None:
    """Rows that were never written, say, where none of them is judged: an error without a size."""
    prepared = prepare(PLAIN, SMALL)
    seen = Trial(Here(wrong().textbook), SMALL).run(prepared)
    told = Finding(reason=reason, case=PLAIN.name, text="made up")

    assert seen.findings == () and seen.candidate is not None and seen.candidate.worst_det <= 1
    assert sorted_out(prepared, replace(seen, findings=(told,))).faults == (told,)


COMMITTED = read(Path(__file__).parents[1] / "ci" / "cases")


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.case.name)
def test_a_committed_case_shows_its_fault_and_nothing_of_a_correct_kernel(file: CaseFile) -> None:
    prepared = prepare(file.case, wrong().RECORD)
    place, _, name = file.kernel.partition(":")
    results = [
        sorted_out(prepared, Trial(Here(getattr(wrong(), kernel)), wrong().RECORD).run(prepared)) for kernel in (name, "textbook")
    ]

    assert place == "tests/wrong_by_path.py" and len(file.case.q_lens) <= 2
    assert results[0].reason in wrong().FAULTS[name] and results[1].reason is None
    assert Scope(record=Record(), parameters=frozenset(OPTIONAL)).refuses(file.case) is None  # most kernels can be given it


# Shrinking and counting, without a kernel

FAMILY = Family(name="f", q_heads=6, kv_heads=2, head_dim=64, head_dim_v=64, scale=1.0, causal=False, window=(20, 4), softcap=5.0)
LARGE = Case(
    name="c",
    family=FAMILY,
    q_lens=(3, 0, 40),
    kv_lens=(17, 5, 300),
    scales="per-head",
    layout="hnd",
    inputs="ties",
    shared_prefix=16,
    seed=7,
)


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (lambda c: True, "1 query on 1 key; 1 query head on 1 kv head, head dim 40, bf16, pages of 16; causal; randn inputs"),
        (lambda c: max(c.kv_lens) > 130, "1 query on 131 keys; "),
        (lambda c: any(c.shared), "2 sequences of queries on keys: 0 on 1, 1 on 1; "),
        (lambda c: 0 in c.q_lens and max(c.q_lens) > 2, "2 sequences of queries on keys: 0 on 1, 3 on 1; "),
        (lambda c: c.family.window[0] > 6 and c.family.softcap > 0, "causal; window (7, -1); softcap 5; randn inputs"),
        (
            lambda c: c.family.group > 1 and c.layout == "hnd",
            "2 query heads on 1 kv head, head dim 40, bf16, pages of 16; causal; layout hnd; ",
        ),
    ],
)
def test_shrinking_ends_at_the_smallest_case_that_fails(fails: Callable[[Case], bool], expected: str) -> None:
    scope = Scope(record=SMALL, parameters=frozenset(OPTIONAL))
    case = smallest(LARGE, scope, fails)

    assert fails(case) and size(case) < size(LARGE)
    assert expected in in_words(case)


def test_a_name_follows_from_what_a_case_is() -> None:
    assert named(LARGE).name == named(replace(LARGE, name="other", family=replace(FAMILY, name="g"))).name
    assert named(LARGE).name != named(replace(LARGE, seed=8)).name


def test_pairs_are_counted_with_their_zeros_over_what_the_kernel_takes() -> None:
    scope = Scope(record=Record(), parameters=frozenset({"causal", "softcap"}))
    counts = pair_counts(scope, [LARGE, replace(LARGE, layout="plain")])

    assert counts["not causal", "softcap"] == 2 and counts["softcap", "layout"] == 1
    assert counts["layout", "layout"] == 1 and counts["softcap", "prefix"] == 2
    assert counts["softcap", "rows past"] == 2 and counts["not causal", "full pages"] == 0
    assert not any({"sinks", "window", "8-bit cache", "out given"} & {*pair} for pair in counts)
    names = [name for name in OPTIONS if (name, name) in counts]
    assert len(counts) == len(names) * (len(names) + 1) // 2
