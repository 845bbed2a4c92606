"""Small matrix products on a chosen tensor-core instruction, and random operands for them."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# The compiled functions below are written in Triton's language, which has no types that mypy knows.

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

DEVICE = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A tensor-core instruction, by the shape of `tl.dot` that Triton compiles to it."""

    name: str
    m: int
    n: int = 16
    warps: int = 4
    raw: bool = False  # written out: Triton has no shape for it


WGMMA, MMA = Unit(name="wgmma", m=64), Unit(name="mma.sync", m=16)
RAW = Unit(name="mma.sync m16n8k32", m=16, n=8, warps=1, raw=True)  # of a small e4m3 product Triton makes one of fp16


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """An input format of the tensor cores."""

    name: str
    dtype: torch.dtype
    least_length: int  # of a contraction
    large: float  # a factor; its square and 2^-6 squared are further apart than any accumulator is wide
    smallest: int  # exponent of the smallest normal number
    top: float  # a power of two near the largest number
    tiny: float  # factors of this size make subnormal products, or are subnormal
    widest: tuple[int, int]  # exponents of factors that differ much


FORMATS = (
    Format(
        name="bf16",
        dtype=torch.bfloat16,
        least_length=16,
        large=2.0**12,
        smallest=-126,
        top=2.0**127,
        tiny=2.0**-67,
        widest=(-12, 12),
    ),
    Format(
        name="fp16",
        dtype=torch.float16,
        least_length=16,
        large=2.0**12,
        smallest=-14,
        top=2.0**15,
        tiny=2.0**-15,
        widest=(-12, 12),
    ),
    Format(
        name="tf32",
        dtype=torch.float32,
        least_length=16,
        large=2.0**12,
        smallest=-126,
        top=2.0**127,
        tiny=2.0**-67,
        widest=(-12, 12),
    ),
    Format(
        name="e4m3",
        dtype=torch.float8_e4m3fn,
        least_length=32,
        large=2.0**8,
        smallest=-6,
        top=2.0**8,
        tiny=2.0**-7,
        widest=(-8, 7),
    ),
)


INSTRUCTIONS = (*itertools.product(FORMATS, (WGMMA, MMA)), (FORMATS[-1], RAW))


@triton.jit
def _dot(A, B, C, D, ap, am, bp, bn, cp, cm, cn, one, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, COMPUTED: tl.constexpr):
    """D = C + A @ B^T for one matrix of each a program; the contraction is contiguous in A and B."""
    p = tl.program_id(0).to(tl.int64)
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    a = tl.load(A + p * ap + m * am + k[None, :])
    if COMPUTED:  # so that the operand comes from registers, as P does
        a = (a.to(tl.float32) * one).to(a.dtype)
    b = tl.load(B + p * bp + n * bn + k[:, None])
    c = tl.load(C + p * cp + m * cm + n * cn)
    tl.store(D + (p * M + m) * N + n, tl.dot(a, b, c, input_precision="tf32"))


@triton.jit
def _mma(A, B, C, D):
    """One m16n8k32 of e4m3 a program of one warp; registers (P, register, lane) as the instruction wants them."""
    p, lane = tl.program_id(0).to(tl.int64), tl.arange(0, 32)
    a, b, c, d = A + p * 128 + lane, B + p * 64 + lane, C + p * 128 + lane, D + p * 128 + lane
    d0, d1, d2, d3 = tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [
            tl.load(a),
            tl.load(a + 32),
            tl.load(a + 64),
            tl.load(a + 96),
            tl.load(b),
            tl.load(b + 32),
            tl.load(c),
            tl.load(c + 32),
            tl.load(c + 64),
            tl.load(c + 96),
        ],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )
    tl.store(d, d0)
    tl.store(d + 32, d1)
    tl.store(d + 64, d2)
    tl.store(d + 96, d3)


def dot(unit: Unit, a: Tensor, b: Tensor, c: Tensor, registers: bool = False) -> tuple[Tensor, Any]:
    """c + a @ b^T (P, M, N) by the unit, float32, and the compiled program.

    Shapes: a (P, M or 1, K), b (P, N or 1, K), c (P, M or 1, N or 1).
    """
    count, length = a.shape[0], a.shape[-1]
    a, b = a.contiguous().expand(-1, unit.m, -1), b.contiguous().expand(-1, unit.n, -1)
    c = c.expand(-1, unit.m, unit.n)
    if unit.raw:
        return _raw_dot(a, b, c)
    d = torch.empty(count, unit.m, unit.n, device=DEVICE)
    program = _dot[(count,)](
        a,
        b,
        c,
        d,
        *a.stride()[:2],
        *b.stride()[:2],
        *c.stride(),
        1.0,
        M=unit.m,
        N=unit.n,
        K=length,
        COMPUTED=registers,
        num_warps=unit.warps,
    )
    return d, program


def _raw_dot(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Any]:
    """`dot` by `_mma`: matrices to registers and back, 32 products at a time."""
    count, program = len(a), None
    for x, y in zip(torch.split(a, 32, -1), torch.split(b, 32, -1), strict=True):
        words = [z.contiguous().view(torch.int32) for z in (x, y)]  # of four e4m3 each
        rows = words[0].reshape(count, 2, 8, 2, 4).permute(0, 3, 1, 2, 4).contiguous()
        columns = words[1].reshape(count, 8, 2, 4).transpose(1, 2).contiguous()
        start = c.reshape(count, 2, 8, 4, 2).permute(0, 1, 4, 2, 3).contiguous()
        d = torch.empty_like(start)
        program = _mma[(count,)](rows, columns, start, d, num_warps=1)
        c = d.permute(0, 1, 3, 4, 2).reshape(count, 16, 8)
    return c, program


def rounded(fmt: Format, x: Tensor) -> Tensor:
    """x as operands of the format; tf32 by cutting, within float32."""
    if fmt.name == "tf32":
        return (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32)
    return x.clamp(-448, 448).to(fmt.dtype) if fmt.name == "e4m3" else x.to(fmt.dtype)


DRAWS = ("normal", "probabilities", "wide", "tiny", "tiny from zero")


def draw(name: str, fmt: Format, shape: tuple[int, int, int, int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Operands a (P, M, K), b (P, N, K) of the format and an accumulator c (P, M, N), by the name of their distribution."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    p, m, n, k = shape

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=g, device=DEVICE)

    def wide(*sizes: int) -> Tensor:
        low, high = fmt.widest
        power = torch.rand(sizes, generator=g, device=DEVICE) * (high - low) + low
        return power.exp2() * normal(*sizes).sign()

    a, b, c = normal(p, m, k), normal(p, n, k), normal(p, m, n)
    if name == "probabilities":  # what P.V is made of, a third of the keys masked
        a = (-2 * a.abs()).exp() * (torch.rand(a.shape, generator=g, device=DEVICE) > 1 / 3)
        c = 8 * c
    elif name == "wide":
        a, b, c = wide(p, m, k), wide(p, n, k), wide(p, m, n) * wide(p, m, n)
    elif name.startswith("tiny"):
        a, b, c = a * fmt.tiny, b * fmt.tiny, c * fmt.tiny**2 * (name == "tiny")
    return rounded(fmt, a), rounded(fmt, b), c


def instruction(program: Any) -> list[str]:
    """The tensor-core instructions of a program, as PTX and as machine code."""
    ptx = re.findall(r"(wgmma\.mma_async[\w.:]*|mma\.sync[\w.:]*)", program.asm["ptx"])
    sass = re.findall(r"\b([HQI]G?MMA[\w.]*)", program.asm["sass"])
    return sorted(set(ptx)) + sorted(set(sass))
