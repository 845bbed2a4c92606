"""Sums of many products on the tensor cores: how far they are from exact, in the units of docs/numerics.md, section 2.2."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import torch
from dots import DEVICE, FORMATS, WGMMA, Format, Unit, dot, draw, rounded

Facts = dict[str, Any]  # a part of the report: text, numbers, lists and parts of its own
KINDS = ("normal", "probabilities", "of one sign", "beside a sink")
FROM_REGISTERS = re.compile(r"wgmma\.mma_async[^{]*\{[^}]*\}, \{")  # a second list of registers: the left operand


def chains(fmt: Format, unit: Unit, length: int = 128, steps: int = 64) -> Facts:
    """Long sums, an accumulator through many instructions: the error in units of 2^-23 times the largest partial sum, for
    each 16 products, largest and mean (negative: toward zero); docs/numerics.md 2.2 takes the first for 1."""
    found: Facts = {}
    for name in KINDS:
        # a sink is a first key that outweighs all others together: places stay as coarse as it makes them
        c = torch.full((16, unit.m, unit.n), 2.0**14 if name == "beside a sink" else 0.0, device=DEVICE)
        exact, largest = c.double(), c.double()
        rows: Facts = {}
        for step in range(1, steps + 1):
            a, b, _ = draw(
                "probabilities" if name == "probabilities" else "normal", fmt, (16, unit.m, unit.n, length), 100 + step
            )
            if name in ("of one sign", "beside a sink"):
                a, b = (rounded(fmt, x.float().abs() + 0.5) for x in (a, b))
            c = dot(unit, a, b, c)[0]
            for x, y in zip(torch.split(a.double(), 16, -1), torch.split(b.double(), 16, -1), strict=True):
                exact = exact + x @ y.mT
                largest = torch.maximum(largest, exact.abs())
            if step in (1, 8, 64):
                error = (c.double() - exact) / (largest * 2.0**-23 * (step * length / 16))
                rows[str(step * length)] = [float(error.abs().max()), float((error * exact.sign()).mean())]
        found[name] = rows
    return found


def logits(fmt: Format, unit: Unit, pieces: int, kind: str) -> Facts:
    """q.k of head dim 128 times `pieces`, from an accumulator of 0: the largest error over kappa u_acc |q| |k| with kappa =
    d/16 + 2 (eta of 2.5), and over the accumulation's part of B_lse, both with u_acc = 2^-23.

    Kinds: "random" operands, or "one channel" that comes first and outweighs the others, whose products have one sign.
    """
    length, worst_eta, worst_lse = 128 * pieces, 0.0, 0.0
    for seed, name in itertools.product(range(8), ("normal", "wide") if kind == "random" else ("normal",)):
        a, b, c = draw(name, fmt, (256, unit.m, unit.n, length), 1000 + seed)
        if kind == "one channel":
            a, b = (rounded(fmt, x.float().abs() + 0.5) for x in (a, b))
            a[..., 0], b[..., 0] = 64.0, 64.0
        d = torch.zeros_like(c)
        for x, y in zip(torch.split(a, 128, -1), torch.split(b, 128, -1), strict=True):
            d = dot(unit, x, y, d)[0]
        x, y = a.double(), b.double()
        exact = x @ y.mT
        error = (d.double() - exact).abs()
        norms = x.norm(dim=-1)[..., None] * y.norm(dim=-1)[:, None]
        both = (x.square() @ y.square().mT).sqrt()
        lse = 3 * math.sqrt(1.13 * length) * both + 1.13 * length / 4 * exact.abs()
        worst_eta = max(worst_eta, float((error / norms).max()) / (2.0**-23 * (length / 16 + 2)))
        worst_lse = max(worst_lse, float((error / lse).max()) / 2.0**-23)
    return {"kind": kind, "head_dim": length, "over_eta": worst_eta, "over_lse": worst_lse}


def shapes() -> Facts:
    """Whether other tiles, warps and libraries give the same bits: elements that differ from those of the first tile."""
    found: Facts = {}
    for fmt in FORMATS:
        a, b, c = draw("wide", fmt, (64, 128, 128, 64), 5)
        tiles = [Unit(name="wgmma", m=128, n=128, warps=w) for w in (4, 8)] + [replace(WGMMA, n=64)]
        tiles += [Unit(name="mma.sync", m=32, n=64), Unit(name="mma.sync", m=16, n=32, warps=1)]
        results = [(u, dot(u, a[:, : u.m], b[:, : u.n], c[:, : u.m, : u.n])[0]) for u in tiles]
        d, program = dot(tiles[0], a, b, c, registers=True)
        sources = "registers" if FROM_REGISTERS.search(program.asm["ptx"]) else "shared memory"
        found[f"{fmt.name} wgmma, a computed, from {sources}"] = [int((d != results[0][1]).sum()), d.numel()]
        for unit, d in results[1:]:
            differ = int((d != results[0][1][:, : unit.m, : unit.n]).sum())
            found[f"{fmt.name} {unit.name} {unit.m}x{unit.n} of {unit.warps} warps"] = [differ, d.numel()]
        if fmt.name != "e4m3":
            d = dot(tiles[0], a, b, torch.zeros_like(c))[0]
            if fmt.name == "tf32":
                torch.backends.cuda.matmul.allow_tf32 = True
                library = torch.bmm(a, b.mT)
                torch.backends.cuda.matmul.allow_tf32 = False
            else:
                library = torch.bmm(a, b.mT, out_dtype=torch.float32)
            found[f"{fmt.name} torch.bmm"] = [int((d != library).sum()), d.numel()]
    return found
