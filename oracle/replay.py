"""`oracle replay`: saved cases put to a kernel again, each in a fresh process, with what lies round the worst element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.accept import Candidate, open_kernel
from oracle.case_text import worst
from oracle.casefile import CaseFile
from oracle.errors import InputError
from oracle.isolation.outcome import Failure
from oracle.judged import Judged, sorted_out
from oracle.measure import tell
from oracle.pool import without_fill
from oracle.trial import Prepared, Trial, prepare

REACH = 2  # rows and columns shown to each side

Progress = Callable[[int, int, str], None]  # cases done, cases in all, what is being judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """A kernel's numbers round one element: rows by columns of one head, or rows by heads of the LSE."""

    head: int  # -1 where the columns are heads
    rows: tuple[int, ...]  # packed query rows
    columns: tuple[int, ...]
    at: tuple[int, int]  # the element itself: row, column
    got: Tensor  # (rows, columns) float64, as is
    want: Tensor
    units: Tensor  # |got - want| in units of the bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One case, judged again."""

    file: CaseFile
    kernel: str
    refused: str  # why the kernel cannot take the case, "" where it was judged
    judged: Judged | None = None
    around: Around | None = None  # None where there is no result, or no element to look at


def replay(
    files: Sequence[CaseFile], kernel: str, device: str, progress: Progress = lambda done, total, what: None
) -> list[Replayed]:
    """Each case judged on `kernel`, or where that is "" on the kernel that its file names.

    Raises InputError where a file names none, a kernel cannot be loaded, or no kernel takes any of the cases.
    """
    for file in files:
        if not (kernel or file.kernel):
            raise InputError(f"{file.path}: names no kernel; say which: oracle replay {file.path} KERNEL")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    replayed = []
    try:
        with ExitStack() as stack:
            opened: dict[str, Candidate] = {}
            for done, file in enumerate(files):
                progress(done, len(files), file.path.name)
                name = kernel or file.kernel
                if name not in opened:
                    opened[name] = open_kernel(name, device)
                    stack.callback(opened[name].process.close)
                replayed.append(_one(file, opened[name]))
    finally:
        torch.set_num_threads(threads)
    if all(one.refused for one in replayed):
        reasons = ", ".join(sorted({one.refused for one in replayed}))
        raise InputError(f"{replayed[0].kernel}: cannot take any of these cases ({reasons}); name another kernel")
    return replayed


def status(replayed: Sequence[Replayed]) -> int:
    """The exit status: 1 where any case shows a fault, else 0; what is only to be inspected is none."""
    return int(any(one.judged is not None and one.judged.faults for one in replayed))


def _one(file: CaseFile, candidate: Candidate) -> Replayed:
    if refused := candidate.scope.refuses(file.case):
        return Replayed(file=file, kernel=candidate.name, refused=refused)
    prepared = prepare(file.case, candidate.record)
    trial = Trial(candidate.process, candidate.record)
    judged = sorted_out(prepared, trial.run(prepared))
    around = _around(prepared, judged, trial)
    candidate.process.close()  # the next case gets a fresh process: what it shows does not hang on this one
    return Replayed(file=file, kernel=candidate.name, refused="", judged=judged, around=around)


def _around(prepared: Prepared, judged: Judged, trial: Trial) -> Around | None:
    """The numbers round the element that the first finding is about, or round the largest error where there is none."""
    measured = judged.seen.candidate
    at = worst(judged) or (None if measured is None else measured.worst)
    if at is None or at.row < 0:
        return None
    case, f = prepared.case, prepared.case.family
    result = trial.call(prepared.laid, case)
    if isinstance(result, Failure):
        return None
    lse = trial.natural(result.lse, case.total_q)
    rows = _near(at.row, case.total_q)
    truth = tell(without_fill(prepared.laid), torch.tensor(rows), prepared.truth.roundoff)
    if at.column >= 0:
        columns = _near(at.column, f.head_dim_v)
        got = result.out[list(rows), at.head].double()
        want, limit = truth.exact.out[:, at.head], truth.bound.b[:, at.head]
    elif lse is not None:
        columns = _near(at.head, f.q_heads)
        got = lse[list(rows)].double()
        want, limit = truth.exact.lse, truth.bound.b_lse
    else:
        return None
    got, want, limit = (x[:, list(columns)] for x in (got, want, limit))
    units = torch.where(torch.isfinite(got) | (got == want), (got - want).abs() / limit, torch.inf)
    units = torch.where(got == want, 0.0, units)  # -inf too, and 0 where nothing else will do
    head, column = (at.head, at.column) if at.column >= 0 else (-1, at.head)
    units[rows.index(at.row), columns.index(column)] = at.units  # as it was judged: refined, and rows without keys by their sink
    return Around(head=head, rows=rows, columns=columns, at=(at.row, column), got=got, want=want, units=units)


def _near(index: int, count: int) -> tuple[int, ...]:
    """Up to REACH indices to each side of one, in range."""
    return tuple(range(max(0, index - REACH), min(count, index + REACH + 1)))
