"""Putting the relations to a kernel: each on a few small bases, every call judged, every control made to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from oracle.cases import Case, case_seed
from oracle.contract import Call, Record
from oracle.families import Family
from oracle.isolation.outcome import Failure
from oracle.measure import Truth, measure, tell
from oracle.pool import Fill, lay_out, without_fill
from oracle.relations.sides import Side, first
from oracle.relations.table import Level, Relation, allowed
from oracle.scope import Scope
from oracle.streams import Stream
from oracle.trial import ENOUGH, Trial, bits_differ, contract_of, failed, finding
from oracle.verdict import Finding, Reason

MOST_DIMS = 256  # head_dim + head_dim_v of a base, where the kernel has so few
MOST_PAGE = 64  # page size of a base, where the kernel has one so small
GROUPS = (2, 4, 1, 3)  # query heads per kv head, where the kernel takes any
MEASURED = (Reason.ERROR, Reason.LSE, Reason.EMPTY_ROW, Reason.NOT_FINITE)  # what a measured answer can be wrong for


@dataclass(frozen=True, slots=True, kw_only=True)
class Related:
    """What the relations showed."""

    findings: tuple[Finding, ...] = ()
    ran: Mapping[str, int] = field(default_factory=dict)  # relation -> bases that it was judged on, its controls among them
    notes: tuple[str, ...] = ()
    calls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """One call that was made."""

    side: Side
    call: Call
    out: Tensor  # live rows
    lse: Tensor | None  # live rows, natural


def planned_relations(scope: Scope, *, quick: bool) -> dict[str, int]:
    """How often each relation would be judged."""
    record = scope.record
    return {
        name: 1 if quick else len(r.batches(Stream(0, name), record.page_sizes[0], record))
        for name, r in allowed(scope, quick=quick).items()
    }


def relate(
    trial: Trial, scope: Scope, *, seed: int, quick: bool = False, progress: Callable[[str], None] = lambda name: None
) -> Related:
    """Every relation that the scope allows, put to the kernel of `trial`.  Same arguments, same calls."""
    asked = allowed(scope, quick=quick)
    judges = []
    for name, relation in asked.items():
        progress(name)
        judge = _Judge(trial, scope, name, relation)
        judges.append(judge)
        for base, stream in bases(name, relation, scope, seed, quick=quick):
            judge.judge(base, stream)
        if sum(len(j.findings) for j in judges) >= ENOUGH:
            break
    return Related(
        findings=tuple(f for j in judges for f in j.findings),
        ran={j.name: j.ran for j in judges},
        notes=tuple(_notes(judges, trial.record)),
        calls=sum(j.calls for j in judges),
    )


def bases(name: str, relation: Relation, scope: Scope, seed: int, *, quick: bool = False) -> Iterator[tuple[Side, Stream]]:
    """The bases of a relation, each with the stream that its other calls are drawn from."""
    record = scope.record
    small = [size for size in record.page_sizes if size <= MOST_PAGE] or [min(record.page_sizes)]
    narrow = sorted((dims for dims in scope.dims if sum(dims) <= MOST_DIMS), key=sum) or [min(scope.dims, key=sum)]
    groups = [g for g in record.groups if g <= max(GROUPS)] or [min(record.groups)] if record.groups else list(GROUPS)
    scales = "none"
    if relation.scaled and {"k_scale", "v_scale"} <= scope.parameters:
        scales = "per-sequence" if "q_scale" in scope.parameters else "kv-per-sequence"
    stream = Stream(seed, f"relations/{name}")
    page = small[int(stream.integers(0, len(small), 1))]
    batches = relation.batches(stream, page, record)
    for i, (q_lens, kv_lens) in enumerate(batches[:1] if quick else batches):
        pick = [int(n) for n in stream.integers(0, 2**31, 3)]
        d, dv = narrow[0] if i == 0 else narrow[pick[0] % len(narrow)]
        group = groups[pick[1] % len(groups)]
        dtype = record.dtypes[pick[2] % len(record.dtypes)]
        eight_bit = scales != "none" and i % 2 == 1 and dtype != "fp32" and "e4m3" in scope.cache_dtypes
        case = Case(
            name=name,
            family=Family(
                name=f"{group}x{relation.kv_heads}-{d}/{dv}",
                q_heads=group * relation.kv_heads,
                kv_heads=relation.kv_heads,
                head_dim=d,
                head_dim_v=dv,
                scale=d**-0.5,
            ),
            dtype=dtype,
            cache_dtype="e4m3" if eight_bit else "",
            q_lens=q_lens,
            kv_lens=kv_lens,
            page_size=page,
            inputs=relation.inputs,
            scales=scales,
            seed=case_seed(seed, f"relations/{name}/{i}"),
        )
        yield relation.base(first(case)), stream


class _Judge:
    """One relation put to one kernel."""

    def __init__(self, trial: Trial, scope: Scope, name: str, relation: Relation) -> None:
        self.name, self.relation = name, relation
        self.findings: list[Finding] = []
        self.moved: list[str] = []  # where bits moved that need not stay
        self.compared = self.ran = self.calls = 0
        self._trial, self._scope = trial, scope
        precision = trial.record.precision
        self._quantised = bool(precision.qk_format or precision.v_format)  # the bound then follows from the whole call

    def judge(self, side: Side, stream: Stream) -> None:
        """The relation has been judged on a base, as far as the base itself is right."""
        sides = self.relation.sides(side, stream, self._scope)
        controls = self.relation.controls(side, stream, self._scope)
        base = self._answer(side)
        if base is None:
            return
        truth = self._truth(base)
        if wrong := self._measured(base, truth, base.out, base.lse):
            self.findings += wrong
            return
        answers = [answer for s in sides if (answer := self._answer(s)) is not None]
        truths = [self._compare(base, truth, answer) for answer in answers]
        if self.relation.level is Level.MERGED and len(answers) == len(sides):
            self._merge(base, truth, list(zip(answers, truths, strict=True)))
        shown = [self._control(base, truth, control) for control in controls]
        self.ran += bool(shown) and all(shown)

    def _answer(self, side: Side) -> _Answer | None:
        """What the kernel says, or None after a finding."""
        case = side.case
        laid = lay_out(case, side.material, fill=Fill.STALE, salt=0, writes_padding=self._trial.record.writes_padding)
        laid = replace(laid, call=side.change(laid.call))
        self.calls += 1
        returned = self._trial.call(laid, case)
        if isinstance(returned, Failure):
            self.findings.append(failed(case, returned, side.text))
            return None
        self.findings += self._trial.hygiene(case, laid, returned)
        live = case.total_q
        return _Answer(side=side, call=without_fill(laid), out=returned.out[:live], lse=self._trial.natural(returned.lse, live))

    def _truth(self, answer: _Answer) -> Truth:
        case = answer.side.case
        return tell(answer.call, torch.arange(case.total_q), contract_of(self._trial.record, case))

    def _measured(self, answer: _Answer, truth: Truth, out: Tensor, lse: Tensor | None) -> list[Finding]:
        """What is out of bounds in `out` and `lse` at the rows of `answer`; but for the base, under the relation's reason."""
        found = list(self._trial.measured_findings(answer.side.case, measure(truth, answer.call, out, lse)))
        text = answer.side.text
        if not text:
            return found
        return [replace(f, reason=Reason.RELATION if f.reason in MEASURED else f.reason, text=f"{text}: {f.text}") for f in found]

    def _compare(self, base: _Answer, truth: Truth, answer: _Answer) -> Truth:
        """Findings where the answer is wrong, or has other bits than the base where it may not; the truth it was held to."""
        side, held_to = answer.side, truth
        if side.own or self._quantised:
            held_to = self._truth(answer)
            wrong = self._measured(answer, held_to, answer.out, answer.lse)
            if side.own:
                self.findings += wrong
                return held_to
        out, lse = _read(side, base, answer)
        if not self._quantised:
            wrong = self._measured(replace(base, side=replace(base.side, text=side.text)), truth, out, lse)
        self.findings += wrong
        self.compared += 1
        where = _differ(base, out, lse)
        if where and not wrong:
            text = f"{side.text}: other bits {where}"
            if self._bits_demanded():
                reason = Reason.BATCH_VARIANT if self.relation.level is Level.ROW else Reason.RELATION
                self.findings.append(finding(reason, side.case, f"{text}, though {self.relation.why}"))
            else:
                self.moved.append(text)
        return held_to

    def _bits_demanded(self) -> bool:
        record, level = self._trial.record, self.relation.level
        kept = {Level.BITS: True, Level.PAGES: record.page_invariant, Level.ROW: record.batch_invariant}
        return record.deterministic and kept.get(level, False)

    def _control(self, base: _Answer, truth: Truth, control: Side) -> bool:
        """Whether the exact answer to `control` is visibly another one, so that the kernel's had to be."""
        answer = self._answer(control)
        if answer is None:
            return False
        own = self._truth(answer)
        if not shows(truth, own, control.rows, lse=answer.lse is not None):
            return False
        if _differ(base, *_read(control, base, answer)):
            self.findings += self._measured(answer, own, answer.out, answer.lse)
        else:
            self.findings.append(
                finding(Reason.OPTION_IGNORED, control.case, f"{control.text}: the answer is the same to the bit")
            )
        return True

    def _merge(self, base: _Answer, truth: Truth, parts: list[tuple[_Answer, Truth]]) -> None:
        """The parts' outputs under the weights that their LSEs give, against the whole, in units of what all may be off by.

        LSEs off by at most L1 and L2 move the weights by w1 w2 (L1 + L2) to first order; exp(L1 + L2) covers the rest.
        """
        (one, t1), (two, t2) = parts
        if base.lse is None or one.lse is None or two.lse is None:
            return
        lse = torch.stack([one.lse, two.lse]).double()
        merged_lse = lse.logsumexp(0)
        w1, w2 = (lse - merged_lse).exp().unsqueeze(-1)
        merged = w1 * one.out.double() + w2 * two.out.double()
        b1, b2, l1, l2 = t1.bound.b, t2.bound.b, t1.bound.b_lse_after, t2.bound.b_lse_after
        off, apart = (l1 + l2).unsqueeze(-1), (one.out.double() - two.out.double()).abs()
        limit = (w1 * b1 + w2 * b2 + w1 * w2 * (apart + b1 + b2) * off) * off.exp() + truth.bound.b
        limit_lse = torch.maximum(l1, l2) + truth.bound.b_lse_after
        checks = (("out", merged, base.out.double(), limit), ("lse", merged_lse, base.lse.double(), limit_lse))
        for name, got, want, most in checks:
            units = torch.nan_to_num((got - want).abs() / most, nan=torch.inf)
            worst = float(units.max())
            if not worst <= 1.0:
                place = [int(i) for i in (units == worst).nonzero()[0]]
                text = f"merged by LSE, the parts miss the whole by {worst:.3g} times the limit, first at {name}{place}"
                self.findings.append(finding(Reason.RELATION, base.side.case, text, worst))


def shows(truth: Truth, other: Truth, rows: Tensor, *, lse: bool) -> bool:
    """Whether two exact answers differ by more than both bounds somewhere: in the output, or in an `lse` that is given.

    `rows` (R,) int64 are the rows of `truth` that those of `other` are compared with.
    """
    pairs = [(truth.exact.out, other.exact.out, truth.bound.b, other.bound.b)]
    if lse:
        pairs.append((truth.exact.lse, other.exact.lse, truth.bound.b_lse_after, other.bound.b_lse_after))
    return any(bool(((x[rows] - y).abs() > b[rows] + c).any()) for x, y, b, c in pairs)


def _read(side: Side, base: _Answer, answer: _Answer) -> tuple[Tensor, Tensor | None]:
    """Output and LSE of the base, with what the answer to `side` says of them in their place."""
    lse = None if base.lse is None or answer.lse is None else side.read(base.lse, answer.lse)
    return side.read(base.out, answer.out, factor=side.factor), lse


def _differ(base: _Answer, out: Tensor, lse: Tensor | None) -> str:
    where = bits_differ("out", base.out, out)
    if not where and base.lse is not None and lse is not None:
        where = bits_differ("lse", base.lse.float(), lse.float())
    return where


def _notes(judges: list[_Judge], record: Record) -> Iterator[str]:
    """How much was judged; and which bits moved that need not stay, where those of one call do."""
    ran, calls = [j.ran for j in judges if j.ran], sum(j.calls for j in judges)
    yield f"relations: {len(ran)} judged, on {sum(ran)} bases by {calls} calls"
    if not record.deterministic:
        return
    rows = [j for j in judges if j.relation.level is Level.ROW and j.compared]
    moved = [j for j in rows if j.moved]
    if moved:
        yield f"not batch-invariant: {moved[0].name}, {moved[0].moved[0]} (within the bound; it is not declared)"
    elif rows and not record.batch_invariant:
        count = sum(j.compared for j in rows)
        yield f"batch-invariant in {count} comparisons, undeclared: the record may say batch_invariant = True"
    if other := [j.name for j in judges if j.moved and j.relation.level is not Level.ROW]:
        yield f"right with other bits, as correct kernels may be: {', '.join(other)}"
