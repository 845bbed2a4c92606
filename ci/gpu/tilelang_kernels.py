"""Checks and times the TileLang kernels on a GPU, built ahead of time and compiled just in time.

    PYTHONPATH=. ATTENTION_ORACLE_LIBRARIES=DIR python3 ci/gpu/tilelang_kernels.py OUT PART...

writes OUT/tilelang.json.  Parts: `cases` (every family, page size and hostile batch against fp64, reruns, other fills), `pairs`
(sustained pairs), `start` (from loading a library to the first launch, in new processes), `twin` (the bits of the libraries
against those of the kernels that TileLang compiles there, which needs TileLang and nvcc), `nvrtc` (against its other compiler).
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pairs import Shape, described, problem, sustained, versions
from tilelang_cases import BATCHES, Laid, exact, lay
from torch import Tensor

from oracle.kernels import tilelang_prefill
from oracle.kernels.tilelang_families import FAMILIES, PAGE_SIZES, Family

RERUNS = 400
SHAPES = (
    *((Shape(q_heads=32, kv_heads=4, dim=512, rows=8192, context=c, page=p)) for p in PAGE_SIZES for c in (0, 16384, 57344)),
    *((Shape(q_heads=32, kv_heads=16, dim=256, rows=8192, context=c, page=64, left=1023)) for c in (0, 16384)),
    Shape(q_heads=32, kv_heads=16, dim=256, rows=8192, context=0, page=64),
    *((Shape(q_heads=32, kv_heads=8, dim=128, rows=8192, context=c, page=64)) for c in (0, 16384)),
)


def kernel(family: Family) -> Any:
    """The kernel of the contract for a family."""
    return getattr(tilelang_prefill, family.name)


def bits(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """out and lse as integers: NaN equals itself."""
    return pair[0].view(torch.int16), pair[1].view(torch.int32)


def same(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> bool:
    """Whether two answers have the same bits."""
    return all(torch.equal(a, b) for a, b in zip(bits(one), bits(two), strict=True))


def everything() -> Iterator[tuple[str, Family, int, Laid]]:
    """Every family, page size and batch."""
    for family in FAMILIES.values():
        for page in PAGE_SIZES:
            for batch in BATCHES:
                yield f"{family.name} page {page} {batch.name}", family, page, lay(batch, family, page)


def cases() -> dict[str, Any]:
    """Errors against fp64 and what must not change a bit."""
    found = {}
    for name, family, page, laid in everything():
        got = laid.run(kernel(family))
        out, lse = exact(laid)
        error, rounding = (got[0].double() - out).abs(), (out.bfloat16().double() - out).abs()
        gap = (got[1].double() - lse).abs()[lse > -math.inf]
        empty = lse == -math.inf
        others = [lay(laid.batch, family, page, junk=math.inf, salt=s).run(kernel(family)) for s in (1, 2)]
        found[name] = {
            "max_error": float(error.max()) if error.numel() else 0.0,
            "mean_error": float(error.mean()) if error.numel() else 0.0,
            "mean_error_of_rounding": float(rounding.mean()) if rounding.numel() else 0.0,
            "max_lse_error": float(gap.max()) if gap.numel() else 0.0,
            "finite": bool(got[0].isfinite().all()),
            "empty_rows_right": bool((got[1][empty] == -math.inf).all() and (got[0][empty] == 0).all()),
            "reruns_same": all(same(got, laid.run(kernel(family))) for _ in range(RERUNS)),
            "other_fills_and_pages_same": all(same(got, other) for other in others),
        }
        if not all(v for v in found[name].values() if isinstance(v, bool)):
            print(name, found[name], flush=True)
    return found


def pairs() -> list[dict[str, Any]]:
    """Sustained pairs of every shape."""
    found = []
    for shape in SHAPES:
        posed = problem(shape)
        family = next(f for f in FAMILIES.values() if f.head_dim == shape.dim)
        out = torch.full_like(posed.q, math.nan)
        errors = posed.errors(posed.call(kernel(family), out=out))
        facts = sustained(partial(posed.call, kernel(family), out=out), shape.flops).facts()
        found.append({"shape": described(shape), **facts, **errors})
        print(shape.dim, shape.page, shape.context, shape.left, facts["ratio"], facts["ms"], errors, flush=True)
    return found


START = """
import sys, time, torch
sys.path.insert(0, "ci/gpu")
from pathlib import Path
from tilelang_cases import BATCHES, lay
from oracle.kernels import tilelang_prefill as t
from oracle.kernels.tilelang_families import FAMILIES
family = FAMILIES[sys.argv[1]]
laid = lay(BATCHES[0], family, 64)
torch.cuda.synchronize()
begin = time.perf_counter()
t.compiled(family, 64)
loaded = time.perf_counter()
laid.run(getattr(t, family.name))
torch.cuda.synchronize()
print(loaded - begin, time.perf_counter() - begin)
"""


def start() -> dict[str, Any]:
    """Seconds from before a library is loaded, with the CUDA context up, to the end of its first run; two processes each."""
    found = {}
    for name in FAMILIES:
        runs = [subprocess.run([sys.executable, "-c", START, name], capture_output=True, text=True, check=True) for _ in range(2)]
        both = [[float(x) for x in run.stdout.split()] for run in runs]
        found[name] = {"load_s": [round(a, 4) for a, _ in both], "load_and_first_run_s": [round(b, 4) for _, b in both]}
        print(name, found[name], flush=True)
    return found


def twin() -> dict[str, Any]:
    """Whether the libraries and TileLang's own kernels, compiled here, give the same bits, and what compiling took."""
    ahead = {name: laid.run(kernel(family)) for name, family, _, laid in everything()}
    folder = os.environ.pop(tilelang_prefill.FOLDER)
    took, found = {}, {}
    for family in FAMILIES.values():
        for page in PAGE_SIZES:
            begin = time.perf_counter()
            tilelang_prefill.compiled(family, page)
            took[f"{family.name} page {page}"] = round(time.perf_counter() - begin, 1)
            print(took, flush=True)
    for name, family, _, laid in everything():
        found[name] = same(ahead[name], laid.run(kernel(family)))
    os.environ[tilelang_prefill.FOLDER] = folder
    return {"same_bits": found, "all_same": all(found.values()), "compile_s": took, "median_s": statistics.median(took.values())}


def nvrtc() -> dict[str, Any]:
    """Whether TileLang's other compiler, NVRTC, gives the same bits: as TileLang calls it, and with nvcc's --use_fast_math."""
    family, laid, found = FAMILIES["hd512"], lay(BATCHES[0], FAMILIES["hd512"], 64), {}
    ahead = laid.run(kernel(family))
    for flags in ([], ["--use_fast_math"]):
        built = tilelang_prefill.just_in_time(family, 64, execution_backend="nvrtc", compile_flags=flags)
        with mock.patch.object(tilelang_prefill, "compiled", return_value=built):
            got = laid.run(kernel(family))
        found[" ".join(flags) or "as TileLang calls it"] = {
            "same_bits": same(ahead, got),
            "elements_that_differ": float((bits(ahead)[0] != bits(got)[0]).double().mean()),
        }
    print(found, flush=True)
    return found


def main() -> None:
    """Writes the report after each part, so that one that fails leaves those before it."""
    out = Path(sys.argv[1]) / "tilelang.json"
    parts: dict[str, Callable[[], Any]] = {"cases": cases, "pairs": pairs, "start": start, "twin": twin, "nvrtc": nvrtc}
    report: dict[str, Any] = {"versions": versions("python3 ci/gpu/tilelang_kernels.py OUT " + " ".join(sys.argv[2:]))}
    for name in sys.argv[2:]:
        begin = time.perf_counter()
        report[name] = parts[name]()
        print(name, round(time.perf_counter() - begin, 1), "s", flush=True)
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
