"""How the tensor cores of this GPU add products: what is added at once, to how many bits, and how it is cut.

Every probe is one instruction given numbers for which the possible answers differ.  What they lead to, a `core.Core`, is then
put to random products, where it has to give the same bits.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import torch
from core import Core, Group, add_products
from dots import DEVICE, DRAWS, FORMATS, MMA, RAW, WGMMA, Format, Unit, dot, draw, instruction
from long_sums import chains, logits
from torch import Tensor

Facts = dict[str, Any]  # a part of the report: text, numbers, lists and parts of its own
LENGTHS = (16, 32, 64, 128)  # of a contraction in one `tl.dot`
DIGITS = {"bf16": 7, "fp16": 10, "tf32": 10, "e4m3": 3}  # fraction bits of the formats
# how e4m3 is unpacked to two registers of fp16, of which each makes a product of 16
UNPACKED = tuple(tuple(s + i for i in range(32) if i % 4 // 2 == half) for s in (0, 32) for half in (0, 1))
Probe = tuple[float, list[tuple[float, float]]]  # an accumulator, and the factors of products


def sums(fmt: Format, unit: Unit, group: Group, probes: list[Probe]) -> list[float]:
    """The answer to each probe, its products in the positions of `group` of a contraction of 64.

    Every element of the result matrix is the same probe, and has to be the same number.
    """
    a = torch.zeros(len(probes), 1, 64, dtype=torch.float64)
    b = torch.zeros_like(a)
    for i, (_, products) in enumerate(probes):
        for k, (x, y) in zip(group, products, strict=False):
            a[i, 0, k], b[i, 0, k] = x, y
    c = torch.tensor([start for start, _ in probes], dtype=torch.float32, device=DEVICE)[:, None, None]
    d = dot(unit, a.to(DEVICE).to(fmt.dtype), b.to(DEVICE).to(fmt.dtype), c)[0].flatten(1)
    if not (d == d[:, :1]).all():
        raise ValueError(f"{fmt.name} {unit.name}: elements of one probe differ, so that no one answer stands for it")
    return [float(x) for x in d[:, 0].double()]


def order(fmt: Format, unit: Unit, length: int) -> tuple[Group, ...]:
    """The positions of a contraction that are added at once, by the order of the groups.

    The accumulator is L, the product at i is -L, the one at j so small that it is lost beside L: it survives if and only if
    j is added after i.
    """
    i, j = (x.flatten() for x in torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij"))
    a = torch.zeros(length * length, length, device=DEVICE)
    b = torch.zeros_like(a)
    at = torch.arange(length * length, device=DEVICE)
    i, j = i.to(DEVICE), j.to(DEVICE)
    a[at, j], b[at, j] = 2.0**-6, 2.0**-6
    a[at, i], b[at, i] = -fmt.large, fmt.large
    c = torch.full((length * length, 1, 1), fmt.large**2, device=DEVICE)
    d = dot(unit, a[:, None].to(fmt.dtype), b[:, None].to(fmt.dtype), c)[0].flatten(1)
    survives = (d != 0).reshape(length, length, -1)
    earlier = survives[..., 0].sum(0)  # the positions that are added before j
    if not (survives == (earlier > earlier[:, None])[..., None]).all():
        raise ValueError(f"{fmt.name} {unit.name}: positions of {length} are not added in groups that follow each other")
    return tuple(tuple(torch.nonzero(earlier == e).flatten().tolist()) for e in sorted(set(earlier.tolist())))


def kept(fmt: Format, unit: Unit, group: Group, factor: float, through_accumulator: bool, shape: float) -> list[int]:
    """The n for which shape * 2^-n survives beside a product factor^2 * 2^16 and its opposite, as multiples of 2^-n, by n
    from 0 on; the opposite is the accumulator or another product."""
    probes = []
    for n in range(29):
        half = min(n // 2, 14)
        small = (math.copysign(2.0 ** (8 - half), shape), abs(shape) * 2.0 ** (8 - n + half))
        large = (factor * 2.0**8, factor * 2.0**8)
        opposite = (-large[0], large[1])
        start = factor**2 * 2.0**16 if through_accumulator else 0.0
        probes.append((start, [opposite, small] if through_accumulator else [opposite, large, small]))
    return [round(x * 2.0 ** (n - 16) * 8) for n, x in enumerate(sums(fmt, unit, group, probes))]


def last(values: list[int]) -> int:
    """The largest n whose value is not 0, or -1."""
    return max((n for n, x in enumerate(values) if x), default=-1)


def alignment(fmt: Format, unit: Unit, group: Group) -> Facts:
    """Bits kept below the largest exponent, what becomes of the rest, and which exponent a product has."""
    bits = last(kept(fmt, unit, group, 1.0, True, 1.0))
    shapes = {s: kept(fmt, unit, group, 1.0, True, s) for s in (1.0, 1.5, 1.75, -1.0, -1.5, -1.75)}
    # eighths of the last place, or of half of it, that are left of `shape` there
    toward_zero = all(v[bits] == math.copysign(8, s) and not v[bits + 1] for s, v in shapes.items())
    return {
        "fraction_bits": bits,
        "fraction_bits_beside_a_product": last(kept(fmt, unit, group, 1.0, False, 1.0)),
        "addends": "toward zero" if toward_zero else {str(s): v[bits : bits + 2] for s, v in shapes.items()},
        "fraction_bits_beside_1.5_x_1.5": last(kept(fmt, unit, group, 1.5, False, 1.0)),
        "fraction_bits_beside_an_accumulator_of_2.25": last(kept(fmt, unit, group, 1.5, True, 1.0)),
    }


def result(fmt: Format, unit: Unit, group: Group, bits: int) -> Facts:
    """What becomes of a sum that is longer than a float32, of an accumulator that nothing is added to, and of extremes."""
    one, place, ulp = 2.0**16, 2.0 ** (16 - bits), 2.0 ** (16 - 23)

    def product(x: float) -> tuple[float, float]:  # a power of two times up to 1.75
        half = 2.0 ** (math.frexp(x)[1] // 2)
        return half, x / half

    odd = (2**24 - 1) * 2.0**-7  # all 24 bits set, of one's exponent
    small = 2.0 ** max(fmt.smallest, -14)  # its square is lost beside a product of the exponent that 0 x top might have
    probes: dict[str, tuple[float, list[tuple[float, float]]]] = {
        "accumulator alone": (odd, []),
        "accumulator beside 0 x large": (odd * 2.0**-28, [(0.0, fmt.top)]),
        "carry": (1.5 * one, [product(1.5 * one), product(3 * place)]),
        "carry, negative": (-1.5 * one, [product(-1.5 * one), product(-3 * place)]),
        "small product beside 0 x large": (0.0, [(0.0, fmt.top), (small, small)]),
        "subnormal accumulator": (2.0**-140, []),
    }
    if bits > 24:
        parts = [product(ulp / 2), product(ulp / 4)]
        probes |= {
            "three quarters of an ulp": (one, parts),
            "three quarters of an ulp, negative": (-one, [(-x, y) for x, y in parts]),
            "a quarter of an ulp less": (one, [(-parts[1][0], parts[1][1])]),
        }
    if fmt.smallest == -126:
        probes |= {
            "2^127 + 2^127": (2.0**127, [(2.0**127, 1.0)]),
            "2^127 + 2^127 - 2^127": (2.0**127, [(2.0**127, 1.0), (-(2.0**127), 1.0)]),
            "subnormal product": (0.0, [(2.0**-70, 2.0**-70)]),
        }
    answers = dict(zip(probes, sums(fmt, unit, group, list(probes.values())), strict=True))
    if bits > 24:
        names = ("three quarters of an ulp", "three quarters of an ulp, negative", "a quarter of an ulp less")
        how = {(one, -one, one - ulp / 2): "toward zero", (one + ulp, -one - ulp, one): "to nearest"}
        cut = how.get((answers[names[0]], answers[names[1]], answers[names[2]]), "other")
    else:  # three places over a sum whose last place is two (of 24 bits: four)
        carried = ((answers["carry"] - 3 * one) / place, (answers["carry, negative"] + 3 * one) / place)
        cut = {(0.0, 0.0): "toward zero", (2.0, -2.0): "toward zero", (4.0, -4.0): "to nearest", (3.0, -3.0): "not cut"}.get(
            carried, "other"
        )
    return {
        "sum": cut,
        "result_bits": 23 if bits > 22 or cut == "not cut" else bits,
        "accumulator_alone_loses_ulps": (odd - answers["accumulator alone"]) / ulp,
        "zero_times_large_aligns": answers["small product beside 0 x large"] != small**2
        or answers["accumulator beside 0 x large"] != answers["accumulator alone"] * 2.0**-28,
        "subnormal_accumulator_kept": answers["subnormal accumulator"] == 2.0**-140,
        "answers": {name: x if math.isfinite(x) else str(x) for name, x in answers.items()},
    }


def subnormal_factors(fmt: Format, unit: Unit, group: Group) -> int:
    """Bits kept beside a product of the smallest subnormal number and a large one; -1 where such numbers count as 0."""
    digits = DIGITS[fmt.name]
    least, large = fmt.smallest - digits, int(math.log2(fmt.top))
    probes = []
    for n in range(digits, 29):
        e = least + large - n
        x = max(e // 2, fmt.smallest)
        probes.append((-(2.0 ** (least + large)), [(2.0**least, 2.0**large), (2.0**x, 2.0 ** (e - x))]))
    found = [n for n, x in enumerate(sums(fmt, unit, group, probes), digits) if x == 2.0 ** (least + large - n)]
    return max(found, default=-1)


def wrong(core: Core, operands: tuple[Tensor, Tensor, Tensor], d: Tensor) -> Tensor:
    """Which elements of d (P, M, N) the model does not give."""
    parts = zip(*(torch.split(x, 64) for x in (*operands, d)), strict=True)
    return torch.cat([add_products(core, a.double(), b.double(), c.double()) != seen.double() for a, b, c, seen in parts])


def fit(fmt: Format, unit: Unit, groups: tuple[Group, ...], probed: Facts) -> Core:
    """The model that the probes lead to; what they leave open is chosen so that the fewest bits are wrong."""
    bits = probed["fraction_bits"]
    base = Core(
        groups=groups,
        fraction_bits=bits,
        result_bits=probed["result_bits"],
        of_factors=probed["fraction_bits_beside_1.5_x_1.5"] == bits,
        smallest=fmt.smallest if probed["subnormal_factors_keep_bits"] == bits - DIGITS[fmt.name] else None,
        lowest=-126,
        apart=None,
    )
    if unit is RAW:
        base = replace(base, groups=UNPACKED, of_factors=True, smallest=None, apart=32)
    trials = [(x, dot(unit, *x)[0]) for name in DRAWS for x in [draw(name, fmt, (256, unit.m, unit.n, 64), 1)]]
    models = [replace(base, lowest=lowest) for lowest in range(-126, -140, -1)]
    return min(models, key=lambda m: sum(int(wrong(m, *x).sum()) for x in trials))


def permuted(unit: Unit, groups: tuple[Group, ...], operands: tuple[Tensor, Tensor, Tensor], d: Tensor) -> Facts:
    """Elements that change when the products are shuffled within their groups, and across them."""
    a, b, c = operands
    generator = torch.Generator().manual_seed(7)
    within = torch.arange(64)
    for group in groups:
        at = torch.tensor(group)
        within[at] = at[torch.randperm(len(group), generator=generator)]
    across = torch.randperm(64, generator=generator)
    changed = {
        name: int((dot(unit, a[..., p.to(DEVICE)], b[..., p.to(DEVICE)], c)[0] != d).sum())
        for name, p in (("within groups", within), ("across groups", across))
    }
    return changed | {"of": d.numel()}


def rivals(core: Core) -> list[Core]:
    """Models that differ from a core in one respect."""
    contiguous = tuple(tuple(range(i, i + 16)) for i in range(0, 64, 16))
    others = [
        replace(core, fraction_bits=core.fraction_bits + 1),
        replace(core, fraction_bits=core.fraction_bits - 1),
        replace(core, of_factors=not core.of_factors),
        replace(core, smallest=None),
        replace(core, result_bits=23),
        replace(core, apart=None),
        replace(core, groups=contiguous),
    ]
    return [other for other in others if other != core]


def samples(fmt: Format, unit: Unit, core: Core) -> list[dict[str, str]]:
    """Single elements and their operands, as the bytes of their formats: what the model can be held to without a GPU.  For
    each rival there is one that it gets wrong, if random operands have any."""
    found, unseen = [], rivals(core)
    for name in ("wide", "tiny"):
        operands = draw(name, fmt, (16, unit.m, unit.n, 64), 3)
        d = dot(unit, *operands)[0]
        a, b, c = operands
        for rival in list(unseen):
            for p, m, n in torch.nonzero(wrong(rival, operands, d))[:1].tolist():
                unseen.remove(rival)
                values = {"a": a[p, m], "b": b[p, n], "c": c[p, m, n], "d": d[p, m, n]}
                found.append({k: x.cpu().reshape(-1).view(torch.uint8).numpy().tobytes().hex() for k, x in values.items()})
    return found


def tensor_core(fmt: Format, unit: Unit, dump: dict[str, Any]) -> Facts:
    """Everything about one instruction and input format; adds products to the dump."""
    lengths = [k for k in LENGTHS if k >= fmt.least_length]
    orders = {k: order(fmt, unit, k) for k in lengths}
    groups = orders[64]
    facts = alignment(fmt, unit, groups[-1])
    facts |= result(fmt, unit, groups[-1], facts["fraction_bits"])
    facts |= {"subnormal_factors_keep_bits": subnormal_factors(fmt, unit, groups[-1])}
    core = fit(fmt, unit, groups, facts)
    checked = {}
    for name in DRAWS:
        operands = draw(name, fmt, (1024, unit.m, unit.n, 64), 2)
        d, program = dot(unit, *operands)
        bad = wrong(core, operands, d)
        checked[name] = [int(bad.sum()), d.numel()]
        dump[f"{fmt.name} {unit.name} {name}"] = [x[:24].cpu() for x in (*operands, d)]
        p, m, n = (x[:100] for x in torch.nonzero(bad, as_tuple=True))
        if len(p):
            a, b, c = operands
            dump[f"{fmt.name} {unit.name} {name}, wrong"] = [x.cpu() for x in (a[p, m], b[p, n], c[p, m, n], d[p, m, n])]
        if name == "wide":
            shuffled = permuted(unit, core.groups, operands, d)
    return {
        "instruction": instruction(program),
        "group_size": {str(k): len(o[0]) for k, o in orders.items()},
        "groups": " | ".join(" ".join(map(str, g)) for g in core.groups),
        **facts,
        "model": {name: x for name, x in asdict(core).items() if name != "groups"},
        "model_wrong": checked,
        "shuffled_changed": shuffled,
        "chains": chains(fmt, unit),
        "logits": [logits(fmt, unit, pieces, kind) for kind in ("random", "one channel") for pieces in (1, 4)],
        "samples": samples(fmt, unit, core),
    }


def tf32_operands() -> Facts:
    """What a tensor core makes of float32 operands: 1 + 2^-11 is halfway between two tf32 numbers."""
    tf32 = next(f for f in FORMATS if f.name == "tf32")
    found = {}
    for unit in (WGMMA, MMA):
        below, half, above = sums(tf32, unit, (0,), [(0.0, [(1 + x * 2.0**-11, 1.0)]) for x in (0.75, 1.0, 1.75)])
        found[unit.name] = [(x - 1) * 2.0**11 for x in (below, half, above)]
    return found
