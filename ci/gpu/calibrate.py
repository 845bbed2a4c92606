"""Measures the arithmetic that the error bound assumes of a GPU (docs/numerics.md, sections 1 and 2.2), on that GPU.

    python3 ci/gpu/calibrate.py OUT

writes OUT/calibration.json and OUT/products.pt (matrix products for `ci/gpu/page.py`, which makes docs/gpu.md of both).
Needs torch, Triton and a GPU of compute capability 9.0; takes about a minute.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from dots import INSTRUCTIONS
from elementwise import conversions, functions
from long_sums import shapes
from tensor_cores import tensor_core, tf32_operands

Facts = dict[str, Any]  # a part of the report: text, numbers, lists and parts of its own


HOW = {
    "group_size": "by length of the contraction: accumulator L, product -L at i, small at j; small survives if j comes after i",
    "fraction_bits": "accumulator L, product -L, product 2^-n L: the largest n for which the last is seen in the sum",
    "addends": "the same with 1.5 and 1.75 times 2^-n L, both signs: what is left of them at the last place and below it",
    "fraction_bits_beside_1.5_x_1.5": "the same beside 1.5 x 1.5 and -1.5 x 1.5: one less if products are normalised first",
    "sum": "L + 3/4 ulp, -L - 3/4 ulp, L - 1/4 ulp; or 1.5 L + 1.5 L + 3 places where places are coarser than ulps",
    "zero_times_large_aligns": "whether 0 x 2^large hides a small product or bits of the accumulator",
    "subnormal_factors_keep_bits": "as fraction_bits, beside the product of the smallest subnormal number and a large one",
    "model": "what the probes lead to (ci/gpu/core.py); `lowest` is the one of -126 .. -139 with the fewest wrong bits",
    "model_wrong": "elements that the model does not give, of all, by kind of random operands; contractions of 64",
    "shuffled_changed": "elements that change when the products are shuffled, kind `wide`",
    "chains": "by number of products: largest and mean |error| over 2^-23 max|prefix| n/16, toward zero negative",
    "logits": "largest error over what docs/numerics.md 2.5 allows the accumulation, with u_acc = 2^-23",
    "samples": "elements of results and their operands, little-endian bytes, each of which tells the model from another",
    "tf32 operands": "what is left of 3/4, 1 and 7/4 times 2^-11 above 1, a tf32 ulp being 2^-10",
    "shapes": "elements that differ from those of wgmma 128x128 by 4 warps, of all; kind `wide`",
    "functions": "all float32 arguments of a range against float64; quotients: random significands in [1, 2)",
    "conversions": "all 2^32 bit patterns against rounding in float64",
    "emulator": "by kind of operands: elements that differ, of all, mean error (away from zero) over mean size, there and here",
}


def versions() -> Facts:
    """What it ran on."""
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
        "command": "python3 ci/gpu/calibrate.py OUT",
    }


def main() -> None:
    """Writes the two files, the report after each part so that a part that fails leaves the ones before it."""
    out, start = Path(sys.argv[1]), time.perf_counter()
    report: Facts = {"versions": versions(), "how": HOW, "tensor_cores": {}}
    dump: dict[str, Any] = {}

    def part(name: str, facts: Callable[[], Facts], into: Facts) -> None:
        try:
            into[name] = facts()
        except Exception:  # whatever it is, the parts after it are still worth their minutes
            into[name] = {"failed": traceback.format_exc()}
            print(into[name]["failed"])
        report["seconds"] = round(time.perf_counter() - start, 1)
        (out / "calibration.json").write_text(json.dumps(report, indent=1) + "\n")
        print(f"{report['seconds']:7.1f} s  {name}", flush=True)

    for fmt, unit in INSTRUCTIONS:
        part(f"{fmt.name} {unit.name}", partial(tensor_core, fmt, unit, dump), report["tensor_cores"])
        torch.save(dump, out / "products.pt")
    part("tf32 operands", tf32_operands, report)
    part("shapes", shapes, report)
    part("functions", functions, report)
    part("conversions", conversions, report)


if __name__ == "__main__":
    main()
