"""Whatever a kernel does wrong in one case, or between two, the trial sees it and says so under the right reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from oracle import trial
from oracle.cases import Case
from oracle.contract import Precision, Record
from oracle.families import Family
from oracle.isolation.process import KernelProcess
from oracle.pool import Fill
from oracle.trial import Prepared, Seen, Trial, contract_of, prepare, prepared_ahead, row_sum_findings, timeout_s
from oracle.verdict import Reason

KERNELS = Path(__file__).with_name("kernels_by_path.py")
PLAIN = Record()
FAMILY = Family(name="small", q_heads=4, kv_heads=2, head_dim=16, head_dim_v=16, scale=0.25)

# Rows before the first key, a sequence without keys, decode beside prefill; the first sequence ends within a page.
CASE = Case(name="mixed", family=FAMILY, q_lens=(3, 2, 1), kv_lens=(21, 0, 9), page_size=8, seed=1)
TWIN = replace(CASE, name="mixed+again", seed=2, q_lens=CASE.q_lens[::-1], kv_lens=CASE.kv_lens[::-1])
OTHER = replace(CASE, name="other", q_lens=(2,), kv_lens=(12,), seed=3)
THIRD = replace(CASE, name="third", q_lens=(1,), kv_lens=(5,), seed=4)
SHORT = replace(CASE, name="short", q_lens=(16, 16), kv_lens=(16, 16), seed=5)  # rows of 1 to 16 keys


@cache
def prepared(case: Case, record: Record = PLAIN) -> Prepared:
    return prepare(case, record)


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], KernelProcess]]:
    """The process of all kernels of the file, set to be the one named."""
    file = tmp_path_factory.mktemp("trial") / "kernel"
    environment = {"KERNEL_FILE": str(file)}
    target = f"{KERNELS}:switched"
    with KernelProcess(target, threads=1, memory_limit_bytes=1 << 31, environment=environment) as process:

        def named(name: str) -> KernelProcess:
            file.write_text(name)
            return process

        yield named


Switch = Callable[[str], KernelProcess]


def one(switch: Switch, name: str, case: Case = CASE, record: Record = PLAIN) -> Seen:
    """What one case shows of a kernel."""
    return Trial(switch(name), record).run(prepared(case, record))


def reasons(seen: Seen) -> list[Reason]:
    return [f.reason for f in seen.findings]


# What is right


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("textbook", PLAIN),
        ("base_2", Record(lse_base="2")),
        ("pads", Record(writes_padding=True)),
        ("varies", Record(deterministic=False)),
        ("multiplies_nan_by_zero", Record(finite_tails=True)),
        ("depends_on_page_ids", Record(page_invariant=False)),
    ],
)
@pytest.mark.parametrize("case", [CASE, SHORT, replace(CASE, name="no out", give_out=False, padded_seqs=2, layout="strided")])
def test_a_kernel_that_keeps_what_it_declares_shows_nothing(switch: Switch, name: str, record: Record, case: Case) -> None:
    seen = one(switch, name, case, record)

    assert seen.findings == ()
    assert seen.candidate is not None and 0 < seen.candidate.worst.units <= 1


def test_every_fill_is_tried_and_every_call_is_counted(switch: Switch) -> None:
    seen = one(switch, "textbook")

    assert set(seen.fills) == set(Fill)
    assert seen.calls == 1 + 5 + 1 + 1  # as it is, under five other fills, once more, without an LSE


def test_finite_tails_skip_the_fills_that_are_not_finite_and_say_so(switch: Switch) -> None:
    seen = one(switch, "multiplies_nan_by_zero", record=Record(finite_tails=True))

    assert set(seen.fills) == {Fill.STALE, Fill.LARGE, Fill.NEG_LARGE}
    assert reasons(one(switch, "leaks_large_numbers_only", record=Record(finite_tails=True))) == [Reason.LEAK]


def test_the_quick_profile_tries_nan_and_large_numbers(switch: Switch) -> None:
    for name, found in (("multiplies_nan_by_zero", "nan"), ("leaks_large_numbers_only", "+large")):
        seen = Trial(switch(name), PLAIN, quick=True).run(prepared(CASE))
        assert seen.fills == (Fill.STALE, Fill.NAN, Fill.LARGE)
        assert reasons(seen) == [Reason.LEAK] and found in seen.findings[0].text


# What is wrong in one case: one kernel for each check

WRONG = [
    ("zeros", Reason.ERROR, "e = "),
    ("last_key_dropped", Reason.ERROR, "head "),
    ("nan_in_one_element", Reason.NOT_FINITE, "1 of 384 judged elements are NaN or inf; the first: row 5 (sequence 2, query 0"),
    ("wrong_lse", Reason.LSE, "e_lse = "),
    ("ones_in_empty_rows", Reason.EMPTY_ROW, "2 rows without keys: expected output 0 and LSE -inf"),
    ("zero_lse_in_empty_rows", Reason.EMPTY_ROW, "2 rows without keys"),
    ("wrong_without_lse", Reason.ERROR, "with return_lse=False"),
    ("leaves_a_row_unwritten", Reason.ERROR, "row 1 "),
    ("wrong_dtype", Reason.WRONG_RESULT, "float32 tensor of shape (9, 4, 16) on cpu, expected a bfloat16"),
    ("wrong_shape", Reason.WRONG_RESULT, "shape (9, 4, 1) on cpu, expected a bfloat16 tensor of shape (9, 4, 16)"),
    ("forgets_the_lse", Reason.WRONG_RESULT, "return_lse=True returned a value of type Tensor, expected (out, lse)"),
    (
        "multiplies_nan_by_zero",
        Reason.LEAK,
        "a nan fill past the plan changes the result in 16 of 384 elements, first out[0, 0, 0]",
    ),
    ("reads_a_masked_key", Reason.LEAK, "fill past the plan changes the result"),
    ("leaks_large_numbers_only", Reason.LEAK, "a +large fill past the plan changes the result in 1 of 384 elements"),
    ("depends_on_page_ids", Reason.PAGE_IDS, "other page ids for the same data change the result in 1 of 384 elements"),
    ("random_bits", Reason.NONDETERMINISTIC, "the same call "),
    ("third_call_differs", Reason.NONDETERMINISTIC, "gives other bits in 1 of 384 elements, first out[0, 0, 0]"),
    ("varies", Reason.NONDETERMINISTIC, "the same call "),
    ("writes_past_the_plan", Reason.CANARY, "128 bytes of `out` past the plan were written (stale fill)"),
    ("writes_beside_out", Reason.CANARY, "128 bytes of `out`"),
    ("pads", Reason.CANARY, "384 bytes of `out`"),
    ("writes_its_inputs", Reason.INPUT_WRITTEN, "the call changed its inputs: q"),
    ("raises", Reason.EXCEPTION, "raised ArithmeticError: made up"),
]
GIVEN_NO_OUT = ("wrong_dtype", "wrong_shape")


@pytest.mark.parametrize(("name", "reason", "text"), WRONG, ids=[name for name, _, _ in WRONG])
def test_every_fault_is_found_in_one_case(switch: Switch, name: str, reason: Reason, text: str) -> None:
    case = replace(CASE, give_out=False) if name in GIVEN_NO_OUT else CASE

    found = one(switch, name, case).findings

    assert reason in [f.reason for f in found]
    assert any(text in f.text for f in found if f.reason is reason), [f.text for f in found]
    assert all(f.case == "mixed" and f.size == (3 * 21 + 9) * 4 for f in found)


@pytest.mark.parametrize(
    ("name", "reason", "text"),
    [
        ("nan_in_the_last_row_but_two", Reason.NOT_FINITE, "1 of 19200 live elements are NaN or inf, first out[297, 0, 0]"),
        ("inf_lse_in_the_last_row_but_two", Reason.NOT_FINITE, "1 of 1200 live elements are NaN or inf, first lse[297, 0]"),
        (
            "leaves_the_last_row_but_two_unwritten",
            Reason.ERROR,
            "4 of 1200 (row, head) of `out` were never written, first out[297, 0]",
        ),
    ],
)
def test_rows_that_are_not_judged_are_still_looked_at(switch: Switch, name: str, reason: Reason, text: str) -> None:
    wide = replace(CASE, q_lens=(300,), kv_lens=(300,), rows=8)
    assert 297 not in prepared(wide).truth.rows.tolist()

    found = one(switch, name, wide).findings
    assert (found[0].reason, found[0].text.startswith(text)) == (reason, True), found[0].text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("crashes", Reason.CRASH),
        ("leaves", Reason.CRASH),
        ("eats_memory", Reason.OUT_OF_MEMORY),
        ("never_answers", Reason.TIMEOUT),
    ],
)
def test_a_kernel_that_gives_no_result_is_found_and_the_next_case_still_runs(
    switch: Switch, name: str, reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "never_answers":
        monkeypatch.setattr(trial, "timeout_s", lambda case, record: 0.5)

    seen = one(switch, name)
    monkeypatch.undo()

    assert reasons(seen) == [reason] and seen.candidate is None and seen.fills == ()
    assert one(switch, "textbook", OTHER).findings == ()


def test_a_declared_padding_still_has_its_guards(switch: Switch) -> None:
    assert set(reasons(one(switch, "writes_beside_out", record=Record(writes_padding=True)))) == {Reason.CANARY}


def test_declared_varying_bits_hide_no_leak(switch: Switch) -> None:
    """Bits are not compared, errors are."""
    seen = one(switch, "leaks_by_much", record=Record(deterministic=False))

    assert reasons(seen) == [Reason.ERROR]
    assert reasons(one(switch, "leaks_large_numbers_only", record=Record(deterministic=False))) == []


def test_an_error_is_told_with_its_place(switch: Switch) -> None:
    """Sequence, query, position, page and slot of the row, then what was got, expected and allowed."""
    case = replace(CASE, q_lens=(1, 3), kv_lens=(9, 21))

    found = one(switch, "leaves_a_row_unwritten", case).findings[0]

    assert "row 1 (sequence 1, query 0 of 3, position 18 of 21, page 2 slot 2) head " in found.text
    assert " column " in found.text and ": got " in found.text and ", exact " in found.text and ", limit " in found.text


# What shows between two calls


@pytest.mark.parametrize("name", ["keeps_its_first_answer", "keeps_its_first_plan", "returns_the_last_answer"])
def test_what_a_kernel_keeps_by_shape_shows_on_a_twin(switch: Switch, name: str) -> None:
    """The twin has the same shapes, other data, and its sequences in reverse."""
    run = Trial(switch(name), PLAIN)
    first, again = run.run(prepared(CASE)), run.run(prepared(TWIN))

    shapes = [(c.q.shape, c.k_cache.shape, c.page_table.shape) for c in (prepared(CASE).laid.call, prepared(TWIN).laid.call)]
    assert shapes[0] == shapes[1]
    assert first.findings == () and Reason.ERROR in reasons(again)


def test_bits_that_move_after_other_calls_are_a_later_call(switch: Switch) -> None:
    run = Trial(switch("tunes_itself"), PLAIN)
    seen = [run.run(prepared(case)) for case in (CASE, OTHER, THIRD)]
    found = run.return_to_first()

    assert [s.findings for s in seen] == [(), (), ()]
    assert {(f.reason, f.case) for f in found} == {(Reason.LATER_CALL, "mixed"), (Reason.LATER_CALL, "other")}
    assert "called again after all other cases, it gives other bits in 1 of 384 elements" in found[0].text


def test_a_kernel_without_memory_returns_to_its_first_answers(switch: Switch) -> None:
    run = Trial(switch("textbook"), PLAIN)
    for case in (CASE, OTHER):
        run.run(prepared(case))

    assert run.return_to_first() == []


def test_a_kernel_of_varying_bits_is_measured_when_it_returns(switch: Switch) -> None:
    run = Trial(switch("varies"), Record(deterministic=False))
    run.run(prepared(CASE, Record(deterministic=False)))
    assert run.return_to_first() == []
    switch("zeros")
    assert Reason.ERROR in [f.reason for f in run.return_to_first()]


def test_a_thread_that_writes_into_the_next_call_is_found(switch: Switch) -> None:
    """In its output or in an input, whatever lies there by then."""
    found = reasons(one(switch, "writes_late"))

    assert found and set(found) <= {Reason.NONDETERMINISTIC, Reason.LEAK, Reason.PAGE_IDS, Reason.ERROR, Reason.INPUT_WRITTEN}


# The row sum over rounded P


def test_an_undeclared_row_sum_over_rounded_p_is_recognised_by_short_rows(switch: Switch) -> None:
    short, longer = one(switch, "row_sum_after", SHORT), one(switch, "row_sum_after")

    assert short.candidate is not None and short.candidate.fits_after
    assert short.candidate.worst_lse is not None and short.candidate.worst_lse.units > 1
    assert short.findings == longer.findings == ()
    assert row_sum_findings([longer, short], PLAIN) == []


def test_an_lse_that_only_a_row_sum_over_rounded_p_explains_needs_rows_that_show_it(switch: Switch) -> None:
    """`exp_error` is off by as much, and its short rows do not look like rounded P."""
    short = one(switch, "exp_error", SHORT)
    assert short.candidate is not None and not short.candidate.fits_after

    assert [f.reason for f in row_sum_findings([short], PLAIN)] == [Reason.LSE]
    assert row_sum_findings([short], Record(precision=Precision(row_sum="after"))) == []


# Preparing


def test_cases_are_prepared_ahead_in_order() -> None:
    cases = [CASE, OTHER, THIRD, TWIN]

    assert [p.case for p in prepared_ahead(cases, PLAIN)] == cases
    assert list(prepared_ahead([], PLAIN)) == []


def test_the_contract_is_that_of_the_case() -> None:
    assert contract_of(PLAIN, CASE).u_p == 2.0**-8
    assert contract_of(PLAIN, replace(CASE, dtype="fp16")).u_p == 2.0**-11
    assert contract_of(PLAIN, replace(CASE, scales="per-head")).scales == 2


def test_a_larger_case_and_an_interpreter_get_more_time() -> None:
    assert 60 <= timeout_s(CASE, PLAIN) < timeout_s(replace(CASE, kv_lens=(9000, 0, 9)), PLAIN)
    assert timeout_s(CASE, Record(interpreted=True)) >= 300


def test_without_queries_nothing_is_measured_and_nothing_breaks(switch: Switch) -> None:
    seen = one(switch, "textbook", replace(CASE, q_lens=(0, 0), kv_lens=(9, 4)))

    assert seen.findings == () and seen.candidate is not None and seen.candidate.elements == 0
    assert torch.equal(seen.candidate.cluster_e2, torch.zeros(0, dtype=torch.float64))
