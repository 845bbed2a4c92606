"""Rates of kernels on a power-capped GPU: sustained pairs, the problem they are timed on, and its exact answer.

A rate by itself moves by fifteen percent within the hour, since the card lowers its clock when it runs hot.  So blocks of a
matrix product and blocks of the kernel take turns, half a second each, and what counts is the kernel's rate over that of the
block of products before it (`sustained`).
"""

from __future__ import annotations

import itertools
import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZE = 8192  # of the square bf16 matrices
BLOCK_S = 0.5
PAIRS = 4
PROTOCOL = (
    f"{PAIRS} times: {BLOCK_S} s of {SIZE}^3 bf16 products, {BLOCK_S} s of the kernel; of each block the median call by CUDA "
    "events, the first quarter left out; ratio = the kernel's TFLOP/s over its own block of products, the median of the pairs"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """What sustained pairs gave: TFLOP/s of each block, and the kernel's over the products'."""

    products: list[float]
    kernel: list[float]
    ms: float  # the kernel's median call, of all blocks

    def facts(self) -> dict[str, Any]:
        """The same as JSON, rounded, with the median, least and largest ratio."""
        ratios = [k / p for k, p in zip(self.kernel, self.products, strict=True)]
        return {
            "ratio": round(statistics.median(ratios), 4),
            "ratio_least": round(min(ratios), 4),
            "ratio_largest": round(max(ratios), 4),
            "ms": round(self.ms, 4),
            "kernel_tflops": [round(x, 1) for x in self.kernel],
            "products_tflops": [round(x, 1) for x in self.products],
        }


def block_ms(call: Callable[[], object], calls: int) -> float:
    """Milliseconds of the median of `calls` calls in a row, the first quarter left out."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    times = [float(one.elapsed_time(two)) for one, two in itertools.pairwise(events)]
    return statistics.median(times[calls // 4 :])


def sustained(call: Callable[[], object], flops: float, *, pairs: int = PAIRS) -> Pairs:
    """Sustained pairs of `call`, which does `flops` useful operations: `PROTOCOL`, after three calls that warm it up."""
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    works = ((lambda: torch.matmul(a, b, out=product), 2.0 * SIZE**3), (call, flops))
    counts = [max(4, math.ceil(1000 * BLOCK_S / block_ms(work, 3))) for work, _ in works]
    times = [[block_ms(work, count) for (work, _), count in zip(works, counts, strict=True)] for _ in range(pairs)]
    products, kernel = ([work[1] / t / 1e9 for t in column] for work, column in zip(works, zip(*times, strict=True), strict=True))
    return Pairs(products=products, kernel=kernel, ms=statistics.median(t for _, t in times))


def first_call_ms(call: Callable[[], object]) -> float:
    """Milliseconds by the wall of one call with its result waited for: what compiling and setting up cost, if it is the first."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One sequence: `rows` new tokens after `context` old ones."""

    q_heads: int
    kv_heads: int
    dim: int
    rows: int
    context: int
    page: int
    left: int = -1  # keys before its own that a query sees, -1 = all

    @property
    def flops(self) -> float:
        """Operations that the answer needs: two products, of the visible keys only."""
        pos = range(self.context, self.context + self.rows)
        keys = sum(pos) + self.rows if self.left < 0 else sum(min(p, self.left) + 1 for p in pos)
        return 4.0 * self.q_heads * self.dim * keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A shape with N(0, 1) inputs in bf16; pages in random order, those of nobody and rows past the last key full of NaN."""

    shape: Shape
    q: Tensor  # (rows, q_heads, dim)
    k: Tensor  # (keys, kv_heads, dim)
    v: Tensor
    k_cache: Tensor  # (pages, page, kv_heads, dim)
    v_cache: Tensor
    table: Tensor  # (1, pages) int32
    plan: dict[str, Any] = field(default_factory=dict)  # the contract's keyword arguments

    def call(self, kernel: Callable[..., Any], **options: Any) -> Any:
        """The kernel's answer to it."""
        return kernel(self.q, self.k_cache, self.v_cache, **self.plan, **options)

    def errors(self, out: Tensor, rows: int = 64) -> dict[str, float]:
        """Mean and largest |out - exact| of `rows` rows of four heads, and of the exact answer rounded to bf16; NaN counts."""
        s = self.shape
        at = torch.linspace(0, s.rows - 1, rows, device="cuda").long()
        got, floor = [], []
        for head in range(0, s.q_heads, max(1, s.q_heads // 4)):
            kv = head // (s.q_heads // s.kv_heads)
            logits = self.q[at, head].double() @ self.k[:, kv].double().T * s.dim**-0.5
            key, pos = torch.arange(len(self.k), device="cuda"), (at + s.context)[:, None]
            hidden = (key > pos) | ((key < pos - s.left) if s.left >= 0 else False)
            exact = torch.softmax(logits.masked_fill(hidden, -math.inf), 1) @ self.v[:, kv].double()
            got.append((out[at, head].double() - exact).abs())
            floor.append((exact.bfloat16().double() - exact).abs())
        one, two = torch.stack(got), torch.stack(floor)
        return {
            "mean_error": float(one.mean()),
            "max_error": float(one.max()),
            "mean_error_of_rounding": float(two.mean()),
            "all_finite": float(torch.isfinite(out).all()),
        }


def problem(shape: Shape, seed: int = 0) -> Problem:
    """The problem of a shape; the same seed gives the same one on the same GPU."""
    random = torch.Generator("cuda").manual_seed(seed)
    keys = shape.context + shape.rows

    def normal(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, shape.dim, device="cuda", dtype=torch.bfloat16, generator=random)

    q, k, v = normal(shape.rows, shape.q_heads), normal(keys, shape.kv_heads), normal(keys, shape.kv_heads)
    pages = -(-keys // shape.page)
    table = torch.randperm(pages + 3, device="cuda", generator=random)[:pages]
    key = torch.arange(keys, device="cuda")
    slot = table[key // shape.page] * shape.page + key % shape.page
    pools = []
    for x in (k, v):
        pool = torch.full(((pages + 3) * shape.page, shape.kv_heads, shape.dim), math.nan, device="cuda", dtype=torch.bfloat16)
        pool[slot] = x
        pools.append(pool.view(pages + 3, shape.page, shape.kv_heads, shape.dim))
    table = table.int()[None]
    return Problem(
        shape=shape,
        q=q,
        k=k,
        v=v,
        k_cache=pools[0],
        v_cache=pools[1],
        table=table,
        plan={
            "cu_seqlens_q": torch.tensor([0, shape.rows], device="cuda", dtype=torch.int32),
            "seqused_k": torch.tensor([keys], device="cuda", dtype=torch.int32),
            "page_table": table,
            "softmax_scale": shape.dim**-0.5,
            "window_size": (shape.left, 0 if shape.left >= 0 else -1),
        },
    )


def versions(command: str) -> dict[str, str]:
    """What it ran on, and how it was asked."""
    import triton

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=True
    )
    return {
        "device": torch.cuda.get_device_name(),
        "capability": "{}.{}".format(*torch.cuda.get_device_capability()),
        "driver": driver.stdout.strip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": command,
    }


def write(report: dict[str, Any], path: Path) -> None:
    """The report is in the file as JSON, a fact a line: an element of each list and an entry of each dict in it."""
    parts = []
    for name, facts in report.items():
        if isinstance(facts, list):
            body = "[\n" + ",\n".join(f"  {json.dumps(fact)}" for fact in facts) + "\n ]"
        elif isinstance(facts, dict):
            body = "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(fact)}" for key, fact in facts.items()) + "\n }"
        else:
            body = json.dumps(facts)
        parts.append(f" {json.dumps(name)}: {body}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def described(shape: Shape) -> dict[str, int]:
    """A shape as JSON."""
    return asdict(shape)
