"""How much of the copy bandwidth the decode kernel reads a cache with, on a GPU of compute capability 9.0.

    PYTHONPATH=. python3 ci/gpu/decode.py OUT [PART...]

writes OUT/decode.json.  Parts: `table` (rates beside those of a copy in the same process, errors, and whether a sequence has
the same bits alone) and `tilings` (other tilings at the shapes that have a bar); without a PART, `table`.  About a minute each.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pairs import block_ms, versions, write
from torch import Tensor

from oracle.kernels import triton_decode
from oracle.kernels.triton_decode import Tiling, decode
from oracle.kernels.triton_prefill import prefill_16
from oracle.kernels.triton_split import split_tuned

Facts = dict[str, Any]

BLOCK_S = 0.1
PAIRS = 5
COPIED = 2**31  # bytes of the tensor that is copied
BAR = 0.7  # of the bytes that a copy reads and writes in the same time
PROTOCOL = (
    f"{PAIRS} times: {BLOCK_S} s of copies of {COPIED >> 30} GiB, {BLOCK_S} s of the kernel; of each block the median call by "
    "CUDA events, the first quarter left out; ratio = the bytes of live K and V over the kernel's time, over the bytes that a "
    "copy reads and writes over its time: the median of the pairs"
)
DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`batch` sequences of `keys` keys, the last `tokens` of which are new."""

    q_heads: int
    kv_heads: int
    dim: int
    batch: int = 32
    keys: int = 16384
    tokens: int = 1
    cache: str = "bf16"
    page: int = 64

    @property
    def bytes(self) -> float:
        """Of live K and V."""
        return 2.0 * self.batch * self.keys * self.kv_heads * self.dim * DTYPES[self.cache].itemsize


GLOBAL = Shape(q_heads=32, kv_heads=4, dim=512)  # Gemma 4's global layers
LLAMA = Shape(q_heads=32, kv_heads=8, dim=128)
SHAPES: dict[Shape, float | None] = {  # shape -> the least ratio asked for, where one is
    **{replace(shape, tokens=tokens): BAR for shape in (GLOBAL, LLAMA) for tokens in (1, 5, 8)},
    **{replace(shape, cache="e4m3", tokens=tokens): BAR for shape in (GLOBAL, LLAMA) for tokens in (1, 5)},
    **{replace(shape, page=16): None for shape in (GLOBAL, LLAMA)},
    **{replace(shape, batch=1, keys=131072): None for shape in (GLOBAL, LLAMA)},
}


TILINGS_S = 55.0
CANDIDATES = {  # shape -> rows, keys, parts, warps and stages of tilings beside the shipped one
    replace(GLOBAL, tokens=5): [(32, 32, 1, 8, 3), (64, 32, 2, 4, 2), (64, 16, 2, 4, 4)],
    replace(GLOBAL, tokens=5, cache="e4m3"): [(64, 32, 2, 4, 3), (16, 64, 1, 8, 3)],
    replace(GLOBAL, cache="e4m3"): [(16, 32, 1, 4, 4), (16, 64, 1, 8, 4), (16, 64, 1, 8, 3)],
    replace(LLAMA, tokens=5, cache="e4m3"): [(32, 64, 1, 4, 4), (32, 64, 1, 8, 3)],
    replace(LLAMA, cache="e4m3"): [(16, 64, 1, 4, 4)],
    replace(LLAMA, tokens=5): [(64, 64, 1, 4, 2), (32, 64, 1, 4, 2)],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A shape with N(0, 1) inputs; pages in random order, one of nobody full of NaN."""

    shape: Shape
    q: Tensor  # (batch * tokens, q_heads, dim)
    k_cache: Tensor
    v_cache: Tensor
    plan: dict[str, Any] = field(default_factory=dict)  # the contract's keyword arguments

    def call(self, kernel: Any, **options: Any) -> Any:
        """The kernel's answer to it."""
        return kernel(self.q, self.k_cache, self.v_cache, **self.plan, **options)

    def alone(self, seq: int) -> Problem:
        """One sequence of it."""
        t = self.shape.tokens
        plan = self.plan | {
            "cu_seqlens_q": self.plan["cu_seqlens_q"][:2],
            "seqused_k": self.plan["seqused_k"][seq : seq + 1],
            "page_table": self.plan["page_table"][seq : seq + 1],
        }
        return replace(self, q=self.q[seq * t : (seq + 1) * t], plan=plan)

    def exact(self, seq: int) -> tuple[Tensor, Tensor]:
        """out (tokens, q_heads, dim) and LSE (tokens, q_heads) of a sequence, fp64."""
        s, t = self.shape, self.shape.tokens
        pages = self.plan["page_table"][seq].long()
        k, v = (x[pages].flatten(0, 1).double() for x in (self.k_cache, self.v_cache))
        outs, lses = [], []
        for head in range(s.q_heads):
            kv = head // (s.q_heads // s.kv_heads)
            logits = self.q[seq * t : (seq + 1) * t, head].double() @ k[:, kv].T * self.plan["softmax_scale"]
            if s.cache == "e4m3":
                logits = logits * float(self.plan["k_scale"][kv])
            pos = torch.arange(s.keys - t, s.keys, device="cuda")[:, None]
            logits = logits.masked_fill(torch.arange(s.keys, device="cuda") > pos, -math.inf)
            out = logits.softmax(1) @ v[:, kv]
            outs.append(out * float(self.plan["v_scale"][kv]) if s.cache == "e4m3" else out)
            lses.append(logits.logsumexp(1))
        return torch.stack(outs, 1), torch.stack(lses, 1)


def problem(shape: Shape) -> Problem:
    """The problem of a shape; the same one every time on the same GPU."""
    random = torch.Generator("cuda").manual_seed(0)
    pages = shape.keys // shape.page
    pool = torch.Size((shape.batch * pages + 1, shape.page, shape.kv_heads, shape.dim))
    order = torch.randperm(pool[0], device="cuda", generator=random)
    caches = []
    for _ in range(2):
        cache = torch.empty(pool, device="cuda", dtype=DTYPES[shape.cache])
        for part in torch.split(cache, 4096):  # normal numbers of a whole pool would take twice its memory
            part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16, generator=random))
        cache[order[-1]] = torch.full(pool[1:], math.nan, device="cuda").to(cache.dtype)
        caches.append(cache)
    scales = {}
    if shape.cache == "e4m3":
        scales = {name: torch.linspace(0.5, 2.0, shape.kv_heads, device="cuda") for name in ("k_scale", "v_scale")}
    rows = shape.batch * shape.tokens
    return Problem(
        shape=shape,
        q=torch.randn(rows, shape.q_heads, shape.dim, device="cuda", dtype=torch.bfloat16, generator=random),
        k_cache=caches[0],
        v_cache=caches[1],
        plan={
            "cu_seqlens_q": torch.arange(0, rows + 1, shape.tokens, device="cuda", dtype=torch.int32),
            "seqused_k": torch.full((shape.batch,), shape.keys, device="cuda", dtype=torch.int32),
            "page_table": order[:-1].view(shape.batch, pages).int(),
            "softmax_scale": shape.dim**-0.5,
            **scales,
        },
    )


def beside_a_copy(call: Any, moved: float) -> Facts:
    """Rates of a call that reads `moved` bytes, and of copies in turn."""
    source = torch.zeros(COPIED, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    works = ((lambda: target.copy_(source), 2.0 * COPIED), (call, moved))
    counts = [max(4, math.ceil(1000 * BLOCK_S / block_ms(work, 4))) for work, _ in works]
    times = [[block_ms(work, count) for (work, _), count in zip(works, counts, strict=True)] for _ in range(PAIRS)]
    ratios = [moved / own / (2.0 * COPIED / copy) for copy, own in times]
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_least": round(min(ratios), 4),
        "ratio_largest": round(max(ratios), 4),
        "ms": round(statistics.median(own for _, own in times), 4),
        "tb_s": round(moved / statistics.median(own for _, own in times) / 1e9, 3),
        "copy_tb_s": round(2.0 * COPIED / statistics.median(copy for copy, _ in times) / 1e9, 3),
    }


def table() -> Iterator[list[Facts]]:
    """The facts of every shape so far, after each one."""
    found: list[Facts] = []
    for shape, bar in SHAPES.items():
        asked = problem(shape)
        out, lse = asked.call(decode, return_lse=True)
        seq, t = shape.batch - 1, shape.tokens
        exact, exact_lse = asked.exact(seq)
        own = slice(seq * t, (seq + 1) * t)
        alone, alone_lse = asked.alone(seq).call(decode, return_lse=True)
        facts: Facts = {"shape": asdict(shape), "bar": bar, **beside_a_copy(partial(asked.call, decode), shape.bytes)}
        facts |= {
            "mean_error": float(f"{float((out[own].double() - exact).abs().mean()):.4g}"),
            "mean_error_of_rounding": float(f"{float((exact.bfloat16().double() - exact).abs().mean()):.4g}"),
            "max_lse_error": float(f"{float((lse[own].double() - exact_lse).abs().max()):.4g}"),
            "all_finite": bool(out.isfinite().all() and lse.isfinite().all()),
            "same_bits_alone": torch.equal(alone, out[own]) and torch.equal(alone_lse, lse[own]),
        }
        for name, kernel in (("split_tuned_ms", split_tuned), ("prefill_16_ms", prefill_16)) if bar and t == 1 else ():
            asked.call(kernel)
            facts[name] = round(block_ms(partial(asked.call, kernel), 4), 4)
        found.append(facts)
        print({k: v for k, v in facts.items() if not isinstance(v, list)}, flush=True)
        yield found


def tilings() -> Iterator[list[Facts]]:
    """What else was thought of for the shapes with a bar, most promising first: none is begun after TILINGS_S seconds."""
    found: list[Facts] = []
    shipped = triton_decode.tiling
    begin = time.perf_counter()
    try:
        for shape, others in CANDIDATES.items():
            asked = problem(shape)
            few = shape.tokens * shape.q_heads // shape.kv_heads <= triton_decode.FEW
            for one in (Tiling(rows=r, keys=k, parts=p, warps=w, stages=s) for r, k, p, w, s in others):
                if time.perf_counter() - begin > TILINGS_S:
                    return
                triton_decode.tiling = lambda size, words, group, kind, one=one, few=few: (  # type: ignore[assignment, misc]
                    one if kind == few else shipped(size, words, group, kind)
                )
                facts: Facts = {"shape": asdict(shape), "tiling": asdict(one)}
                try:
                    asked.call(decode)
                    facts |= beside_a_copy(partial(asked.call, decode), shape.bytes)
                except Exception as error:  # what does not fit is a finding here
                    facts["refused"] = f"{type(error).__name__}: {str(error)[:200]}"
                found.append(facts)
                print(facts, flush=True)
                yield found
    finally:
        triton_decode.tiling = shipped


def main() -> None:
    """Writes the report as it grows, so that a part that fails leaves those before it."""
    out, names = Path(sys.argv[1]) / "decode.json", sys.argv[2:] or ["table"]
    out.parent.mkdir(parents=True, exist_ok=True)
    report: Facts = {"versions": versions(" ".join(["python3 ci/gpu/decode.py OUT", *sys.argv[2:]])) | {"protocol": PROTOCOL}}
    for name in names:
        begin = time.perf_counter()
        for facts in {"table": table, "tilings": tilings}[name]():
            report[name] = facts
            write(report, out)
        print(name, round(time.perf_counter() - begin, 1), "s", flush=True)


if __name__ == "__main__":
    main()
