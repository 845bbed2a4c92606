"""A trial: every case of a suite put to a kernel, and all that was seen.

The candidate runs in a process of its own; the exact answers are computed beside it, a few cases ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.cases import Case
from oracle.contract import Call, Record
from oracle.isolation.outcome import Failure, FailureKind, Returned
from oracle.isolation.process import KernelProcess, patience_s
from oracle.material import Material, material, offsets
from oracle.measure import Measured, Truth, Worst, measure, tell
from oracle.pool import QUICK_FILLS, Fill, Laid, is_canary, lay_out, without_fill
from oracle.references.roundoff import Roundoff, roundoff
from oracle.rows import sample_rows
from oracle.verdict import Finding, Reason

ENOUGH = 10  # cases with findings after which a trial stops: the rest would add nothing to the verdict
RETURNS = 3  # first cases called once more at the very end

FAILURE_REASONS = {
    FailureKind.EXCEPTION: Reason.EXCEPTION,
    FailureKind.EXITED: Reason.CRASH,
    FailureKind.SIGNAL: Reason.CRASH,
    FailureKind.TIMEOUT: Reason.TIMEOUT,
    FailureKind.OUT_OF_MEMORY: Reason.OUT_OF_MEMORY,
    FailureKind.WRONG_RESULT: Reason.WRONG_RESULT,
    FailureKind.SANITIZER: Reason.INVALID_ACCESS,
    FailureKind.TAMPERED: Reason.TAMPERED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A case with its inputs, its first layout and its exact answer."""

    case: Case
    material: Material
    laid: Laid  # stale data past the plan, pages of salt 0
    truth: Truth


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one case showed."""

    case: Case
    candidate: Measured | None  # None where the kernel gave no result
    incumbent: Measured | None
    same_bits: bool | None  # as the incumbent, on every live row; None without a named incumbent
    findings: tuple[Finding, ...]
    fills: tuple[Fill, ...]  # fills that it was called under
    calls: int
    seconds: float
    far_from_fp32: float  # largest |out - fp32 reference|, 0 unless asked for


Incumbent = Callable[[Prepared], tuple[Tensor, Tensor | None]]  # rows of out and LSE at the truth's rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The first answer to a case, for whoever keeps figures or draws pictures."""

    prepared: Prepared
    returned: Returned
    incumbent: Tensor | None  # (R, q_heads, head_dim_v) of the incumbent's out at the truth's rows
    seen: Seen


Watch = Callable[[Answer], None]


def unwatched(answer: Answer) -> None:
    """Nobody looks at the answers."""


def contract_of(record: Record, case: Case) -> Roundoff:
    """The constants of the bound for a kernel of this record at this case."""
    return roundoff(record.precision, dtype=case.dtype, out_dtype=case.dtype, scaled=case.scales != "none")


def prepare(case: Case, record: Record) -> Prepared:
    """The inputs and the exact answer of `case`, bounded by the contract of `record`."""
    made = material(case)
    laid = lay_out(case, made, fill=Fill.STALE, salt=0, writes_padding=record.writes_padding)
    truth = tell(without_fill(laid), sample_rows(case, case.rows or 40), contract_of(record, case))
    return Prepared(case=case, material=made, laid=laid, truth=truth)


Prepare = Callable[[Case, Record], Prepared]


def prepared_ahead(cases: Iterable[Case], record: Record, make: Prepare = prepare) -> Iterator[Prepared]:
    """What `make` makes of each case in turn, three cases ahead of the consumer, on two other threads."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        waiting = []
        for case in cases:
            waiting.append(pool.submit(make, case, record))
            if len(waiting) > 3:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def timeout_s(case: Case, record: Record) -> float:
    """Seconds that one call of the case may take."""
    f = case.family
    pairs = sum(q * k for q, k in zip(case.q_lens, case.kv_lens, strict=True))
    return patience_s(pairs * f.q_heads * (f.head_dim + f.head_dim_v), record)


class Trial:
    """Puts cases to one kernel and keeps what later calls are compared with."""

    def __init__(
        self,
        process: KernelProcess,
        record: Record,
        *,
        quick: bool = False,
        incumbent: Incumbent | None = None,
        other: KernelProcess | None = None,
        fp32: Callable[[Call], Tensor] | None = None,
        watch: Watch = unwatched,
    ) -> None:
        """`incumbent` gives rows of a trusted kernel; `other` is the process of a named incumbent, compared whole.

        `watch` is given the first answer to every case that has one.
        """
        self.record = record
        self._process, self._quick = process, quick
        self._incumbent, self._other, self._fp32 = incumbent, other, fp32
        self._watch = watch
        self._first: list[tuple[Prepared, Returned]] = []

    def run(self, prepared: Prepared) -> Seen:
        """Everything that one case shows of the kernel."""
        answer = self._answer(prepared)
        if isinstance(answer, Failure):
            return self._nothing(prepared.case, answer)
        fills, calls, more = self._again(prepared, answer.returned)
        seen = replace(answer.seen, findings=(*answer.seen.findings, *more), fills=fills, calls=calls)
        if len(self._first) < RETURNS and not seen.findings:
            self._first.append((prepared, answer.returned))
        self._watch(replace(answer, seen=seen))
        return seen

    def run_once(self, prepared: Prepared) -> Seen:
        """What one case shows of the kernel in a single call."""
        answer = self._answer(prepared)
        if isinstance(answer, Failure):
            return self._nothing(prepared.case, answer)
        self._watch(answer)
        return answer.seen

    def _answer(self, prepared: Prepared) -> Answer | Failure:
        """The first call of a case, measured and compared."""
        case, call = prepared.case, prepared.laid.call
        base = self.call(prepared.laid, case)
        if isinstance(base, Failure):
            return base
        live = case.total_q
        out, lse = base.out[:live], self.natural(base.lse, live)
        rows = prepared.truth.rows
        measured = measure(prepared.truth, without_fill(prepared.laid), out[rows], None if lse is None else lse[rows])
        findings = list(self.measured_findings(case, measured)) or _elsewhere(case, out, lse)
        findings += self.hygiene(case, prepared.laid, base)
        theirs, same_bits = self._compare(prepared, base)
        incumbent = None if theirs is None else measure(prepared.truth, without_fill(prepared.laid), *theirs)
        far = 0.0
        if self._fp32 is not None and live:
            far = float((out.float() - self._fp32(call)[:live].cpu()).abs().nan_to_num(float("inf")).max())
        seen = Seen(
            case=case,
            candidate=measured,
            incumbent=incumbent,
            same_bits=same_bits,
            findings=tuple(findings),
            fills=(),
            calls=1,
            seconds=base.seconds,
            far_from_fp32=far,
        )
        return Answer(prepared=prepared, returned=base, incumbent=None if theirs is None else theirs[0], seen=seen)

    def return_to_first(self) -> list[Finding]:
        """The first cases once more, after all others: the same bits, or the kernel keeps something between calls."""
        findings = []
        for prepared, before in self._first:
            after = self.call(prepared.laid, prepared.case)
            if isinstance(after, Failure):
                findings.append(failed(prepared.case, after))
            elif not self.record.deterministic:
                findings += self._measured_again(prepared, prepared.laid, after)
            elif where := _difference(prepared.case, before, after):
                text = f"called again after all other cases, it gives other bits {where}: it keeps something between calls"
                findings.append(finding(Reason.LATER_CALL, prepared.case, text))
        return findings

    def call(self, laid: Laid, case: Case) -> Returned | Failure:
        """The kernel's answer to a laid-out case, with an LSE where it gives one."""
        return self._process.call(laid.call, timeout_s(case, self.record), want_lse=True)

    def _nothing(self, case: Case, failure: Failure) -> Seen:
        return Seen(
            case=case,
            candidate=None,
            incumbent=None,
            same_bits=None,
            findings=(failed(case, failure),),
            fills=(),
            calls=1,
            seconds=0.0,
            far_from_fp32=0.0,
        )

    def natural(self, lse: Tensor | None, live: int) -> Tensor | None:
        """The first `live` rows of an LSE, as a natural logarithm whatever base the record declares."""
        if lse is None:
            return None
        return lse[:live].double() * 0.6931471805599453 if self.record.lse_base == "2" else lse[:live]

    def measured_findings(self, case: Case, m: Measured) -> Iterator[Finding]:
        """What is out of bounds in one measured answer."""
        if m.not_finite:
            yield finding(
                Reason.NOT_FINITE,
                case,
                f"{m.not_finite} of {m.elements} judged elements are NaN or inf; the first: {_at(case, m.worst)}",
            )
        elif not m.worst.units <= 1.0:
            yield finding(Reason.ERROR, case, f"e = {m.worst.units:.3g} at {_at(case, m.worst)}", m.worst.units)
        if m.worst_lse is not None and not (m.worst_lse.units <= 1.0 or m.worst_lse_after <= 1.0):
            yield _wrong_lse(case, m.worst_lse)
        if m.empty_rows_wrong:
            text = f"{m.empty_rows_wrong} rows without keys: expected output 0 and LSE -inf (with a sink: the sink)"
            yield finding(Reason.EMPTY_ROW, case, text)

    def hygiene(self, case: Case, laid: Laid, returned: Returned) -> list[Finding]:
        """Canaries and inputs after a call."""
        findings = []
        if returned.out_storage is not None and (broken := laid.canaries_broken(returned.out_storage)):
            findings.append(
                finding(Reason.CANARY, case, f"{broken} bytes of `out` past the plan were written ({laid.fill} fill)")
            )
        if returned.changed_inputs:
            names = ", ".join(returned.changed_inputs)
            findings.append(finding(Reason.INPUT_WRITTEN, case, f"the call changed its inputs: {names}"))
        return findings

    def _again(self, prepared: Prepared, base: Returned) -> tuple[tuple[Fill, ...], int, list[Finding]]:
        """The case under every other fill, each with other page ids, then the first call once more: the same bits."""
        case = prepared.case
        fills = [f for f in (QUICK_FILLS if self._quick else Fill) if f is not Fill.STALE]
        fills = [f for f in fills if f.finite or not self.record.finite_tails]
        findings: list[Finding] = []
        calls = 1
        for salt, fill in [*enumerate(fills, 1), (0, Fill.STALE)]:
            laid = self._laid(prepared, fill, salt if self.record.page_invariant else 0)
            result = self.call(laid, case)
            calls += 1
            if isinstance(result, Failure):
                findings.append(failed(case, result, f"under a {fill} fill"))
                break
            findings += self.hygiene(case, laid, result)
            if not self.record.deterministic:
                findings += self._measured_again(prepared, laid, result)
            elif _difference(case, base, result):
                findings.append(self._explain(prepared, base, result, fill, salt))
            if findings:
                break
        if base.lse is not None and not findings:
            findings += self._without_lse(prepared, base)
            calls += 1
        return (Fill.STALE, *fills), calls, findings

    def _without_lse(self, prepared: Prepared, base: Returned) -> list[Finding]:
        """The call as it is made where nobody needs the LSE: other code in many kernels, so it is judged by error."""
        case = prepared.case
        laid = self._laid(prepared, Fill.LARGE if self.record.finite_tails else Fill.NAN, 0)
        result = self._process.call(laid.call, timeout_s(case, self.record), want_lse=False)
        if isinstance(result, Failure):
            return [failed(case, result, "with return_lse=False")]
        findings = self.hygiene(case, laid, result)
        if _difference(case, base, result):
            findings += self._measured_again(prepared, laid, result)
        return [replace(f, text=f"{f.text}, with return_lse=False") for f in findings]

    def _laid(self, prepared: Prepared, fill: Fill, salt: int) -> Laid:
        if fill is Fill.STALE and salt == 0:
            return prepared.laid
        padding = self.record.writes_padding
        return lay_out(prepared.case, prepared.material, fill=fill, salt=salt, writes_padding=padding)

    def _measured_again(self, prepared: Prepared, laid: Laid, result: Returned) -> list[Finding]:
        """For a kernel of varying bits, what lies past the plan shows as an error instead of as other bits."""
        rows = prepared.truth.rows
        lse = self.natural(result.lse, prepared.case.total_q)
        m = measure(prepared.truth, without_fill(laid), result.out[rows], None if lse is None else lse[rows])
        return list(self.measured_findings(prepared.case, m))

    def _explain(self, prepared: Prepared, base: Returned, other: Returned, fill: Fill, salt: int) -> Finding:
        """Which of the three things that changed between two calls moved the bits: nothing, the fill or the page ids."""
        case = prepared.case
        where = _difference(case, base, other)
        steps = (
            (Reason.NONDETERMINISTIC, Fill.STALE, 0, "the same call gives other bits"),
            (Reason.LEAK, fill, 0, f"a {fill} fill past the plan changes the result"),
            (Reason.PAGE_IDS, Fill.STALE, salt, "other page ids for the same data change the result"),
        )
        for reason, one_fill, one_salt, text in steps:
            laid = self._laid(prepared, one_fill, one_salt)
            again = self.call(laid, case)
            if isinstance(again, Failure):
                return failed(case, again, f"under a {one_fill} fill")
            if difference := _difference(case, base, again):
                once_more = self.call(laid, case)  # a flake would be taken for whatever was changed when it struck
                if isinstance(once_more, Returned) and _difference(case, again, once_more):
                    return finding(Reason.NONDETERMINISTIC, case, f"the same call sometimes gives other bits {difference}")
                return finding(reason, case, f"{text} {difference}")
        if fill is Fill.STALE:
            return finding(Reason.NONDETERMINISTIC, case, f"the same call once gave other bits {where}")
        return finding(Reason.LEAK, case, f"a {fill} fill with other page ids changes the result {where}; neither alone does")

    def _compare(self, prepared: Prepared, base: Returned) -> tuple[tuple[Tensor, Tensor | None] | None, bool | None]:
        """The incumbent's out and LSE at the same rows, and whether a named one gave the same bits."""
        rows = prepared.truth.rows
        if self._other is not None:
            theirs = self._other.call(prepared.laid.call, timeout_s(prepared.case, self.record), want_lse=True)
            if isinstance(theirs, Failure):
                return None, None
            live = prepared.case.total_q
            lse = None if theirs.lse is None else theirs.lse[:live][rows]
            return (theirs.out[:live][rows], lse), not _difference(prepared.case, base, theirs)
        return (None if self._incumbent is None else self._incumbent(prepared)), None


def _difference(case: Case, one: Returned, two: Returned) -> str:
    """Where the live bits of two results first differ, as words, or ""."""
    live = case.total_q
    where = bits_differ("out", one.out[:live], two.out[:live])
    if not where and one.lse is not None and two.lse is not None:
        where = bits_differ("lse", one.lse[:live], two.lse[:live])
    return where


def bits_differ(name: str, one: Tensor, two: Tensor) -> str:
    """Where two tensors of one shape and dtype first differ, as words that call them `name`, or ""."""
    bits = {2: torch.int16, 4: torch.int32}[one.dtype.itemsize]
    moved = one.contiguous().view(bits) != two.contiguous().view(bits)
    if not bool(moved.any()):
        return ""
    place = [int(i) for i in moved.nonzero()[0]]
    return f"in {int(moved.sum())} of {moved.numel()} elements, first {name}{place}"


def _elsewhere(case: Case, out: Tensor, lse: Tensor | None) -> list[Finding]:
    """What needs no exact answer to be wrong, on every live row: numbers that are not finite, vectors never written."""
    findings = []
    for name, wrong in (("out", ~torch.isfinite(out)), ("lse", None if lse is None else torch.isnan(lse) | (lse == math.inf))):
        if wrong is not None and bool(wrong.any()):
            place = [int(i) for i in wrong.nonzero()[0]]
            text = f"{int(wrong.sum())} of {wrong.numel()} live elements are NaN or inf, first {name}{place}: no judged row"
            findings.append(finding(Reason.NOT_FINITE, case, text))
    if case.give_out and bool((unwritten := is_canary(out).all(-1)).any()):
        place = [int(i) for i in unwritten.nonzero()[0]]
        text = f"{int(unwritten.sum())} of {unwritten.numel()} (row, head) of `out` were never written, first out{place}"
        findings.append(finding(Reason.ERROR, case, text))
    return findings


def row_sum_findings(seen: Sequence[Seen], record: Record) -> list[Finding]:
    """LSEs that only a row sum over rounded P explains, where neither the record says so nor any short row shows it."""
    if record.precision.row_sum == "after" or any(s.candidate is not None and s.candidate.fits_after for s in seen):
        return []
    hint = "; if the row sum is taken over rounded P, say so in the record: precision.row_sum = 'after'"
    return [
        replace(found := _wrong_lse(s.case, s.candidate.worst_lse), text=found.text + hint)
        for s in seen
        if s.candidate is not None
        and s.candidate.worst_lse is not None
        and s.candidate.worst_lse_after <= 1.0
        and not s.candidate.worst_lse.units <= 1.0
    ]


def _wrong_lse(case: Case, worst: Worst) -> Finding:
    return finding(Reason.LSE, case, f"e_lse = {worst.units:.3g} at {_at(case, worst)}", worst.units)


def _size(case: Case) -> int:
    return sum(q * k for q, k in zip(case.q_lens, case.kv_lens, strict=True)) * case.family.q_heads


def finding(reason: Reason, case: Case, text: str, units: float = 0.0) -> Finding:
    """A finding on `case`, with its name and its size."""
    return Finding(reason=reason, case=case.name, text=text, size=_size(case), units=units)


def failed(case: Case, failure: Failure, when: str = "") -> Finding:
    """The finding that a call of `case` gave no result."""
    reason = FAILURE_REASONS.get(failure.kind, Reason.EXCEPTION)
    return finding(reason, case, f"{failure.text}{' ' + when if when else ''}")


def _at(case: Case, worst: Worst) -> str:
    """Where an element lies, with what was got and expected."""
    starts = offsets(case.q_lens)
    seq = int(torch.searchsorted(starts, worst.row, right=True)) - 1
    query, q_len, kv_len = worst.row - int(starts[seq]), case.q_lens[seq], case.kv_lens[seq]
    pos = kv_len - q_len + query
    page, slot = divmod(max(pos, 0), case.page_size)
    column = f" column {worst.column}" if worst.column >= 0 else ""
    where = f"sequence {seq}, query {query} of {q_len}, position {pos} of {kv_len}, page {page} slot {slot}"
    numbers = f"got {worst.got:.6g}, exact {worst.want:.6g}, limit {worst.limit:.2g}"
    return f"row {worst.row} ({where}) head {worst.head}{column}: {numbers}"
