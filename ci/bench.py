"""Speed and memory, by numbers: `make bench`.  Nothing here passes or fails; docs/bench.md holds one run.

Rates are compared within one process, because this machine's speed moves.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from oracle import accept, trial
from oracle.contract import Call
from oracle.references.attention import attend
from oracle.references.dense import dense_fp32
from oracle.trial import Trial

HEADS, KV_HEADS, DIM, PAGE = 32, 4, 512, 64
ROWS, CONTEXT = 8192, 40_960


def call_of(rows: int, keys: int) -> Call:
    """One sequence of Gemma 4's global layer, `rows` new tokens ending at `keys`, permuted pages, N(0, 1) inputs in bf16."""
    generator = torch.Generator().manual_seed(0)
    pages = -(-keys // PAGE)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32).bfloat16()

    return Call(
        q=normal(rows, HEADS, DIM),
        k_cache=normal(pages, PAGE, KV_HEADS, DIM),
        v_cache=normal(pages, PAGE, KV_HEADS, DIM),
        cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32),
        seqused_k=torch.tensor([keys], dtype=torch.int32),
        page_table=torch.randperm(pages, generator=generator).int()[None],
        softmax_scale=DIM**-0.5,
    )


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def gemm_rate() -> float:
    """GFLOP/s of a large fp64 matrix product in this process."""
    a = torch.randn(3072, 3072, dtype=torch.float64)
    return 2 * 3072**3 / seconds(lambda: a @ a) / 1e9


def sample(rows: int, count: int) -> Tensor:
    """`count` rows spread evenly over all of them."""
    return torch.arange(count) * (rows - 1) // (count - 1)


def flops(call: Call, rows: Tensor) -> float:
    """rows x heads x 2n(2d + 5 d_v), n the keys that each row sees."""
    n = float((int(call.seqused_k[0]) - call.q.shape[0] + rows + 1).sum())
    return n * HEADS * 2 * (2 * DIM + 5 * DIM)


def reference() -> None:
    """Rate of the sampled reference beside the GEMM's, memory beyond the inputs, and how the cost grows."""
    call = call_of(ROWS, CONTEXT)
    rows = sample(ROWS, 64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    attend(call, rows[:2], 2.0**-8)
    rates, shares = [], []
    for _ in range(3):
        gemm = gemm_rate()
        took = seconds(lambda: attend(call, rows, 2.0**-8), 1)
        rates.append(flops(call, rows) / took / 1e9)
        shares.append(rates[-1] / (0.5 * (gemm + gemm_rate())))
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    shape = f"{len(rows)} of {ROWS} rows x {HEADS} heads, {CONTEXT} keys, hd {DIM}, page {PAGE}"
    print(f"reference, {shape}, {torch.get_num_threads()} threads:")
    each = ", ".join(f"{s:.2f}" for s in shares)
    print(f"  {statistics.median(rates):.1f} GFLOP/s, {statistics.median(shares):.2f} of this process's fp64 GEMM rate ({each})")
    print(f"  peak memory beyond the inputs {peak:.2f} GiB")
    print("  cost by rows (keys fixed) and by keys (rows fixed), seconds:")
    for count in (16, 32, 64):
        took = seconds(partial(attend, call, sample(ROWS, count), 2.0**-8), 1)
        print(f"    {count:3d} rows, {CONTEXT} keys: {took:.2f}")
    for keys in (10_240, 20_480, 40_960):
        took = seconds(partial(attend, call_of(1024, keys), sample(1024, 64), 2.0**-8), 1)
        print(f"    64 rows, {keys} keys: {took:.2f}")
    small = call_of(256, 4096)
    dense = seconds(lambda: dense_fp32(small), 1)
    pairs_small = 256 * (4096 - 255 + 4096) / 2
    pairs_full = ROWS * (CONTEXT - ROWS + 1 + CONTEXT) / 2
    whole = dense * pairs_full / pairs_small
    sampled = flops(call, rows) / statistics.median(rates) / 1e9
    print(f"  dense fp32 reference: {dense:.2f} s at 256 rows x 4096 keys; extrapolated by query-key pairs to the whole shape,")
    print(f"  {whole:.0f} s, {whole / sampled:.0f} times the {sampled:.1f} s of the sampled fp64 reference")


def commands(quick: bool) -> None:
    """Whole commands, as a user waits for them."""
    runs = [
        ("oracle --help", ["--help"], 5),
        ("default profile, fast CPU kernel (sdpa-flash)", ["accept", "sdpa-flash", "--seed", "0"], 1 if quick else 3),
        (
            "quick profile, interpreted Triton",
            ["accept", "triton-prefill-32", "--against", "triton-prefill-16", "--profile", "quick", "--seed", "0"],
            1,
        ),
    ]
    for label, arguments, repeats in runs:
        command = [sys.executable, "-m", "oracle", *arguments]
        took = seconds(partial(subprocess.run, command, stdout=subprocess.DEVNULL, check=False), repeats)
        print(f"{label}: {took:.2f} s")


@dataclass(slots=True)
class Clock:
    """Seconds and calls of one function."""

    work: Callable[..., Any]
    seconds: float = 0.0
    calls: int = 0

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """What the function gives."""
        start = time.perf_counter()
        try:
            return self.work(*arguments, **keywords)
        finally:
            self.seconds += time.perf_counter() - start
            self.calls += 1


CHECKS = (  # what is timed in a verdict -> where it is done; parts of a line above are indented
    ("first calls, measured and compared", Trial, "_answer"),
    ("  measuring errors, slopes, LSE", trial, "measure"),
    ("  the textbook incumbent", accept, "textbook"),
    ("other fills and page ids, the same call again", Trial, "_again"),
    ("  without an LSE", Trial, "_without_lse"),
    ("relations", accept, "relate"),
    ("the first cases once more", Trial, "return_to_first"),
    ("doors, ratios, slopes", accept, "decide"),
)


def checks() -> None:
    """What each check costs in one verdict; docs/exam.md says how many mutants only it catches."""
    prepare = Clock(trial.prepare)
    clocks = {label: Clock(getattr(owner, name)) for label, owner, name in CHECKS}
    with ExitStack() as patched:
        for label, owner, name in CHECKS:
            clock = clocks[label]
            patched.enter_context(patch.object(owner, name, lambda *a, _clock=clock, **k: _clock(*a, **k)))
        start = time.perf_counter()
        accept.accept(accept.Asked(candidate="sdpa-flash", seed=0), make=prepare)
        whole = time.perf_counter() - start
    print(f"checks of one verdict, sdpa-flash on the default profile, {whole:.1f} s:")
    print(f"  {'inputs and exact answers, in a thread beside':<50} {prepare.seconds:6.1f} s {prepare.calls:5} calls")
    for label, clock in clocks.items():
        print(f"  {label:<50} {clock.seconds:6.1f} s {clock.calls:5} calls")


def main() -> None:
    """Prints all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one run of each command")
    quick = parser.parse_args().quick
    reference()
    commands(quick)
    checks()


if __name__ == "__main__":
    main()
