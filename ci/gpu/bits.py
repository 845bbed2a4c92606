"""What must not change a bit of the TileLang kernels, and their errors: every family, page size and hostile batch.

`against_fp64` reruns each batch and lays it anew with other fills and page ids; `twin` compares the libraries built ahead of
time with the kernels that TileLang compiles here.
"""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from tilelang_cases import BATCHES, Laid, exact, lay
from timed import absent
from torch import Tensor

from oracle.kernels import tilelang_prefill
from oracle.kernels.tilelang_families import FAMILIES, PAGE_SIZES, Family

Facts = dict[str, Any]

RERUNS = 400


def everything() -> Iterator[tuple[str, Family, int, Laid]]:
    """Every family, page size and batch."""
    for family in FAMILIES.values():
        for page in PAGE_SIZES:
            for batch in BATCHES:
                yield f"{family.name} page {page} {batch.name}", family, page, lay(batch, family, page)


def answer(laid: Laid, family: Family) -> tuple[Tensor, Tensor]:
    """out and lse of the family's kernel."""
    return laid.run(getattr(tilelang_prefill, family.name))


def same(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> bool:
    """Whether two answers have the same bits: NaN equals itself."""
    return all(torch.equal(a.view(t), b.view(t)) for a, b, t in zip(one, two, (torch.int16, torch.int32), strict=True))


def against_fp64() -> Facts | str:
    """Errors against fp64 of every batch, and whether nothing past the plan, and no rerun, changed a bit."""
    if why := absent("tilelang"):
        return why
    found = {}
    for name, family, page, laid in everything():
        got, (out, lse) = answer(laid, family), exact(laid)
        error, rounding = (got[0].double() - out).abs(), (out.bfloat16().double() - out).abs()
        gap, empty = (got[1].double() - lse).abs()[lse > -math.inf], lse == -math.inf
        others = [answer(lay(laid.batch, family, page, junk=math.inf, salt=salt), family) for salt in (1, 2)]
        found[name] = {
            "max_error": float(f"{float(error.max()) if error.numel() else 0.0:.3g}"),
            "mean_error": float(f"{float(error.mean()) if error.numel() else 0.0:.3g}"),
            "mean_error_of_rounding": float(f"{float(rounding.mean()) if rounding.numel() else 0.0:.3g}"),
            "max_lse_error": float(f"{float(gap.max()) if gap.numel() else 0.0:.3g}"),
            "finite": bool(got[0].isfinite().all()),
            "empty_rows_right": bool((got[1][empty] == -math.inf).all() and (got[0][empty] == 0).all()),
            "reruns_same": all(same(got, answer(laid, family)) for _ in range(RERUNS)),
            "other_fills_and_pages_same": all(same(got, other) for other in others),
        }
        if not all(v for v in found[name].values() if isinstance(v, bool)):
            print(name, found[name], flush=True)
    return {"reruns": RERUNS, "batches": found}


def twin() -> Facts | str:
    """Whether the libraries and TileLang's own kernels, compiled here, give the same bits, and what compiling took."""
    if not importlib.util.find_spec("tilelang"):
        return "TileLang is not installed"
    ahead = {name: answer(laid, family) for name, family, _, laid in everything()}
    folder = os.environ.pop(tilelang_prefill.FOLDER)
    took = {}
    for family in FAMILIES.values():
        for page in PAGE_SIZES:
            begin = time.perf_counter()
            tilelang_prefill.compiled(family, page)
            took[f"{family.name} page {page}"] = round(time.perf_counter() - begin, 1)
            print(took, flush=True)
    found = {name: same(ahead[name], answer(laid, family)) for name, family, _, laid in everything()}
    os.environ[tilelang_prefill.FOLDER] = folder
    return {
        "all_same": all(found.values()),
        "differ": [n for n, s in found.items() if not s],
        "batches": len(found),
        "compile_s": took,
    }
