"""Two kernels timed against each other, case by case, on one pool and one plan: `oracle bench`.

A kernel whose answer is wrong is not timed, nor is anything on data that is not random.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import oracle
from oracle.bench_case import Work, calls_of, check_random, grid, work_of
from oracle.cases import Case
from oracle.checkpoints.clusters import Estimate
from oracle.checkpoints.configurations import Plugged
from oracle.checkpoints.knob import available
from oracle.contract import Call
from oracle.errors import InputError
from oracle.measure import measure, tell
from oracle.rates import Ceiling, cache_bytes, copies, products
from oracle.references.roundoff import roundoff
from oracle.rows import sample_rows
from oracle.scope import Scope
from oracle.timing import in_turns, median_of, ratio_of, waited_s

ROWS, ROWS_AGAIN = 40, 8  # random rows whose answers are compared with the exact ones, before the timing and after
CACHES = 2  # of the buffers together, at least, so that none finds itself in the cache from the time before
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user asked for."""

    a: str
    b: str
    families: tuple[str, ...]
    contexts: tuple[int, ...]
    shapes: tuple[str, ...]
    dtype: str = "bf16"
    page_size: int = 64
    device: str = "cpu"
    rounds: int = 10
    seconds: float = 0.5  # of each block
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One kernel at one case."""

    kernel: str
    first_s: float  # its first call on the case, compiling included
    max_e: float  # error over its bound, at the rows compared before the timing
    seconds: Estimate  # of a call
    of_products: Estimate  # FLOP/s over those of the matrix product, round by round
    of_copy: Estimate  # bytes/s over those of the copy
    of_floor: Estimate  # the floor's time over its own
    rounds: tuple[float, ...]  # seconds of a call, round by round


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case."""

    family: str
    shape: str
    context: int
    flops: float
    nbytes: float
    buffers: int  # that the calls rotate through
    products_flops: float  # FLOP/s of the matrix product, the median round
    copy_bytes: float  # bytes/s of the copy
    floor_s: float  # what the case takes at these rates: the larger of the two times
    bound_by: str  # "products" or "copy": which of the two that is
    a: Timed
    b: Timed
    ratio: Estimate  # time of A over time of B


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Every case that both kernels take, and those that one does not."""

    a: str
    b: str
    rows: tuple[Row, ...]
    skipped: tuple[tuple[str, str], ...]  # (case, which kernel and why)
    environment: dict[str, Any]


def bench(asked: Asked, progress: Progress) -> Bench:
    """The two kernels over the grid of cases that was asked for.

    Raises InputError: a kernel or a family is unknown or not here, no case is one that both take, or an answer is wrong.
    """
    a, b = available(asked.a, asked.device), available(asked.b, asked.device)
    every = list(
        grid(asked.families, asked.contexts, asked.shapes, dtype=asked.dtype, page_size=asked.page_size, seed=asked.seed)
    )
    refused = {case.name: why for case in every if (why := _refused(case, a, b))}
    cases = [case for case in every if case.name not in refused]
    if not cases:
        raise InputError(f"no case to time: {'; '.join(f'{name}: {why}' for name, why in refused.items()) or 'none asked for'}")
    ceilings = products(_torch_dtype(cases[0]), asked.device), copies(asked.device)
    rows = []
    for number, case in enumerate(cases):
        progress(number, len(cases), case.name)
        rows.append(_row(case, a, b, ceilings, asked))
    return Bench(a=asked.a, b=asked.b, rows=tuple(rows), skipped=tuple(refused.items()), environment=_environment(asked, a, b))


def _refused(case: Case, *kernels: Plugged) -> str:
    """Which kernel has not declared the case, and why; "" where both have."""
    for kernel in kernels:
        if why := Scope(record=kernel.record, parameters=kernel.takes).refuses(case):
            return f"{kernel.name}: {why}"
    return ""


def _torch_dtype(case: Case) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case.dtype]


def _row(case: Case, a: Plugged, b: Plugged, ceilings: tuple[Ceiling, Ceiling], asked: Asked) -> Row:
    """Compared, timed in turns with the ceilings, and compared again."""
    (first,) = calls_of(case, asked.device, 1)
    work = work_of(first)
    buffers = [first, *calls_of(replace(case, seed=case.seed + 1), asked.device, _others(work, asked.device))]
    for call in buffers:
        check_random(case.name, call)
    runs = [Runs(kernel, buffers) for kernel in (a, b)]
    firsts = [_first_s(case, *both, asked.device) for both in zip((a, b), runs, strict=True)]
    errors = [compare(case, kernel, first, ROWS) for kernel in (a, b)]
    gemm, copy = ceilings
    works: dict[str, Callable[[], object]] = {"products": gemm.work, "copy": copy.work, "a": runs[0], "b": runs[1]}
    times = in_turns(works, asked.rounds, asked.seconds, asked.device, lambda done, total: None)
    first.q.neg_()  # the same tensors with other numbers: who answers from memory now answers wrongly
    for kernel in (a, b):
        compare(case, kernel, first, ROWS_AGAIN)
    rate = [gemm.amount / s for s in times["products"]]
    bandwidth = [copy.amount / s for s in times["copy"]]
    floors = [_floor(work, *both) for both in zip(rate, bandwidth, strict=True)]

    def timed(kernel: Plugged, key: str, first_s: float, max_e: float) -> Timed:
        return Timed(
            kernel=kernel.name,
            first_s=first_s,
            max_e=max_e,
            seconds=median_of(times[key]),
            of_products=ratio_of([work.flops / s for s in times[key]], rate),
            of_copy=ratio_of([work.nbytes / s for s in times[key]], bandwidth),
            of_floor=ratio_of([floor for floor, _ in floors], times[key]),
            rounds=times[key],
        )

    typical = median_of(rate).value, median_of(bandwidth).value
    return Row(
        family=case.family.name,
        shape=case.name.split()[1],
        context=case.kv_lens[0] - case.q_lens[0],
        flops=work.flops,
        nbytes=work.nbytes,
        buffers=len(buffers),
        products_flops=typical[0],
        copy_bytes=typical[1],
        floor_s=_floor(work, *typical)[0],
        bound_by=_floor(work, *typical)[1],
        a=timed(a, "a", firsts[0], errors[0]),
        b=timed(b, "b", firsts[1], errors[1]),
        ratio=ratio_of(times["a"], times["b"]),
    )


def _first_s(case: Case, kernel: Plugged, runs: Runs, device: str) -> float:
    """Seconds of the kernel's first call on the case.  Raises InputError where it fails."""
    try:
        return waited_s(runs, device)
    except Exception as problem:
        said = (str(problem).strip() or repr(problem)).splitlines()[0]
        raise InputError(f"{kernel.name}, {case.name}: its call failed: {type(problem).__name__}: {said}") from problem


def _others(work: Work, device: str) -> int:
    """Buffers beside the first one: one at least, and with it more than CACHES caches."""
    return max(1, int(CACHES * cache_bytes(device)[0] // max(1.0, work.nbytes)))


def _floor(work: Work, flops_per_s: float, bytes_per_s: float) -> tuple[float, str]:
    """(seconds that the case takes at these rates, which of them says so)."""
    return max((work.flops / flops_per_s, "products"), (work.nbytes / bytes_per_s, "copy"))


class Runs:
    """Calls of one kernel, the next buffer each time; what it returns is dropped."""

    def __init__(self, kernel: Plugged, calls: Sequence[Call]) -> None:
        self._ready = [partial(run, kernel, call) for call in calls]
        self._next = 0

    def __call__(self) -> None:
        """One call."""
        self._ready[self._next]()
        self._next = (self._next + 1) % len(self._ready)


def run(kernel: Plugged, call: Call) -> Tensor:
    """The kernel's answer (total_q, q_heads, head_dim_v), in `call.out` where it takes that."""
    options = {name: value for name, value in call.keywords().items() if name in kernel.takes and name != "return_lse"}
    returned: Any = kernel.function(call.q, call.k_cache, call.v_cache, **options)
    if call.out is not None and "out" in kernel.takes:
        return call.out
    answer: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return answer


def compare(case: Case, kernel: Plugged, call: Call, at_least: int) -> float:
    """The kernel's largest error over its bound, at the rows on edges and `at_least` rows in all.

    Raises InputError where it is over 1, or where any element of the answer is not finite: a wrong kernel is not timed.
    """
    if call.out is not None:
        call.out.fill_(torch.nan)
    out = run(kernel, call)
    who, next_step = f"{kernel.name}, {case.name}", f"a wrong kernel is not timed; see `oracle accept {kernel.name}`"
    if out.shape != (call.q.shape[0], call.q.shape[1], call.v_cache.shape[3]):
        raise InputError(f"{who}: got an answer of {tuple(out.shape)} for q of {tuple(call.q.shape)}; {next_step}")
    if lost := int((~torch.isfinite(out)).sum()):
        raise InputError(f"{who}: {lost} of {out.numel()} elements of its answer are not finite; {next_step}")
    rows = sample_rows(case, at_least)
    exact = replace(call, out=None)
    limits = roundoff(kernel.record.precision, dtype=case.dtype, out_dtype=case.dtype, scaled=False)
    worst = measure(tell(exact, rows, limits), exact, out[rows.to(out.device)], None).worst
    if not worst.units <= 1.0:
        raise InputError(
            f"{who}: e = {worst.units:.3g} at row {worst.row} head {worst.head} column {worst.column}: got {worst.got:.6g}, "
            f"exact {worst.want:.6g}, limit {worst.limit:.2g}; {next_step}"
        )
    return worst.units


def _environment(asked: Asked, *kernels: Plugged) -> dict[str, Any]:
    """What the figures depend on, and the command."""
    cache, source = cache_bytes(asked.device)
    return setting(asked.device) | {
        "cache_bytes": cache,
        "cache_from": source,
        "rounds": asked.rounds,
        "block_s": asked.seconds,
        "page_size": asked.page_size,
        "dtype": asked.dtype,
        "sources": {kernel.target: kernel.source_sha256 for kernel in kernels},
    }


def setting(device: str) -> dict[str, Any]:
    """The machine and the versions that times depend on, and the command."""
    return {
        "oracle": oracle.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "command": " ".join(["oracle", *sys.argv[1:]]),
    }
