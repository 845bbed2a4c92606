"""A mutant: a correct kernel with one planted fault, as a row of a table, and the kernel that such a row makes.

The body of all of them is the emulator.  A fault is some of: another arithmetic, a patch of the call before it, other visible
keys, another body, a patch of the result, another way to write it; `where` says which (row, head) get the faulty result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from oracle.contract import Answer, Call, DeclaredKernel, Record, contract_kernel
from oracle.mutants.reports import REPORTS
from oracle.mutants.understood import WRONG
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import emulate
from oracle.references.plan import RowPlan, live_rows, row_plan
from oracle.verdict import Reason

LEFT = 3.0  # what a buffer that the kernel allocates holds where it never writes: finite, as recycled memory is

_TEXTBOOK = Arithmetic()
_NO_RECORD = Record()

Shapes = tuple[object, ...]
Result = tuple[Tensor, Tensor]  # out (R, q_heads, head_dim_v) and lse (R, q_heads) of R rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What a kernel may keep of a call: its options and copies of its plan, and its result."""

    call: Call  # without q and caches: those are empty
    strides: tuple[int, ...]  # of k_cache
    result: Result  # of the live rows


@dataclass(slots=True)
class Past:
    """What one kernel object has seen so far."""

    calls: int = 0
    same_shapes: dict[Shapes, Remembered] = field(default_factory=dict)  # the first call of each shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One call of a mutant, and what went before it."""

    call: Call
    plan: RowPlan  # of all live rows
    past: Past
    want_lse: bool = True  # the caller asks for the LSE

    @property
    def q_len(self) -> Tensor:
        """New tokens of each live row's sequence, (R,) int64."""
        cu = self.call.cu_seqlens_q.long()
        return (cu[1:] - cu[:-1])[self.plan.seq]

    @property
    def kv_len(self) -> Tensor:
        """Keys of each live row's sequence, (R,) int64."""
        return self.call.seqused_k.long()[self.plan.seq]

    @property
    def first_of_shape(self) -> Remembered | None:
        """The first call of the same shapes, None where this is it."""
        return self.past.same_shapes.get(shapes(self.call))


Before = Callable[[Run], Call]
Mask = Callable[[Call, RowPlan], RowPlan]
Body = Callable[[Call, Arithmetic, Tensor], Result]  # a call, an arithmetic and R packed rows
After = Callable[[Run, RowPlan, Tensor, Tensor], Result]  # the plan and the result of the faulty rows
Where = Callable[[Run], Tensor]  # bool, broadcasts to (live rows, q_heads)
Write = Callable[[Run, Tensor, Result, Result], None]  # bool (rows, q_heads) of faulty pairs, the result, the buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One wrong kernel."""

    report: str  # id in REPORTS of the public report that it is modelled on
    models: str  # the mistake, in a few words
    reasons: tuple[Reason, ...] = WRONG  # any of these in a verdict counts as having understood it
    arithmetic: Arithmetic = _TEXTBOOK  # what it computes with
    claims: Arithmetic = _TEXTBOOK  # that of the correct kernel that it claims to be
    record: Record = _NO_RECORD  # of that kernel
    against: str = ""  # the incumbent that it is judged against; "" = the emulator
    before: Before | None = None
    mask: Mask | None = None
    body: Body = emulate
    after: After | None = None
    where: Where | None = None  # None = everywhere
    write: Write | None = None

    @property
    def kind(self) -> str:
        """The kind of fault: the prefix of the report's id."""
        return self.report.partition("-")[0]

    @property
    def reference(self) -> str:
        """The public report: project, issue or pull request."""
        return REPORTS[self.report]


@dataclass(frozen=True, slots=True)
class Faulty:
    """Attention with one planted fault; what it keeps between calls lives in `past`."""

    mutant: Mutant
    past: Past = field(default_factory=Past)

    def __call__(self, call: Call, return_lse: bool) -> Answer:
        """The contract's result, but for the fault."""
        run = Run(call=call, plan=row_plan(call, live_rows(call)), past=self.past, want_lse=return_lse)
        chosen = chosen_pairs(self.mutant, run)
        result = compute(self.mutant, run, chosen)
        buffers = _buffers(call, result[0].dtype)
        if self.mutant.write is not None and bool(chosen.any()):
            self.mutant.write(run, chosen, result, buffers)
        else:
            written(result, buffers)
        remember(self.past, call, result)
        return buffers if return_lse else buffers[0]


def shapes(call: Call) -> Shapes:
    """What a cache of plans or graphs is keyed by: the pool's size is not part of it."""
    return (*call.q.shape, *call.k_cache.shape[1:], *call.page_table.shape, call.q.dtype, call.k_cache.dtype)


def chosen_pairs(mutant: Mutant, run: Run) -> Tensor:
    """Which (row, head) get the faulty result, bool (live rows, q_heads)."""
    shape = len(run.plan), run.call.q.shape[1]
    if mutant.where is None:
        return torch.ones(shape, dtype=torch.bool)
    return mutant.where(run).expand(shape)


def compute(mutant: Mutant, run: Run, chosen: Tensor) -> Result:
    """out and lse of all live rows: the faulty result at the chosen pairs, the correct one elsewhere."""
    if not bool(chosen.any()):
        return emulate(run.call, mutant.claims)
    rows = chosen.any(1).nonzero().flatten()
    wrong = _faulty(mutant, run, rows)
    if bool(chosen.all()):
        return wrong
    out, lse = emulate(run.call, mutant.claims)
    own = chosen[rows].to(out.device)
    out[rows] = torch.where(own[..., None], wrong[0], out[rows])
    lse[rows] = torch.where(own, wrong[1], lse[rows])
    return out, lse


def written(result: Result, buffers: Result) -> None:
    """The live rows of the buffers hold the result."""
    for buffer, rows in zip(buffers, result, strict=True):
        buffer[: len(rows)] = rows


def _faulty(mutant: Mutant, run: Run, rows: Tensor) -> Result:
    call = run.call if mutant.before is None else mutant.before(run)
    arithmetic = mutant.arithmetic
    if mutant.mask is not None:
        arithmetic = replace(arithmetic, planted=replace(arithmetic.planted, mask=mutant.mask))
    out, lse = mutant.body(call, arithmetic, run.plan.row[rows])
    return (out, lse) if mutant.after is None else mutant.after(run, run.plan.take(rows), out, lse)


def _buffers(call: Call, dtype: torch.dtype) -> Result:
    """`out`, or a new tensor in its place, and a new tensor for the LSE."""
    shape = *call.q.shape[:2], call.v_cache.shape[-1]
    out = torch.full(shape, LEFT, dtype=dtype, device=call.q.device) if call.out is None else call.out
    return out, torch.full(shape[:2], LEFT, dtype=torch.float32, device=call.q.device)


def remember(past: Past, call: Call, result: Result) -> None:
    """`past` holds one call more."""
    nothing = call.q.new_zeros(0)
    kept: dict[str, Any] = {name: _copied(value) for name, value in call.keywords().items() if name != "out"}
    past.calls += 1
    own = Remembered(
        call=Call(q=nothing, k_cache=nothing, v_cache=nothing, **kept),
        strides=call.k_cache.stride(),
        result=(result[0].clone(), result[1].clone()),
    )
    past.same_shapes.setdefault(shapes(call), own)


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def table_kernel(table: Mapping[str, Mutant], module: str, name: str) -> DeclaredKernel:
    """The mutant of that name as a kernel.  Raises AttributeError with the names that there are."""
    if name not in table:
        raise AttributeError(f"module {module!r} has no fault {name!r}; it has {', '.join(table)}")
    return contract_kernel(table[name].record, name=name)(Faulty(table[name]))
