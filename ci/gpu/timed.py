"""Which kernel is timed at which shape, beside which bar, and what sustained pairs give (`pairs`)."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from pairs import Problem, Shape, block_ms, described, problem, sustained
from torch import Tensor

from oracle.kernels import tilelang_prefill
from oracle.kernels.shared_kv import ROTATED, Form, folded_pool, prefill
from oracle.kernels.tilelang_families import FAMILIES
from oracle.kernels.triton_prefill import prefill_16, prefill_32
from oracle.kernels.triton_split import split_64, split_tuned

Facts = dict[str, Any]
Call = Callable[[], Tensor]
Ready = tuple[Call, Problem]  # what to time, and the problem that its answer is an answer to

GLOBAL = Shape(q_heads=32, kv_heads=4, dim=512, rows=8192, context=0, page=64)  # Gemma 4's global layers
SLIDING = Shape(q_heads=32, kv_heads=16, dim=256, rows=8192, context=0, page=64, left=1023)  # and its sliding ones
LLAMA = Shape(q_heads=32, kv_heads=8, dim=128, rows=8192, context=0, page=64)
SMALL = Shape(q_heads=32, kv_heads=8, dim=64, rows=8192, context=0, page=64)
SHARED = dict.fromkeys(("shared_kv rebuilt_bf16", "shared_kv rebuilt_fp32", "shared_kv folded"))

TIMED: dict[Shape, dict[str, float | None]] = {  # shape -> kernel -> the least ratio asked for, where one is
    replace(GLOBAL, context=0): {"split_tuned": 0.42, "tilelang": 0.78, **SHARED},
    replace(GLOBAL, context=16384): {"split_tuned": 0.42, "tilelang": 0.82},
    replace(GLOBAL, context=57344): {"split_tuned": 0.39, "tilelang": 0.82, **SHARED},
    replace(GLOBAL, context=0, page=16): {"tilelang": 0.75},
    replace(GLOBAL, context=16384, page=16): {"split_tuned": None, "tilelang": 0.75},
    replace(GLOBAL, context=57344, page=16): {"tilelang": 0.75},
    SLIDING: {"split_tuned": None, "tilelang": None},
    replace(SLIDING, context=16384): {"tilelang": None},
    replace(SLIDING, context=16384, left=-1): {"split_tuned": None, "tilelang": None},
    replace(LLAMA, context=0): {"split_tuned": None, "tilelang": None, "flashinfer fa2": None},
    replace(LLAMA, context=16384): {"split_tuned": None, "tilelang": None, "flashinfer fa2": None},
    replace(SMALL, context=16384): {"split_tuned": None},
}


def pairs() -> Iterator[list[Facts]]:
    """The facts of every kernel at every shape so far, after each one."""
    found: list[Facts] = []
    for shape, kernels in TIMED.items():
        asked = problem(shape)
        for kernel, bar in kernels.items():
            found.append({"kernel": kernel, "shape": described(shape), "bar": bar, **_facts(kernel, asked)})
            print({k: v for k, v in found[-1].items() if not isinstance(v, list)}, flush=True)
            yield found


def _facts(kernel: str, asked: Problem) -> Facts:
    """What one kernel gives on a problem, or why it gives nothing."""
    if why := absent(kernel):
        return {"absent": why}
    call, answers = ready(kernel, asked)
    facts: Facts = {key: float(f"{x:.4g}") for key, x in answers.errors(call()).items()}
    facts |= sustained(call, asked.shape.flops).facts()
    if kernel == "split_tuned":
        incumbent = partial(asked.call, split_64)
        incumbent()
        facts["split_64_ms"] = round(block_ms(incumbent, 8), 4)
    return facts


def absent(kernel: str) -> str:
    """Why a kernel cannot be timed here, or ""."""
    if kernel == "flashinfer fa2" and not importlib.util.find_spec("flashinfer"):
        return "FlashInfer is not installed"
    if kernel == "tilelang" and tilelang_prefill.FOLDER not in os.environ and not importlib.util.find_spec("tilelang"):
        return f"{tilelang_prefill.FOLDER} names no folder of libraries, and TileLang is not installed"
    return ""


def ready(kernel: str, asked: Problem) -> Ready:
    """The kernel, ready to be called on the problem."""
    match kernel.split():
        case ["tilelang"]:
            family = next(f for f in FAMILIES.values() if f.head_dim == asked.shape.dim)
            out = torch.full_like(asked.q, math.nan)
            return partial(asked.call, getattr(tilelang_prefill, family.name), out=out), asked
        case ["flashinfer", _]:
            return flashinfer(asked), asked
        case ["shared_kv", "rebuilt_bf16" | "rebuilt_fp32" | "folded" as form]:
            return shared(asked, form)
        case _:
            return partial(asked.call, split_tuned), asked


def shared(asked: Problem, form: Form) -> Ready:
    """`oracle.kernels.shared_kv` on the problem with a K that is V times a weight but for its rotated quarter."""
    dim, turned = asked.shape.dim, asked.shape.dim // ROTATED
    weight = 1 + 0.3 * torch.randn(dim, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    k = torch.cat((asked.k[..., :turned], (asked.v * weight).bfloat16()[..., turned:]), -1)
    pool, plan = folded_pool(asked.k_cache, asked.v_cache), {n: x for n, x in asked.plan.items() if n != "window_size"}
    call = partial(prefill, asked.q, pool, form=form, k_norm_weight=weight, **plan)
    return cast("Call", call), replace(asked, k=k)  # which returns out alone, asked for no LSE


def flashinfer(asked: Problem) -> Call:
    """FlashInfer's paged prefill, fa2, planned for the problem."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

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


def plain() -> Facts:
    """The plain Triton kernel with 16 and with 32 rows of a tile at the global layers' shape."""
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
