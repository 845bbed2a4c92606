"""Measures the split Triton kernels on a GPU: sustained pairs, errors beside fp64, first calls, candidate against incumbent.

    PYTHONPATH=. python3 ci/gpu/triton_pairs.py OUT

writes OUT/triton.json.  Needs torch, Triton and a GPU of compute capability 9.0; takes about 80 s.  Where FlashInfer can be
imported, its fa2 is measured at head dim 128 on the same problems; where not, the report says so.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pairs import Problem, Shape, block_ms, described, first_call_ms, problem, sustained, versions

from oracle.kernels.triton_prefill import prefill_16, prefill_32
from oracle.kernels.triton_split import split_64, split_tuned

Facts = dict[str, Any]

GLOBAL = Shape(q_heads=32, kv_heads=4, dim=512, rows=8192, context=0, page=64)  # Gemma 4's global layers
SLIDING = Shape(q_heads=32, kv_heads=16, dim=256, rows=8192, context=0, page=64, left=1023)  # and its sliding ones
LLAMA = Shape(q_heads=32, kv_heads=8, dim=128, rows=8192, context=0, page=64)
SMALL = Shape(q_heads=32, kv_heads=8, dim=64, rows=8192, context=0, page=64)
SHAPES = [
    *(replace(GLOBAL, context=context) for context in (0, 16384, 57344)),
    replace(GLOBAL, context=16384, page=16),
    SLIDING,
    replace(SLIDING, context=16384, left=-1),
    *(replace(LLAMA, context=context) for context in (0, 16384)),
    replace(SMALL, context=16384),
]
BARS = {(512, 0): 0.42, (512, 16384): 0.42, (512, 57344): 0.39}  # head dim and context: the least ratio asked for, page 64


def measured(name: str, call: Callable[[], torch.Tensor], asked: Problem) -> Facts:
    """The facts of one kernel on one problem; `call` returns its output."""
    first = first_call_ms(call)
    facts = {"kernel": name, "shape": described(asked.shape), "first_call_ms": round(first, 1)}
    facts |= {key: float(f"{x:.4g}") for key, x in asked.errors(call()).items()}
    facts |= sustained(call, asked.shape.flops).facts()
    print(f"{name:16s} {described(asked.shape)} {facts['ms']:.3f} ms, ratio {facts['ratio']:.3f}", flush=True)
    return facts


def at_shape(shape: Shape) -> Facts:
    """The candidate's facts at a shape, with the incumbent's time."""
    asked = problem(shape)
    facts = measured("split_tuned", partial(asked.call, split_tuned), asked)
    if shape.page == 64 and (bar := BARS.get((shape.dim, shape.context))):
        facts["bar"] = bar
    incumbent = partial(asked.call, split_64)
    incumbent()
    facts["split_64_ms"] = round(block_ms(incumbent, 8), 4)
    facts["less_time_than_split_64"] = round(1 - facts["ms"] / facts["split_64_ms"], 3)
    return facts


def flashinfer_pairs() -> list[Facts] | str:
    """FlashInfer's facts at head dim 128, or why there are none."""
    if not importlib.util.find_spec("flashinfer"):
        return "not installed: not measured"
    try:
        asked = [problem(shape) for shape in SHAPES if shape.dim == LLAMA.dim]
        return [measured("flashinfer fa2", flashinfer(one), one) for one in asked]
    except Exception:  # it compiles at its first call, which fails in many ways; the report says which
        return f"failed: not measured\n{traceback.format_exc()[-2000:]}"


def flashinfer(asked: Problem) -> Callable[[], torch.Tensor]:
    """FlashInfer's paged prefill, fa2, planned for the problem."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper  # type: ignore[import-not-found]

    s, table = asked.shape, asked.table[0]
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(2**28, dtype=torch.uint8, device="cuda"), "NHD", backend="fa2")
    keys = s.context + s.rows
    wrapper.plan(
        torch.tensor([0, s.rows], dtype=torch.int32, device="cuda"),
        torch.tensor([0, len(table)], dtype=torch.int32, device="cuda"),
        table,
        torch.tensor([(keys - 1) % s.page + 1], dtype=torch.int32, device="cuda"),
        s.q_heads,
        s.kv_heads,
        s.dim,
        s.page,
        causal=True,
        sm_scale=s.dim**-0.5,
        q_data_type=torch.bfloat16,
    )
    return lambda: wrapper.run(asked.q, (asked.k_cache, asked.v_cache))


def new_length_ms() -> Facts:
    """First and second call of a kernel that is compiled already, at lengths that it has not seen."""
    facts = {}
    for rows, context in ((8192, 0), (8191, 0), (1000, 3000), (1, 4095)):
        call = partial(problem(replace(GLOBAL, rows=rows, context=context)).call, split_tuned)
        facts[f"{rows} rows after {context}"] = [round(first_call_ms(call), 2) for _ in range(2)]
    return facts


def seed_pair() -> Facts:
    """The plain kernel with 16 and with 32 rows of a tile at the global layers' shape: the seeds saw 41 % between them."""
    asked = problem(GLOBAL)
    times = []
    for kernel in (prefill_16, prefill_32):
        call = partial(asked.call, kernel)
        call()
        times.append(block_ms(call, 8))
    return {
        "prefill_16_ms": round(times[0], 3),
        "prefill_32_ms": round(times[1], 3),
        "less_time": round(1 - times[1] / times[0], 3),
    }


def main() -> None:
    """Writes the report, after each part, so that a part that fails leaves the ones before it."""
    report: Facts = {"versions": versions("PYTHONPATH=. python3 ci/gpu/triton_pairs.py OUT")}

    def part(name: str, facts: Any) -> None:
        report[name] = facts
        (Path(sys.argv[1]) / "triton.json").write_text(json.dumps(report, indent=1) + "\n")

    part("new_length_first_and_second_call_ms", new_length_ms())
    part("plain_16_to_32_rows", seed_pair())
    found: list[Facts] = []
    for shape in SHAPES:
        found.append(at_shape(shape))
        part("pairs", found)
    part("flashinfer", flashinfer_pairs())


if __name__ == "__main__":
    main()
