"""What this GPU makes of one float: exponentials, tanh, logarithms, quotients and conversions, over all floats of a range."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The compiled functions below are written in Triton's language, which has no types that mypy knows.

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from core import exponents, power
from torch import Tensor

Facts = dict[str, Any]  # a part of the report: text, numbers, lists and parts of its own

DEVICE = "cuda"
CHUNK = 2**26  # floats at a time
U32 = 2.0**-24


@triton.jit
def _apply(X, Y, OP: tl.constexpr, BLOCK: tl.constexpr):
    """Y = f(X), f a function of Triton's or one instruction."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at)
    if OP == "tl.exp2":
        y = tl.exp2(x)
    elif OP == "tl.exp":
        y = tl.exp(x)
    elif OP == "tl.log":
        y = tl.log(x)
    elif OP == "tl.log2":
        y = tl.log2(x)
    elif OP == "1 / x":
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise(OP, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(Y + at, y)


@triton.jit
def _divide(X, Y, Z, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Z + at, tl.load(X + at) / tl.load(Y + at))


@triton.jit
def _convert(X, Y, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at).to(Y.dtype.element_ty))


def apply(op: str) -> Callable[[Tensor], Tensor]:
    """The function of a float32 tensor that `_apply` computes; its last program is `apply.program`."""

    def run(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        PROGRAMS[op] = _apply[(x.numel() // 1024,)](x, y, OP=op, BLOCK=1024)
        return y

    return run


PROGRAMS: dict[str, Any] = {}  # of `apply`, for their machine code


def floats(low: float, high: float) -> Iterator[Tensor]:
    """All float32 numbers from low to high, of one sign, in pieces of a multiple of 1024."""
    first, end = sorted(int(torch.tensor(x).view(torch.int32)) & 0x7FFFFFFF for x in (low, high))
    sign = -(2**31) if low < 0 or high < 0 else 0
    for start in range(first, end + 1, CHUNK):
        count = -(-min(CHUNK, end + 1 - start) // 1024) * 1024
        bits = torch.arange(start, start + count, device=DEVICE).clamp(max=end) + sign
        yield bits.to(torch.int32).view(torch.float32)


def largest_error(
    f: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor], low: float, high: float, absolute: bool
) -> Facts:
    """The largest relative (or absolute) error over all float32 numbers from low to high, and where."""
    worst, at, count = -1.0, 0.0, 0
    for x in floats(low, high):
        y = exact(x.double())
        error = (f(x).double() - y).abs()
        if not absolute:
            error = error / y.abs()
        error = error.nan_to_num(nan=math.inf, posinf=math.inf)
        here = int(error.argmax())
        if float(error[here]) > worst:
            worst, at = float(error[here]), float(x[here])
        count += x.numel()
    return {
        "from": low,
        "to": high,
        "kind": "absolute" if absolute else "relative",
        "largest": worst,
        "log2": log2(worst),
        "at": at,
    }


def log2(x: float) -> float | None:
    """log2 to two places, None of 0."""
    return round(math.log2(x), 2) if x > 0 else None


def shape_of_error(f: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor], low: float, high: float) -> Facts:
    """Mean and RMS of the relative error over all floats of one binade, and the largest mean over a 256th of it: what
    neighbouring arguments share."""
    error = torch.cat([(f(x).double() - exact(x.double())) / exact(x.double()) for x in floats(low, high)])
    error = error[: 2**23]
    means = error.reshape(256, -1).mean(1)
    return {
        "from": low,
        "to": high,
        "mean": float(error.mean()),
        "rms": float(error.square().mean().sqrt()),
        "largest_mean_of_256th": float(means.abs().max()),
    }


TANH = "tanh.approx.f32 $0, $1;"
EX2, EX2_FTZ = "ex2.approx.f32 $0, $1;", "ex2.approx.ftz.f32 $0, $1;"
LG2, RCP = "lg2.approx.f32 $0, $1;", "rcp.approx.ftz.f32 $0, $1;"
BEFORE_TWO = 2 - 2.0**-23


def functions() -> Facts:
    """Exhaustive sweeps of what kernels compute their exponentials, caps, logarithms and quotients by."""
    found: Facts = {}
    for name, f, exact, low in (
        ("ex2.approx.f32", apply(EX2), torch.exp2, -126.0),
        ("ex2.approx.ftz.f32", apply(EX2_FTZ), torch.exp2, -126.0),
        ("tl.exp2", apply("tl.exp2"), torch.exp2, -126.0),
        ("torch.exp2", torch.exp2, torch.exp2, -126.0),
        ("tl.exp", apply("tl.exp"), torch.exp, -87.0),
        ("torch.exp", torch.exp, torch.exp, -87.0),
    ):
        found[name] = {
            "errors": [
                largest_error(f, exact, -0.0, low, False),
                largest_error(f, exact, -0.0, -16.0, False),
                largest_error(f, exact, 0.0, 88.0, False),
            ],
            "binade": shape_of_error(f, exact, -1.0, -BEFORE_TWO),
            "at_zero": float(f(torch.zeros(1024, device=DEVICE))[0]),
            "subnormal_results": subnormal_results(f, exact),
        }
    for name, f in (("tanh.approx.f32", apply(TANH)), ("torch.tanh", torch.tanh)):
        found[name] = {
            "errors": [largest_error(f, torch.tanh, 2.0**-126, 10.0, False), largest_error(f, torch.tanh, 10.0, 3e38, False)],
            "binades": {
                str(e): largest_error(f, torch.tanh, 2.0**e, BEFORE_TWO * 2.0**e, False)
                | shape_of_error(f, torch.tanh, 2.0**e, BEFORE_TWO * 2.0**e)
                for e in (-12, -8, -4, -3, -2, -1, 0, 1, 2)
            },
            "odd": all(bool((f(-x) == -f(x)).all()) for x in floats(2.0**-126, 3e38)),
            "subnormal_arguments_wrong": sum(int((f(x) != x).sum()) for x in floats(2.0**-149, 2.0**-126 - 2.0**-149)),
        }
    for name, f, exact in (
        ("lg2.approx.f32", apply(LG2), torch.log2),
        ("tl.log", apply("tl.log"), torch.log),
        ("tl.log2", apply("tl.log2"), torch.log2),
    ):
        found[name] = {
            "errors": [
                largest_error(f, exact, 1.0, BEFORE_TWO, True),
                largest_error(f, exact, 2.0, 2.0**20, False),
                largest_error(f, exact, 0.5, 1 - U32, True),
            ]
        }
    for name, f in (("rcp.approx.ftz.f32", apply(RCP)), ("1 / x in Triton", apply("1 / x"))):
        found[name] = {"errors": [largest_error(f, torch.reciprocal, 1.0, BEFORE_TWO, False)]}
    found["x / y in Triton"] = quotients()
    for op, name in (
        (EX2, "ex2.approx.f32"),
        (EX2_FTZ, "ex2.approx.ftz.f32"),
        (TANH, "tanh.approx.f32"),
        (LG2, "lg2.approx.f32"),
        (RCP, "rcp.approx.ftz.f32"),
    ):
        found[name]["sass"] = sorted(set(re.findall(r"\b(MUFU[\w.]*|FMUL[\w.]*|FFMA[\w.]*)", PROGRAMS[op].asm["sass"])))
    for op in ("tl.exp2", "tl.exp", "tl.log", "tl.log2", "1 / x"):
        ptx = PROGRAMS[op].asm["ptx"]
        found["1 / x in Triton" if op == "1 / x" else op]["ptx"] = sorted(
            set(re.findall(r"\b((?:ex2|lg2|rcp|div)\.[\w.]+)", ptx))
        )
    return found


def subnormal_results(f: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor]) -> str:
    """Whether results below the smallest normal number come out, or as 0."""
    low, high = (-149.0, -126.5) if exact is torch.exp2 else (-103.0, -88.0)
    zeros = [bool((f(x) == 0).all()) for x in floats(high, low)]
    return "flushed to 0" if all(zeros) else "kept"


def quotients() -> Facts:
    """x / y for 2^28 random pairs of significands."""
    g, worst, total = torch.Generator(DEVICE).manual_seed(3), 0.0, 0
    for _ in range(4):
        x, y = (torch.rand(CHUNK, generator=g, device=DEVICE) + 1 for _ in range(2))
        z = torch.empty_like(x)
        program = _divide[(CHUNK // 1024,)](x, y, z, BLOCK=1024)
        exact = x.double() / y.double()
        worst, total = max(worst, float(((z.double() - exact) / exact).abs().max())), total + CHUNK
    ptx = sorted(set(re.findall(r"\b((?:rcp|div)\.[\w.]+)", program.asm["ptx"])))
    return {
        "pairs": total,
        "errors": [{"kind": "relative", "from": 1.0, "to": 2.0, "largest": worst, "log2": log2(worst)}],
        "ptx": ptx,
    }


# Conversions


def conversions() -> Facts:
    """float32 to narrower formats, for all 2^32 bit patterns, against rounding to nearest with ties to even."""
    found: Facts = {}
    for name, dtype, digits, smallest, largest in (
        ("bf16", torch.bfloat16, 8, -126, 3.3895313892515355e38),
        ("fp16", torch.float16, 11, -14, 65504.0),
        ("e4m3", torch.float8_e4m3fn, 4, -6, 448.0),
    ):
        for by in ("triton", "torch"):
            wrong = beyond = saturated = infinite = nan = lost_nan = 0
            program = None
            for start in range(-(2**31), 2**31, CHUNK):
                x = torch.arange(start, start + CHUNK, device=DEVICE).to(torch.int32).view(torch.float32)
                if by == "triton":
                    y = torch.empty_like(x, dtype=dtype)
                    program = _convert[(CHUNK // 1024,)](x, y, BLOCK=1024)
                else:
                    y = x.to(dtype)
                seen, wide = y.double(), x.double()
                place = power(exponents(wide).clamp(min=smallest, max=128) - digits + 1)
                nearest = (wide / place).round() * place
                inside = nearest.abs() <= largest  # False for NaN
                wrong += int((inside & ((seen != nearest) | (seen.signbit() != wide.signbit()))).sum())
                outside = ~inside & ~x.isnan()
                beyond += int(outside.sum())
                saturated += int((outside & (seen.abs() == largest)).sum())
                infinite += int((outside & seen.isinf()).sum())
                nan += int((outside & seen.isnan()).sum())
                lost_nan += int((x.isnan() & ~seen.isnan()).sum())
            found[f"{name} {by}"] = {
                "wrong": wrong,
                "beyond_largest": {"patterns": beyond, "largest": saturated, "infinite": infinite, "nan": nan},
                "nan_lost": lost_nan,
                "ptx": sorted(set(re.findall(r"\b(cvt\.[\w.]+)", program.asm["ptx"]))) if program else [],
            }
    return found
