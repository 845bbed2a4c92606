"""A case, and what went wrong in it, in words that anyone can read."""

from __future__ import annotations

from collections.abc import Iterator

from oracle.cases import Case
from oracle.judged import Judged
from oracle.measure import Worst
from oracle.places import edges, place
from oracle.verdict import MEANINGS, Reason

SHOWN = 4  # sequences named one by one

EXPECTED: dict[Reason, str] = {  # what a right kernel does, where no single number says it
    Reason.INVALID_ACCESS: "no access outside what the call gave",
    Reason.CRASH: "an answer",
    Reason.TIMEOUT: "an answer",
    Reason.OUT_OF_MEMORY: "an answer",
    Reason.EXCEPTION: "an answer",
    Reason.WRONG_RESULT: "the result that the contract says",
    Reason.TAMPERED: "a kernel that only computes",
    Reason.ERROR: "every row written, whatever is asked for",
    Reason.NOT_FINITE: "a finite number in every live element",
    Reason.EMPTY_ROW: "output 0, and LSE -inf (or the sink)",
    Reason.LATER_CALL: "the same bits as the first time",
    Reason.NONDETERMINISTIC: "the same bits twice",
    Reason.LEAK: "the same bits whatever lies past the plan",
    Reason.PAGE_IDS: "the same bits whatever the page ids",
    Reason.CANARY: "every byte past the plan as it was",
    Reason.INPUT_WRITTEN: "the inputs as they were",
}


def in_words(case: Case) -> str:
    """The call that the case describes: lengths first, then what is not plain about it."""
    f = case.family
    dims = str(f.head_dim) if f.head_dim == f.head_dim_v else f"{f.head_dim} (v {f.head_dim_v})"
    plain = f"{_many(f.q_heads, 'query head')} on {_many(f.kv_heads, 'kv head')}, head dim {dims}, {case.dtype}"
    return "; ".join([_lengths(case), f"{plain}, pages of {case.page_size}", *_options(case)])


def _lengths(case: Case) -> str:
    pairs = list(zip(case.q_lens, case.kv_lens, strict=True))
    words = [f"{q} on {kv}" for q, kv in pairs]
    if len(pairs) == 1:
        return f"{_many(pairs[0][0], 'query', 'queries')} on {_many(pairs[0][1], 'key')}"
    more = f" and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
    return f"{len(pairs)} sequences of queries on keys: {', '.join(words[:SHOWN])}{more}"


def _options(case: Case) -> Iterator[str]:
    f = case.family
    yield "causal" if f.causal else "not causal"
    if f.window != (-1, -1):
        yield f"window {f.window}"
    if f.softcap:
        yield f"softcap {f.softcap:g}"
    if case.sinks != "none":
        yield f"{case.sinks} sinks"
    if case.cache_dtype:
        yield f"{case.cache_dtype} cache"
    if case.scales != "none":
        yield f"{case.scales} scales"
    if f.scale != f.head_dim**-0.5:
        yield f"softmax scale {f.scale:g}"
    if case.layout != "plain":
        yield f"layout {case.layout}"
    if case.shared_prefix:
        yield f"up to {_many(case.shared_prefix, 'token')} shared"
    if case.padded_seqs:
        yield f"{case.padded_seqs} past num_seqs"
    if case.tail_rows:
        yield f"{_many(case.tail_rows, 'row')} past the plan"
    if case.give_out:
        yield "out given"
    yield f"{case.captured or case.inputs} inputs"


def _many(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"


def worst(judged: Judged) -> Worst | None:
    """The element (or the row, for the LSE) that the first finding is about; None where it is about no single one."""
    measured = judged.seen.candidate
    findings = judged.faults or judged.inspect
    if measured is None or not findings:
        return None
    found = findings[0]
    if found.reason is Reason.LSE:
        return measured.worst_lse
    told = found.reason is Reason.NOT_FINITE or found.units > 1.0  # a row never written has no size
    return (
        measured.worst if found.reason in (Reason.ERROR, Reason.NOT_FINITE) and told and not measured.worst.units <= 1.0 else None
    )


def five_lines(kernel: str, judged: Judged, replay: str) -> tuple[str, str, str, str, str]:
    """What is called, what went wrong, got and expected, where, and how to see it again: a line each."""
    found, at = (judged.faults or judged.inspect)[0], worst(judged)
    got = _numbers(at) if at else f"{found.text}; expected {EXPECTED.get(found.reason, 'what the contract says')}"
    return (
        f"called   {kernel}: {in_words(judged.case)}",
        f"wrong    {found.reason}: {MEANINGS[found.reason]}{_units(judged)}",
        f"got      {got}",
        f"where    {_where(judged.case, at) if at else 'the call as a whole'}",
        f"replay   {replay}",
    )


def _units(judged: Judged) -> str:
    at = worst(judged)
    if at is None:
        return ""
    if at.column < 0:
        return f" (e_lse = {at.units:.3g})"
    return f" (e = {at.units:.3g}, e_det = {judged.e_det:.3g})"


def _numbers(at: Worst) -> str:
    return f"{at.got:.6g}; expected {at.want:.6g}, within {at.limit:.2g}{' (the LSE)' if at.column < 0 else ''}"


def _where(case: Case, at: Worst) -> str:
    found = place(case, at.row)
    column = f", column {at.column}" if at.column >= 0 else ""
    page, slot = divmod(max(found.position, 0), case.page_size)
    lies = f"sequence {found.sequence}, query {found.query} of {found.q_len}, position {found.position} of {found.kv_len}"
    on = "; ".join(edges(case, found))
    return f"row {at.row} ({lies}, page {page} slot {slot}), head {at.head}{column}{': ' + on if on else ''}"
