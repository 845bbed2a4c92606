"""`oracle fuzz`: a search for a call that a kernel gets wrong, and the smallest such call.

Hypothesis draws the cases and steers them towards large errors; each is judged by the same trial as in `oracle accept`.  Same
seed and same version of hypothesis, same cases in the same order; the time only says how many of them.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings, target
from hypothesis.errors import Flaky, Unsatisfiable

from oracle.accept import Candidate
from oracle.case_strategies import cases
from oracle.cases import Case, to_toml
from oracle.errors import InputError
from oracle.judged import Judged, judge
from oracle.shrink import size, smallest
from oracle.trial import Trial
from oracle.verdict import Reason

ROUND = 400  # examples of one round; each begins anew, and climbs towards large errors in its second half
ALIKE = 2  # examples judged in the first half that differ by nothing but lengths and numbers: hypothesis draws many of them
SHRINK_S = 50.0  # shrinking ends after this: with the last call, a command ends about a minute after its search
FARTHEST = 1e6  # errors are not steered beyond this

Progress = Callable[[float, str], None]  # seconds since the start, what is being done


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a search ends."""

    search_s: float
    shrink_s: float = SHRINK_S
    examples: int = 1 << 30  # cases judged before anything is found


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A case that a kernel gets wrong."""

    judged: Judged
    alone: bool | None  # the same fault shows in a fresh process, without the calls before it; None = not tried
    after: int  # examples before it was first seen
    shrunk_in: int  # examples that shrinking took
    finished: bool  # nothing simpler shows the fault; False where shrinking was cut short


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What a search has shown."""

    cases: tuple[Case, ...]  # distinct cases judged, in order, those of shrinking included
    found: Found | None
    inspect: tuple[Judged, ...]  # e > 1 with e_det <= 1, the largest first: worth a look, no fault
    max_e: float
    max_e_det: float
    max_e_lse: float
    seconds: float
    interrupted: bool  # by Ctrl-C


class _Stop(BaseException):
    """Ends a search from inside an example: time is out.  Hypothesis lets it through, as it does a KeyboardInterrupt."""


class _Dear(BaseException):
    """Ends a round from inside an example: each failing one costs a new process, which hypothesis would spend hundreds of."""


class _Fault(Exception):
    """What hypothesis takes for a failing example."""


@dataclass(slots=True, kw_only=True)
class _Search:
    """All that a search has seen so far."""

    candidate: Candidate
    limits: Limits
    progress: Progress
    started: float
    trial: Trial
    judged: dict[Case, Judged] = field(default_factory=dict)
    reason: Reason | None = None  # of the fault that was found first
    best: Judged | None = None  # the smallest case with that fault
    after: int = 0
    deadline: float = math.inf
    finished: bool = False

    def judge(self, drawn: Case) -> Judged:
        """What the case shows; from memory where it was judged before, so that a kernel of varying bits misleads nobody."""
        now = time.monotonic()
        if now >= self.deadline and self.judged:  # a search of no examples would find nothing in any kernel
            raise _Stop
        case = named(drawn)
        if (known := self.judged.get(case)) is not None:
            return known
        if self.best is None and len(self.judged) >= self.limits.examples:
            raise _Stop
        self.progress(now - self.started, self._doing())
        judged = judge(self.trial, case, self.candidate.record)
        self.judged[case] = judged
        if judged.reason is not None and self.reason is None:
            self.reason, self.after = judged.reason, len(self.judged)
            self.deadline = time.monotonic() + self.limits.shrink_s
        if self.fails(judged) and (self.best is None or size(case) <= size(self.best.case)):
            self.best = judged
        return judged

    def fails(self, judged: Judged) -> bool:
        """Whether it shows the fault that was found first."""
        return self.reason is not None and _kind(judged.reason) is _kind(self.reason)

    def _doing(self) -> str:
        return f"{len(self.judged)} examples" + ("" if self.best is None else f", found {self.reason}, shrinking")


def search(candidate: Candidate, start: int, limits: Limits, progress: Progress = lambda seconds, what: None) -> Searched:
    """What a search from seed `start` shows of the kernel: a fault with its smallest case, or none within the limits.

    An interrupt (Ctrl-C) ends it with what was found so far.  Raises InputError where no case fits the kernel.
    """
    if not candidate.scope.input_classes:
        raise InputError(f"{candidate.name}: no input class brings the case extras that it asks for; `oracle accept` says which")
    state = _Search(
        candidate=candidate,
        limits=limits,
        progress=progress,
        started=(now := time.monotonic()),
        trial=_trial(candidate),
        deadline=now + limits.search_s,
    )
    threads, interrupted, found = torch.get_num_threads(), False, None
    torch.set_num_threads(1)
    try:
        _search(state, start)
        found = _confirmed(state)
    except KeyboardInterrupt:
        interrupted = True
        found = _found(state, state.best, alone=None)
    finally:
        torch.set_num_threads(threads)
    every = list(state.judged.values())
    answered = [j for j in every if j.seen.candidate is not None]
    return Searched(
        cases=tuple(state.judged),
        found=found,
        inspect=tuple(sorted((j for j in every if j.inspect and not j.faults), key=_beyond, reverse=True)),
        max_e=max((j.e for j in answered), default=0.0),
        max_e_det=max((j.e_det for j in answered), default=0.0),
        max_e_lse=max((j.e_lse or 0.0 for j in answered), default=0.0),
        seconds=time.monotonic() - state.started,
        interrupted=interrupted,
    )


def named(case: Case) -> Case:
    """The case under a name that follows from what it is."""
    content = to_toml(replace(case, name="", family=replace(case.family, name="drawn", source="")))
    return replace(case, name=f"fuzz-{hashlib.sha256(content.encode()).hexdigest()[:8]}")


def _search(state: _Search, start: int) -> None:
    """Rounds of hypothesis until something is found, which is then made as small as it gets; ends where time is out."""
    try:
        rounds = count()
        while (best := state.best) is None:
            _round(state, start, next(rounds))
        smallest(best.case, state.candidate.scope, lambda case: state.fails(state.judge(case)))
        state.finished = True
    except _Stop:
        return


def _round(state: _Search, start: int, number: int) -> None:
    alike: Counter[Case] = Counter()

    @seed(int.from_bytes(hashlib.sha256(f"{start}/{number}".encode()).digest()[:8], "little"))
    @settings(
        database=None,
        deadline=None,
        max_examples=ROUND,
        phases=(Phase.generate, Phase.target, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(cases(state.candidate.scope))
    def example(case: Case) -> None:
        alike[options := replace(case, q_lens=(), kv_lens=(), rows=0, seed=0)] += 1
        if state.best is None and alike[options] > ALIKE and alike.total() <= ROUND // 2:
            return
        judged = state.judge(case)
        if state.fails(judged):
            raise _Fault if judged.seen.candidate is not None else _Dear
        if judged.seen.candidate is not None:
            target(_steered(judged.e_det), label="e_det")
            target(_steered(judged.e_lse or 0.0), label="e_lse")

    try:
        example()
    except (_Fault, _Dear, Flaky):
        return
    except Unsatisfiable:
        raise InputError(f"{state.candidate.name}: no case fits it; widen its record") from None


def _confirmed(state: _Search) -> Found | None:
    """What was found, put to a fresh process; or, where nothing was, what the first cases show when they are called again."""
    best = state.best
    if best is None:
        return _later(state)
    state.candidate.process.close()
    again = judge(_trial(state.candidate), best.case, state.candidate.record)
    return _found(state, again, alone=True) if state.fails(again) else _found(state, best, alone=False)


def _later(state: _Search) -> Found | None:
    findings = state.trial.return_to_first()
    if not findings:
        return None
    before = next(j for j in state.judged.values() if j.case.name == findings[0].case)
    state.after = len(state.judged)
    return _found(state, replace(before, faults=tuple(findings)), alone=False)


def _found(state: _Search, judged: Judged | None, *, alone: bool | None) -> Found | None:
    if judged is None:
        return None
    shrunk_in = len(state.judged) - state.after
    return Found(judged=judged, alone=alone, after=state.after, shrunk_in=shrunk_in, finished=state.finished)


def _trial(candidate: Candidate) -> Trial:
    """A trial of the kernel; an interpreted one is called under fewer fills, as in the quick profile."""
    return Trial(candidate.process, candidate.record, quick=candidate.record.interpreted)


def _kind(reason: Reason | None) -> Reason | None:
    """The reason, wrong numbers being one: what shows in the output of one case may show in the LSE of a smaller one."""
    return Reason.ERROR if reason is Reason.LSE else reason


def _steered(error: float) -> float:
    """A finite number that is larger for larger errors."""
    return error if error <= FARTHEST else FARTHEST


def _beyond(judged: Judged) -> float:
    return max(f.units for f in judged.inspect)
