"""Makes docs/gpu/calibration.json and the tables of docs/gpu.md of what `ci/gpu/calibrate.py` found on a GPU.

    python ci/gpu/page.py FOUND     # FOUND/calibration.json and FOUND/products.pt
    python ci/gpu/page.py           # the tables again, of docs/gpu/calibration.json

The first puts the emulated accumulators of `references/operations.py` to the GPU's own products.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle.contract import Precision
from oracle.references.arithmetic import Accumulator, Arithmetic
from oracle.references.operations import accumulate
from oracle.references.roundoff import TRUNCATIONS, U_FP22, WORST_CHAIN, roundoff

Facts = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
PAGE, DATA = ROOT / "docs" / "gpu.md", ROOT / "docs" / "gpu" / "calibration.json"
TABLES = re.compile(r"(<!-- ci/gpu/page.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SUMS = ("normal", "probabilities", "of one sign", "beside a sink")
LOGITS = ("random", "one channel")
RESCALES = 0.5  # 2T / (n/16), a tile being 64 keys
ASSUMED = 1.0  # places that 16 products cost a sum, as was assumed before these measurements (docs/numerics.md 2.2)


def emulated(name: str, facts: Facts) -> dict[str, tuple[Accumulator, Arithmetic]]:
    """The emulated accumulators that stand for an instruction, by what they are called in the table."""
    if facts["result_bits"] < 23:
        narrow = Arithmetic(aligned_width=facts["group_size"]["64"], aligned_guard=facts["fraction_bits"] - 23)
        return {"fp22": ("fp22", narrow), "aligned": ("aligned", narrow)}
    wide = Arithmetic(aligned_width=8 if name.startswith("tf32") else 16, aligned_guard=facts["model"]["fraction_bits"] - 23)
    return {"rz16": ("rz16", wide), "aligned": ("aligned", wide)}


def emulator(found: Facts, products: dict[str, list[Tensor]]) -> Facts:
    """For each instruction, accumulator and kind of operands: [elements that differ, elements, bias here, bias there], a bias
    being the mean error toward the larger magnitude, over the mean magnitude."""
    table: Facts = {}
    for name, facts in found["tensor_cores"].items():
        for label, (kind, arithmetic) in emulated(name, facts).items():
            for operands in facts["model_wrong"]:
                a, b, c, d = (x[:8].double() for x in products[f"{name} {operands}"])
                made = accumulate(c, a, b.mT.contiguous(), kind, arithmetic)
                exact = c + a @ b.mT
                sign, size = exact.sign(), exact.abs().mean()
                biases = [float(((x - exact) * sign).mean() / size) for x in (d, made)]
                row = [int((made != d).sum()), d.numel(), *biases]
                table.setdefault(name, {}).setdefault(label, {"guard": arithmetic.aligned_guard})[operands] = row
    return table


def table(columns: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def two(x: float) -> str:
    """x as a power of two."""
    return f"2^{math.log2(x):.1f}".removesuffix(".0") if x > 0 else "0"


def machine(found: Facts) -> str:
    """What it ran on, in a sentence."""
    v = found["versions"]
    return (
        f"{v['device']} (compute capability {v['capability']}), driver {v['driver']}, Python {v['python']}, torch {v['torch']}, "
        f"Triton {v['triton']}; `{v['command']}`, {found['seconds']:.0f} s."
    )


def instructions(found: Facts) -> str:
    """What each instruction does."""
    rows: list[tuple[object, ...]] = []
    for name, f in found["tensor_cores"].items():
        model = f["model"]
        groups = f["groups"].split(" | ")
        size, shuffled = len(groups[0].split()), f["shuffled_changed"]
        contiguous = [int(x) for g in groups for x in g.split()] == list(range(64))
        wrong = [sum(x) for x in zip(*f["model_wrong"].values(), strict=True)]
        rows.append(
            (
                name,
                f"`{f['instruction'][-1]}`",
                f"{size}" if contiguous else f"{size}, interleaved",
                f"2^-{model['fraction_bits']}",
                "sum of the factors'" if model["of_factors"] else "its own",
                f"to 2^-{model['result_bits']}"
                + (f", from 0 each {model['apart']}; then an fp32 addition" if model["apart"] else ""),
                f"{wrong[0]} of {wrong[1]:,}",
                f"{shuffled['within groups']} / {shuffled['across groups'] / shuffled['of']:.0%}",
            )
        )
    return table(
        (
            "inputs, instruction",
            "machine code",
            "products at once",
            "addends cut to",
            "a product's exponent",
            "sum cut",
            "bits that the model gets wrong",
            "changed by a shuffle within / across groups",
        ),
        rows,
    )


def allowed(facts: Facts) -> float:
    """u_acc that the bound takes for an instruction: FP22's or that of a truncated float32."""
    return U_FP22 if facts["result_bits"] < 23 else 2.0**-23


def places(facts: Facts) -> float:
    """Places of the sum that the bound allows an instruction for 16 products."""
    return roundoff(Precision(u_acc=allowed(facts)), dtype="bf16", out_dtype="bf16", scaled=False).truncations


def share(facts: Facts, kind: str, t: float) -> float:
    """The largest error of a sum of that kind over (t n/16 + 2T) u_acc M."""
    largest: float = max(error for error, _ in facts["chains"][kind].values())
    return largest * 2.0**-23 / allowed(facts) / (t + RESCALES)


def logit_share(facts: Facts, kind: str, t: float) -> float:
    """The largest error of a logit of that kind over the accumulation's part of eta, kappa = t d/16 + 2."""
    groups = [(x["over_eta"], x["head_dim"] / 16) for x in facts["logits"] if x["kind"] == kind]
    largest: float = max(over * (n + 2) / (t * n + 2) for over, n in groups)
    return largest * 2.0**-23 / allowed(facts)


def lse_share(facts: Facts, kind: str, t: float) -> float:
    """The same over the accumulation's part of B_lse.  What was recorded has 1.13 d/4 S1 where FP22 has t d/16 S1: divided by the
    ratio of the two terms at its least, which is at B1 = S1."""

    def part(d: int, one_sided: float) -> float:
        return 3 * math.sqrt(WORST_CHAIN * d) + one_sided

    found = [(x["over_lse"], x["head_dim"]) for x in facts["logits"] if x["kind"] == kind]
    usual = {d: WORST_CHAIN * d / 4 for _, d in found}
    own = {d: t * d / 16 if t > TRUNCATIONS else usual[d] for _, d in found}
    largest: float = max(over * part(d, usual[d]) / part(d, own[d]) for over, d in found)
    return largest * 2.0**-23 / allowed(facts)


def worst_chain(facts: Facts) -> float:
    """Most that a sum can lose for each product, in units of u_acc and of the largest addend: every addend of a group and the
    accumulator cut by almost a place, and the sum."""
    model, size = facts["model"], len(facts["groups"].split(" | ")[0].split())
    group = (size + 1) * 2.0 ** -model["fraction_bits"] + 2.0 ** -model["result_bits"]
    each: float = group + (2.0**-24 if model["apart"] else 0.0)
    return each / size / allowed(facts)


def one_sided(facts: Facts) -> float:
    """What a sum of one sign loses on average for each 16 products, in units of u_acc and of itself, if all addends have bits
    below the last place and the sum is a power of two: half a place of every addend of a group, and of the sum."""
    return worst_chain(facts) * 16 / 2


def sums(found: Facts) -> str:
    """What long sums lose, against the bound."""
    rows: list[tuple[object, ...]] = []
    for name, f in found["tensor_cores"].items():
        lost = f["chains"]["of one sign"]["8192"][1] * 2.0**-23 * 512
        rows.append(
            (
                name,
                two(allowed(f)),
                *(
                    " / ".join(f"{part(f, kind, t):.2f}" for t in (ASSUMED, places(f)))
                    for part, kinds in ((share, SUMS), (logit_share, LOGITS), (lse_share, LOGITS))
                    for kind in kinds
                ),
                f"{worst_chain(f):.2f}",
                f"{one_sided(f):.1f}",
                f"{lost:.1e}",
            )
        )
    return table(
        (
            "inputs, instruction",
            "u_acc",
            *(f"P.V, {kind}" for kind in SUMS),
            *(f"q.k, {kind}: {part}" for part in ("eta", "B_lse") for kind in LOGITS),
            "worst case, a product",
            "one-sided, 16 products",
            "8192 of one sign lose",
        ),
        rows,
    )


def accumulators(found: Facts) -> str:
    """The emulator against the hardware."""
    kinds = list(next(iter(found["tensor_cores"].values()))["model_wrong"])
    rows: list[tuple[object, ...]] = []
    for name, labels in found["emulator"].items():
        for label, f in labels.items():
            biases = f["probabilities"][2:]
            shown = label if label != "aligned" else f"aligned, guard {f['guard']}"
            rows.append((name, shown, *(f"{f[k][0] / f[k][1]:.1%}" for k in kinds), *(f"{x:.1e}" for x in biases)))
    return table(("inputs, instruction", "emulated as", *(f"differ: {k}" for k in kinds), "bias on the GPU", "emulated"), rows)


def functions(found: Facts) -> str:
    """Exponentials and the like."""
    rows: list[tuple[object, ...]] = []
    for name, f in found["functions"].items():
        worst = [
            f"{two(e['largest'])} {'' if e['kind'] == 'relative' else 'absolute '}on {e['from']:.3g} .. {e['to']:.3g}"
            for e in f["errors"]
        ]
        shape = f.get("binade") or f.get("binades", {}).get("-1")
        rows.append(
            (
                name,
                ", ".join(f"`{x}`" for x in f.get("sass") or f.get("ptx") or []),
                "; ".join(worst),
                f"{shape['mean']:.1e}" if shape else "",
                two(shape["largest_mean_of_256th"]) if shape else "",
                f.get("subnormal_results", ""),
            )
        )
    return table(
        (
            "function",
            "is",
            "largest error",
            "mean of a binade",
            "largest mean of 1/256 of it",
            "subnormal results",
        ),
        rows,
    )


def conversions(found: Facts) -> str:
    """Rounding to narrower formats."""
    rows: list[tuple[object, ...]] = []
    for name, f in found["conversions"].items():
        beyond = f["beyond_largest"]
        what = next(k for k in ("largest", "infinite", "nan") if beyond[k] == beyond["patterns"])
        shown = {"largest": "the largest number", "infinite": "infinity", "nan": "NaN"}[what]
        rows.append((name, f["wrong"], shown, "yes" if f["nan_lost"] == 0 else "no"))
    return table(("fp32 to, by", "of 2^32 not rounded to nearest, ties to even", "past the largest", "NaN stays NaN"), rows)


PARTS = {
    "machine": machine,
    "instructions": instructions,
    "sums": sums,
    "accumulators": accumulators,
    "functions": functions,
    "conversions": conversions,
}


def with_tables(page: str, found: Facts) -> str:
    """The page with every table made again."""
    return TABLES.sub(lambda m: f"{m[1]}{PARTS[m[2]](found)}\n{m[3]}", page)


def lines(found: Facts) -> str:
    """The report as JSON, lists of plain values on one line."""
    flat = re.compile(r"\[\s+([^\[\]{}]*?)\s+\]")
    return flat.sub(lambda m: "[" + re.sub(r"\s*\n\s*", " ", m[1]) + "]", json.dumps(found, indent=1)) + "\n"


def main() -> None:
    """Writes the two files."""
    if sys.argv[1:]:
        folder = Path(sys.argv[1])
        found = json.loads((folder / "calibration.json").read_text())
        found["emulator"] = emulator(found, torch.load(folder / "products.pt"))
        DATA.write_text(lines(found))
    PAGE.write_text(with_tables(PAGE.read_text(), json.loads(DATA.read_text())))


if __name__ == "__main__":
    main()
