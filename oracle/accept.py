"""`oracle accept`: may this kernel ship?  From names to a verdict."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import oracle
from oracle.cases import Case, read_cases
from oracle.contract import OPTIONAL, REQUIRED, Call, Record
from oracle.coverage import Exercised, coverage, planned, with_relations
from oracle.doors import decide
from oracle.errors import InputError
from oracle.families import FAMILIES
from oracle.isolation.locate import KernelNotFound, locate
from oracle.isolation.outcome import Description, Failure, FailureKind
from oracle.isolation.process import KernelProcess
from oracle.kernels.table import KERNELS
from oracle.pairs import FACTORS
from oracle.references.arithmetic import Arithmetic
from oracle.references.dense import dense_fp32
from oracle.references.emulator import emulate
from oracle.relations.judge import Related, planned_relations, relate
from oracle.scope import Scope
from oracle.suite import PROFILES, Suite, build
from oracle.trial import ENOUGH, Prepare, Prepared, Seen, Trial, Watch, prepare, prepared_ahead, unwatched
from oracle.verdict import DOORS, Coverage, Finding, Verdict

if TYPE_CHECKING:
    from oracle.drift_door import DriftAsked

EMULATOR = "emulator (textbook)"
MEMORY_LIMIT = 8 << 30
USAGE = {FailureKind.NOT_FOUND, FailureKind.IMPORT_ERROR, FailureKind.BAD_DECLARATION, FailureKind.UNAVAILABLE}

Progress = Callable[[int, int, str], None]  # cases done, cases in all, what is being judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user asked for."""

    candidate: str
    against: str = ""
    families: tuple[str, ...] = ()
    doors: tuple[str, ...] = ("bits", "accuracy")
    cases: Path | None = None
    device: str = "cpu"
    profile: str = ""  # "" = quick for kernels that declare themselves interpreted, else default
    seed: int | None = None  # None = a hash of the candidate's source and the suite's version
    within_fp32: float | None = None
    sanitize: bool = False  # on cuda: the candidate under compute-sanitizer
    graph: bool = False  # on cuda: the candidate's answers from replays of CUDA graphs
    drift: DriftAsked | None = None  # what door 3 compares


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A kernel in its process, with what it declared."""

    name: str
    process: KernelProcess
    description: Description
    record: Record
    scope: Scope


def open_kernel(name: str, device: str, *, sanitize: bool = False, graph: bool = False) -> Candidate:
    """The kernel called `name`, loaded in a process of its own.  Raises InputError where it cannot be."""
    try:
        target = locate(name, {key: row.target for key, row in KERNELS.items()})
    except KernelNotFound as problem:
        raise InputError(str(problem)) from None
    process = KernelProcess(
        target,
        device=device,
        memory_limit_bytes=MEMORY_LIMIT,
        threads=max(1, (os.cpu_count() or 2) - 1),
        sanitize=sanitize,
        graph=graph,
    )
    description = process.describe()
    if isinstance(description, Failure):
        process.close()
        if description.kind in USAGE:
            raise InputError(description.text)
        raise InputError(f"{name}: cannot be loaded: {description.text}")
    if description.has_var_keyword and description.record is None:
        process.close()
        raise InputError(f"{name}: takes **kwargs and has no record, so nothing says what it can do; name its keyword arguments")
    if absent := [p for p in REQUIRED if not description.takes(p)]:
        process.close()
        raise InputError(
            f"{name}: the contract's {absent[0]} is not among its keyword arguments; `oracle kernels` shows the contract"
        )
    record = description.record or Record()
    if device not in record.devices:
        process.close()
        raise InputError(
            f"{name}: is not for device {device}; its record has {', '.join(record.devices)}: say --device {record.devices[0]}, "
            "on a machine that has one"
        )
    named = frozenset(OPTIONAL if description.has_var_keyword else description.parameters)
    return Candidate(
        name=name,
        process=process,
        description=description,
        record=record,
        scope=Scope(record=record, parameters=named, extras=frozenset(description.required) - {*REQUIRED, *OPTIONAL}),
    )


def default_seed(source_sha256: str | None) -> int:
    """A seed that a kernel's author cannot tune for: it changes with every change of the source, and with the suite."""
    text = f"{source_sha256}/{oracle.__version__}/{sorted(FACTORS.items())}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def read_ahead(asked: Asked) -> list[Case]:
    """The user's cases.  Raises InputError for what is wrong with the request whatever the kernel: before a process starts."""
    for name in asked.families:
        if name not in FAMILIES:
            raise InputError(f"no family {name!r}; there are {', '.join(FAMILIES)}")
    if asked.profile not in ("", *PROFILES):
        raise InputError(f"no profile {asked.profile!r}; there are {', '.join(PROFILES)}")
    if (asked.sanitize or asked.graph) and asked.device != "cuda":
        raise InputError(f"--{'sanitize' if asked.sanitize else 'graph'}: got device {asked.device}; it is for --device cuda")
    if not asked.doors or not set(asked.doors) <= set(DOORS):
        raise InputError(f"doors allowed: {', '.join(asked.doors) or 'none'}; expected some of {', '.join(DOORS)}")
    if ("drift" in asked.doors) != (asked.drift is not None):
        raise InputError("door drift: it compares configurations of a checkpoint, so --door drift and --checkpoint go together")
    return [] if asked.cases is None else read_cases(asked.cases)


def plan(asked: Asked, candidate: Candidate, own_cases: Sequence[Case] = ()) -> Suite:
    """The suite that would be run.  Raises InputError where no case fits the kernel."""
    seed = default_seed(candidate.description.source_sha256) if asked.seed is None else asked.seed
    profile = asked.profile or ("quick" if candidate.record.interpreted else "default")
    suite = build(candidate.scope, profile=profile, seed=seed, families=asked.families)
    suite = _with_cases(suite, candidate, own_cases)
    if not suite.cases:
        reasons = ", ".join(sorted({reason for _, reason in suite.skipped}))
        raise InputError(f"{candidate.name}: no case fits it ({reasons}); widen its record or choose another --family")
    return suite


def _with_cases(suite: Suite, candidate: Candidate, cases: Sequence[Case]) -> Suite:
    """The user's cases first, then the suite."""
    refused = [(c, reason) for c in cases if (reason := candidate.scope.refuses(c)) is not None]
    taken = [c for c in cases if candidate.scope.refuses(c) is None]
    return replace(suite, cases=(*taken, *suite.cases), skipped=(*suite.skipped, *refused), own=tuple(cases))


@contextmanager
def _opened(asked: Asked) -> Iterator[tuple[Candidate, Candidate | None, Suite]]:
    """The candidate, its incumbent where one is named, and the suite; their processes end with the block."""
    own_cases = read_ahead(asked)
    candidate = open_kernel(asked.candidate, asked.device, sanitize=asked.sanitize, graph=asked.graph)
    other = None
    try:
        suite = plan(asked, candidate, own_cases)
        if asked.against:
            other = open_kernel(asked.against, asked.device)
            suite = _both(suite, other)
        yield candidate, other, suite
    finally:
        candidate.process.close()
        if other is not None:
            other.process.close()


def answer_once(asked: Asked, watch: Watch, progress: Progress = lambda done, total, what: None) -> bool:
    """`watch` has been given the answer to every case of the suite, each called once; False where one has none or is wrong."""
    with _opened(asked) as (candidate, other, suite), _one_thread():
        trial = _trial(asked, candidate, other, suite, watch)
        for i, prepared in enumerate(prepared_ahead(suite.cases, candidate.record, prepare)):
            progress(i, len(suite.cases), prepared.case.name)
            if trial.run_once(prepared).findings:
                return False
    return True


def accept(
    asked: Asked,
    progress: Progress = lambda done, total, what: None,
    make: Prepare = prepare,
    watch: Watch = unwatched,
) -> Verdict:
    """The verdict on `asked.candidate`.  Raises InputError for wrong usage; a kernel that misbehaves is a verdict.

    `make` prepares the cases: who judges many kernels on the same ones keeps what he made.  `watch` is given the first answer to
    every case that has one.
    """
    with _opened(asked) as (candidate, other, suite):
        if asked.drift is None:
            return _judged(asked, candidate, other, suite, progress, make, watch)
        from oracle.checkpoints.isolated import isolated
        from oracle.drift_door import check, through, waits

        kernel = isolated(candidate.name, candidate.process, candidate.description, candidate.record)
        check(asked.drift, kernel)
        verdict = _judged(asked, candidate, other, suite, progress, make, watch)
        return through(verdict, asked.drift, kernel, progress) if waits(verdict) else verdict


def _judged(
    asked: Asked,
    candidate: Candidate,
    other: Candidate | None,
    suite: Suite,
    progress: Progress,
    make: Prepare,
    watch: Watch,
) -> Verdict:
    """The verdict by all doors but drift."""
    seen, extra, related, stopped = _run(asked, candidate, other, suite, progress, make, watch)
    has_lse = "return_lse" in candidate.scope.parameters
    ran = [Exercised(case=s.case, fills=s.fills, has_lse=has_lse) for s in seen]
    covered = with_relations(coverage(candidate.scope, suite, ran), candidate.scope, suite, related.ran)
    return decide(
        candidate=asked.candidate,
        incumbent=asked.against or EMULATOR,
        named=bool(asked.against),
        record=candidate.record,
        seen=seen,
        extra=extra,
        coverage=_unless_asked(asked, suite, covered),
        doors=asked.doors,
        seed=suite.seed,
        within_fp32=asked.within_fp32,
        incumbent_precision=other.record.precision if other else None,
        notes=[*_stopped(stopped), *related.notes],
        environment=environment(asked, candidate, suite),
    )


def _stopped(not_run: int) -> list[str]:
    return [f"stopped after {ENOUGH} cases with findings: {not_run} cases were not run"] if not_run else []


def _unless_asked(asked: Asked, suite: Suite, covered: Coverage) -> Coverage:
    """What was covered; a tenth of the suite is too little to accept on, unless the user asked for it and not the record."""
    if asked.profile or suite.profile != "quick":
        return covered
    return replace(covered, missing=("the whole suite (to accept on a tenth of it, say --profile quick)", *covered.missing))


def listed(asked: Asked) -> Coverage:
    """What `accept` would cover, without judging anything."""
    own_cases = read_ahead(asked)
    candidate = open_kernel(asked.candidate, asked.device)
    try:
        suite = plan(asked, candidate, own_cases)
        plans = planned(suite, "return_lse" in candidate.scope.parameters)
        relations = planned_relations(candidate.scope, quick=suite.profile == "quick")
        covered = with_relations(coverage(candidate.scope, suite, plans), candidate.scope, suite, relations)
        return _unless_asked(asked, suite, covered)
    finally:
        candidate.process.close()


def _both(suite: Suite, other: Candidate) -> Suite:
    """Only cases that the incumbent can take as well: what it cannot is counted as skipped."""
    refused = [(c, f"incumbent: {reason}") for c in suite.cases if (reason := other.scope.refuses(c)) is not None]
    kept = tuple(c for c in suite.cases if other.scope.refuses(c) is None)
    if not kept:
        raise InputError(f"{other.name}: takes none of the candidate's cases ({refused[0][1]}); choose another incumbent")
    return replace(suite, cases=kept, skipped=(*suite.skipped, *refused))


def textbook(prepared: Prepared) -> tuple[Tensor, Tensor | None]:
    """Rows of the default incumbent: the emulator with the default arithmetic."""
    return emulate(prepared.laid.call, Arithmetic(), prepared.truth.rows)


def _fp32(call: Call) -> Tensor:
    return dense_fp32(call)[0]


def _run(
    asked: Asked,
    candidate: Candidate,
    other: Candidate | None,
    suite: Suite,
    progress: Progress,
    make: Prepare,
    watch: Watch,
) -> tuple[list[Seen], list[Finding], Related, int]:
    """(what each case showed, findings beside them, what the relations showed, cases not run)."""
    trial = _trial(asked, candidate, other, suite, watch)
    seen: list[Seen] = []
    total = len(suite.cases)
    with _one_thread():
        for prepared in prepared_ahead(suite.cases, candidate.record, make):
            progress(len(seen), total, prepared.case.name)
            seen.append(trial.run(prepared))
            if sum(1 for s in seen if s.findings) >= ENOUGH:
                return seen, [], Related(), total - len(seen)
        related = Related()
        if not suite.families:
            related = relate(
                trial,
                candidate.scope,
                seed=suite.seed,
                quick=suite.profile == "quick",
                progress=lambda name: progress(total, total, f"relation {name}"),
            )
        progress(total, total, "the first cases once more")
        return seen, [*related.findings, *trial.return_to_first()], related, 0


def _trial(asked: Asked, candidate: Candidate, other: Candidate | None, suite: Suite, watch: Watch) -> Trial:
    return Trial(
        candidate.process,
        candidate.record,
        quick=suite.profile == "quick",
        incumbent=None if other else textbook,
        other=other.process if other else None,
        fp32=_fp32 if asked.within_fp32 is not None else None,
        watch=watch,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """This process computes on one thread: the candidate's has the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def environment(asked: Asked, candidate: Candidate, suite: Suite) -> dict[str, object]:
    """Everything that the verdict depends on besides the kernel's source."""
    return {
        "oracle": oracle.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": asked.device,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": max(1, (os.cpu_count() or 2) - 1),
        "profile": suite.profile,
        "seed": suite.seed,
        "suite_sha256": suite.digest(),
        "suite_skipped": suite.not_declared(),
        "source_sha256": candidate.description.source_sha256,
        "record": asdict(candidate.record),
        "command": " ".join(["oracle", *sys.argv[1:]]),
    }
