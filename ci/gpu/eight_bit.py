"""What 8 bits can gain on a GPU of compute capability 9.0, and what the Triton kernels gain beside the BF16 TileLang kernel.

    PYTHONPATH=. ATTENTION_ORACLE_LIBRARIES=DIR python3 ci/gpu/eight_bit.py OUT [PART...]

writes OUT/eight_bit.json.  Parts: `rates` (matrix products in bf16, e4m3 and int8), `ceiling` (computed from them), `pairs`
(each kernel at each shape, its codes made within the timed call and before it), `tilings` (others, of the fp8 kernel at head
dim 512); without a PART, the first three.  Two minutes and a half, of which compiling takes half; `tilings`, one.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pairs import BLOCK_S, SIZE, Problem, block_ms, described, problem, sustained, versions, write
from timed import GLOBAL, LLAMA, SLIDING, absent, ready
from torch import Tensor

from oracle.contract import Call
from oracle.kernels.eight_bit import K_BLOCK, Scheme
from oracle.kernels.triton_eight_bit import FP8, HADAMARD, INT8, INT8_V8, TILINGS, Tiling, attention
from oracle.kernels.triton_host import launch_for
from oracle.kernels.triton_quantise import quantised

Facts = dict[str, Any]

REPEATS = 2  # sustained pairs of each
BAR = 1.2  # times the rate of the BF16 kernel, at the global layers' shape after 16,384 keys
PROTOCOL = (
    f"{REPEATS} times: {BLOCK_S} s of {SIZE}^3 bf16 products, {BLOCK_S} s of the kernel; of each block the median call by CUDA "
    "events, the first quarter left out; ratio = the kernel's rate over its own block of products, the median of the pairs"
)
SCHEMES: dict[str, Scheme] = {"fp8": FP8, "fp8_hadamard": HADAMARD, "int8": INT8, "int8_v8": INT8_V8}
CANDIDATES = (  # rows, width, chunk, warps, stages
    (64, 512, 128, 8, 2),
    (64, 512, 64, 8, 2),
    (64, 512, 256, 16, 2),
    (64, 512, 128, 16, 2),
    (64, 256, 128, 4, 2),
    (64, 256, 64, 4, 3),
    (128, 256, 64, 8, 2),
    (128, 256, 128, 16, 2),
)
SHAPES = (
    replace(GLOBAL, context=0),
    replace(GLOBAL, context=16384),
    replace(GLOBAL, context=57344),
    replace(SLIDING, context=16384, left=-1),
    replace(LLAMA, context=16384),
)


def rates() -> Facts:
    """Rates of square products beside bf16's: e4m3 with its sums in FP22 and promoted to float32, and int8."""
    random = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, device="cuda", generator=random) for _ in range(2))
    one = torch.ones((), device="cuda")
    fp8_a, fp8_b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    int8_a, int8_b = (x.mul(40).round().clamp(-127, 127).to(torch.int8) for x in (a, b))
    int8_b = int8_b.t()

    def scaled(fast: bool) -> Tensor:
        return torch._scaled_mm(fp8_a, fp8_b, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    calls: dict[str, Callable[[], Tensor]] = {
        "e4m3, sums in FP22": partial(scaled, True),
        "e4m3, sums promoted": partial(scaled, False),
        "int8": lambda: torch._int_mm(int8_a, int8_b),
    }
    return {name: sustained(call, 2.0 * SIZE**3, pairs=REPEATS).facts() for name, call in calls.items()}


def issues() -> float:
    """What the float32 units of this GPU can issue in a second at its highest clock."""
    card = torch.cuda.get_device_properties(0)
    return float(card.multi_processor_count * 128 * card.clock_rate * 1e3)


def ceiling(found: Facts, issues_s: float) -> Facts:
    """How many times the rate of products of bf16 an attention can have whose two products have the rates measured.

    `tensor cores`: nothing but the products takes time, each its half of the operations.  `float32 beside`: what the float32
    units must issue for a score, of which they issue `issues_s` in a second, as a share of the time of its products; where it
    nears 1, products have to wait.  Counted for a score: its scale, maximum, difference, sum, P's scale, half a conversion, and
    8 issues for an exponential; and for each of the head's columns over the keys of a tile, a fade and an addition.
    """
    bf16 = 1e12 * sum(found["int8"]["products_tflops"]) / len(found["int8"]["products_tflops"])
    rate = {"bf16": 1.0, **{name: facts["ratio"] for name, facts in found.items()}}
    facts: Facts = {"float32 issues a second": issues_s, "bf16 products, operations a second": bf16}
    ways = {
        "q.k and P.V in e4m3, FP22": ("e4m3, sums in FP22", "e4m3, sums in FP22"),
        "q.k and P.V in e4m3, promoted": ("e4m3, sums promoted", "e4m3, sums promoted"),
        "q.k in int8, P.V in e4m3": ("int8", "e4m3, sums in FP22"),
        "q.k in int8, P.V in bf16": ("int8", "bf16"),
    }
    for shape in (GLOBAL, SLIDING, LLAMA):
        for name, (qk, pv) in ways.items():
            gain = 2 / (1 / rate[qk] + 1 / rate[pv])
            busy = (5.5 + 8 + 2 * shape.dim / K_BLOCK) / issues_s / (4 * shape.dim / (bf16 * gain))
            facts[f"{name}, head dim {shape.dim}"] = {
                "tensor cores": round(gain, 3),
                "float32 beside": round(busy, 3),
                "nothing overlaps": round(gain / (1 + busy), 3),
            }
    return facts


def pairs() -> Iterator[list[Facts]]:
    """The facts of every kernel at every shape so far, after each one."""
    found: list[Facts] = []
    for shape in SHAPES:
        asked = problem(shape)
        bf16 = math.nan
        for name, call, out in kernels(asked):
            facts: Facts = {"kernel": name, "shape": described(shape)}
            if isinstance(call, str):
                found.append(facts | {"absent": call})
            else:
                call()
                facts |= {key: float(f"{x:.4g}") for key, x in asked.errors(out()).items()}
                facts |= sustained(call, shape.flops, pairs=REPEATS).facts()
                bf16 = facts["ratio"] if name == "tilelang" else bf16
                facts["over_tilelang"] = round(facts["ratio"] / bf16, 3) if bf16 == bf16 else None
                facts["bar"] = BAR if shape == replace(GLOBAL, context=16384) and name != "tilelang" else None
                found.append(facts)
            print({k: v for k, v in found[-1].items() if not isinstance(v, list)}, flush=True)
            yield found


def kernels(asked: Problem) -> Iterator[tuple[str, Callable[[], Any] | str, Callable[[], Tensor]]]:
    """Name, call (or why there is none) and the answer after a call, of everything that is timed on a problem."""
    if why := absent("tilelang"):
        yield "tilelang", why, lambda: asked.q
    else:
        call, _ = ready("tilelang", asked)
        yield "tilelang", call, call
    for name, scheme in SCHEMES.items():
        out = torch.full_like(asked.q, math.nan)
        launch = launch_for(Call(q=asked.q, k_cache=asked.k_cache, v_cache=asked.v_cache, **asked.plan), out, None)
        codes = quantised(launch, scheme)

        def whole(launch: Any = launch, scheme: Scheme = scheme) -> None:
            attention(launch, scheme, quantised(launch, scheme))

        yield f"{name}, quantising timed", whole, lambda out=out: out  # type: ignore[misc]  # bound now, not when called
        if scheme is not HADAMARD:  # whose codes are computed with as fp8's are
            yield f"{name}, codes ready", partial(attention, launch, scheme, codes), lambda out=out: out  # type: ignore[misc]


def tilings() -> Iterator[list[Facts]]:
    """The fp8 kernel, its codes ready, in other tilings at the global layers' shape after 16,384 keys."""
    asked = problem(replace(GLOBAL, context=16384))
    out = torch.full_like(asked.q, math.nan)
    launch = launch_for(Call(q=asked.q, k_cache=asked.k_cache, v_cache=asked.v_cache, **asked.plan), out, None)
    codes = quantised(launch, FP8)
    found: list[Facts] = []
    for rows, width, chunk, warps, stages in CANDIDATES:
        tiling = Tiling(rows=rows, width=width, chunk=chunk, warps=warps, stages=stages)
        call = partial(attention, launch, FP8, codes, tiling=tiling)
        facts: Facts = {"tiling": asdict(tiling), "shipped": tiling == TILINGS[asked.shape.dim]}
        try:
            call()
            facts |= asked.errors(out)
            facts |= {"ms": round(block_ms(call, 8), 4)}
        except Exception as error:  # what does not fit is a finding here
            facts["refused"] = f"{type(error).__name__}: {str(error)[:200]}"
        found.append(facts)
        print(facts, flush=True)
        yield found


def main() -> None:
    """Writes the report as it grows, so that a part that fails leaves those before it."""
    out, names = Path(sys.argv[1]) / "eight_bit.json", sys.argv[2:] or ["rates", "ceiling", "pairs"]
    out.parent.mkdir(parents=True, exist_ok=True)
    report: Facts = {"versions": versions(" ".join(["python3 ci/gpu/eight_bit.py OUT", *sys.argv[2:]])) | {"protocol": PROTOCOL}}
    for name in names:
        begin = time.perf_counter()
        if name == "rates":
            report["rates"] = rates()
        elif name == "ceiling":
            report["ceiling"] = ceiling(report["rates"], issues())
        else:
            for facts in {"pairs": pairs, "tilings": tilings}[name]():
                report[name] = facts
                write(report, out)
        write(report, out)
        print(name, round(time.perf_counter() - begin, 1), "s", flush=True)


if __name__ == "__main__":
    main()
