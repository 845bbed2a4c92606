"""Making a lock: the figures of a verdict, and how far each of them moves by itself from seed to seed."""

from __future__ import annotations

import contextlib
import hashlib
import math
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from scipy.stats import t

import oracle
from oracle.accept import Asked, Progress, answer_once
from oracle.constants import constants
from oracle.errors import InputError
from oracle.inputs import INPUT_CLASSES
from oracle.ledger import Ledger, Measurement
from oracle.lock import ALL, FIGURES, Figure, KernelLock, Lock, Row, rounded
from oracle.mutants.table import MUTANTS
from oracle.verdict import Outcome, Verdict

SEEDS = 5  # from which a spread is taken: that of the verdict and the four after it
TAIL = 0.999  # of one more seed, this share stays under the ceiling, if figures are normally distributed
LEAST = 3  # values that a spread can be taken from

Measured = Mapping[str, Measurement]  # by family, and under ALL


def factor(count: int = SEEDS) -> float:
    """Spreads between a figure and its ceiling: Student's prediction bound for one more value beside `count`."""
    return rounded(float(t.ppf(TAIL, count - 1)) * math.sqrt(1 + 1 / count))


def lock_name(verdict: Verdict) -> str:
    """The file that a kernel is locked in: `cpu`, `triton-interpreter`, `sm_90`."""
    if verdict.environment["device"] == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return f"sm_{major}{minor}"
    return "triton-interpreter" if verdict.environment["record"]["interpreted"] else "cpu"


def measured(asked: Asked, verdict: Verdict, ledger: Ledger, reason: str = "") -> KernelLock:
    """What a lock would hold of this verdict, every ceiling at its value.  Of a rejected kernel only why.

    Of several reasons it holds the one asked for, where that is among them.
    """
    reasons = [str(r) for r in verdict.reasons]
    accepted = verdict.outcome is Outcome.ACCEPT
    deterministic = bool(verdict.environment["record"]["deterministic"])
    return KernelLock(
        verdict=str(verdict.outcome),
        door=verdict.door,
        reason=reason if reason in reasons else next(iter(reasons), ""),
        against=asked.against,
        profile=str(verdict.environment["profile"]),
        suite_sha256=str(verdict.environment["suite_sha256"]),
        skipped=dict(verdict.environment["suite_skipped"]),
        families={name: _row(m, deterministic) for name, m in ledger.measurements().items()} if accepted else {},
    )


def _row(m: Measurement, deterministic: bool) -> Row:
    figures = {name: rounded(m.figures[name]) for name in FIGURES if name in m.figures}
    return Row(
        cases=m.cases,
        rows=m.rows,
        digest=m.digest if deterministic else "",
        figures={name: Figure(value=value, spread=0.0, ceiling=value) for name, value in figures.items()},
    )


def other_seeds(asked: Asked, seed: int, progress: Progress) -> list[Measured]:
    """The figures of the candidate under the SEEDS - 1 seeds after `seed`, every case called once.

    Raises InputError where it is wrong under one of them: such a kernel cannot be locked.
    """
    found: list[Measured] = []
    for other in range(seed + 1, seed + SEEDS):
        ledger = Ledger()
        if not answer_once(replace(asked, seed=other, cases=None), ledger, progress):
            raise InputError(
                f"{asked.candidate}: is wrong with seed {other}; see `oracle accept {asked.candidate} --seed {other}`"
            )
        found.append(ledger.measurements())
    return found


def with_spread(kernel: KernelLock, others: Sequence[Measured]) -> KernelLock:
    """`kernel` with spreads and ceilings from its own figures and those of other seeds.

    A seed that gives a row the same bits draws nothing anew there (captured inputs do not depend on it), and does not count.  A
    row for which fewer than LEAST seeds count takes the largest relative spread that the figure has in another row.
    """
    if not kernel.families:
        return kernel
    own = {family: {name: f.value for name, f in row.figures.items()} for family, row in kernel.families.items()}
    known: dict[tuple[str, str], float] = {}
    for family, figures in own.items():
        drawn = {o[family].digest: o[family].figures for o in others if family in o}
        drawn.pop(kernel.families[family].digest, None)
        for name, value in figures.items():
            values = [value, *(other[name] for other in drawn.values() if name in other)]
            if len(values) >= LEAST:
                known[family, name] = statistics.stdev(values) * factor(len(values)) / factor()
    largest = {
        name: max((s / own[f][n] for (f, n), s in known.items() if n == name and own[f][n] > 0), default=0.0) for name in FIGURES
    }
    families = {}
    for family, row in kernel.families.items():
        figures_now = {}
        for name, figure in row.figures.items():
            spread = rounded(known.get((family, name), largest[name] * figure.value))
            figures_now[name] = Figure(value=figure.value, spread=spread, ceiling=rounded(figure.value + factor() * spread))
        families[family] = replace(row, figures=figures_now)
    return replace(kernel, families=families)


def header(kernels: Mapping[str, KernelLock], environment: Mapping[str, Any], *, seed: int, shipped: bool) -> dict[str, Any]:
    """The head of a lock of these kernels, all judged in this environment."""
    whole = [kernel.families[ALL] for kernel in kernels.values() if ALL in kernel.families]
    return machine(str(environment["device"])) | {
        "oracle": oracle.__version__,
        "command": " ".join(["oracle", *sys.argv[1:]]),
        "seed": seed,
        "seeds": SEEDS,
        "factor": factor(),
        "input_classes": len(INPUT_CLASSES),
        "mutants": len(MUTANTS),
        "cases": sum(row.cases for row in whole),
        "rows": sum(row.rows for row in whole),
        "skips": sum(sum(kernel.skipped.values()) for kernel in kernels.values()),
        "shipped": shipped,
        "threads": environment["threads"],
    }


def machine(device: str) -> dict[str, Any]:
    """What bits depend on beside the kernel: versions and hardware."""
    hardware = f"{torch.backends.cpu.get_cpu_capability()}, {_processor()}"
    if device == "cuda":
        hardware = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return {
        "device": device,
        "hardware": hardware,
        "numpy": _version("numpy"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
    }


def same_machine(lock: Lock, environment: Mapping[str, Any]) -> bool:
    """Whether bits can be compared with those of `lock`: the same versions, hardware and threads."""
    here = machine(str(environment["device"])) | {"threads": environment["threads"]}
    return all(lock.header[name] == value for name, value in here.items() if name != "python")


def _processor() -> str:
    """The CPU's name and a digest of its features: BLAS libraries choose their kernels by them, beyond torch's capability."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), " ".join(value.split()))
    features = " ".join(sorted((found.get("flags") or found.get("Features") or "").split()))
    return f"{found.get('model name', platform.machine())}, features {hashlib.sha256(features.encode()).hexdigest()[:8]}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


class Book:
    """Locks in the making: kernels are entered one by one; every row of a kernel that is not entered stays as it was."""

    def __init__(self, locks: Mapping[str, Lock], *, partial: bool) -> None:
        """`locks` are those that there are, by file name; `partial`: only some of their kernels will be entered."""
        self._old, self._partial = locks, partial
        self._kernels: dict[str, dict[str, KernelLock]] = {}
        self._environment: Mapping[str, Any] = {}
        self._seed = 0

    def enter(
        self,
        name: str,
        asked: Asked,
        verdict: Verdict,
        ledger: Ledger,
        progress: Progress = lambda done, total, what: None,
        *,
        reason: str = "",
    ) -> None:
        """The kernel is in the lock of its device under `name`, with spreads from SEEDS seeds; of one that must be rejected,
        `reason`.

        Raises InputError for any other kernel that was not accepted, for one that is wrong under another seed, and where the
        lock to be added to was made on another machine.
        """
        if not reason and verdict.outcome is not Outcome.ACCEPT:
            because = f": {verdict.findings[0].text}" if verdict.findings else ""
            raise InputError(f"{asked.candidate}: {verdict.outcome}{because}; only an accepted kernel can be locked")
        file = lock_name(verdict)
        old = self._old.get(file)
        if self._partial and old is not None and not same_machine(old, verdict.environment):
            was = ", ".join(f"{name} {old.header[name]}" for name in ("torch", "hardware", "threads"))
            raise InputError(f"{file}.toml was made with {was}: on this machine, measure all of it anew: `oracle lock`")
        kernel = measured(asked, verdict, ledger, reason)
        if kernel.families:
            kernel = with_spread(kernel, other_seeds(asked, verdict.environment["seed"], progress))
        self._kernels.setdefault(file, {})[name] = kernel
        self._environment, self._seed = verdict.environment, verdict.environment["seed"]

    def closed(self) -> dict[str, Lock]:
        """The locks that any kernel was entered in, by file name."""
        found = {}
        for file, kernels in self._kernels.items():
            old = self._old.get(file)
            whole = {**(old.kernels if old else {}), **kernels}
            shipped = bool(old.header["shipped"]) if old else not self._partial
            head = header(whole, self._environment, seed=self._seed, shipped=shipped)
            new = Lock(header=head, bound=constants(), kernels=whole)
            found[file] = replace(new, waivers=old.waivers, loosened=old.loosened) if old else new
        return found


def with_reason(lock: Lock, reason: str, facts: Sequence[str]) -> Lock:
    """The lock, and in it why these facts were loosened."""
    entry = {"oracle": oracle.__version__, "reason": reason, "what": list(facts)}
    return replace(lock, loosened=(*lock.loosened, entry))
