"""The fp8 TileLang kernel in several cuts: which are right, and how fast beside the bf16 TileLang kernel.

    PYTHONPATH=. ATTENTION_ORACLE_LIBRARIES=DIR python3 ci/gpu/fp8_tilelang.py OUT [FOLDER]

writes OUT/fp8_tilelang.json.  FOLDER has libraries of CUTS, built on any machine with TileLang and nvcc by

    PYTHONPATH=. python3 ci/gpu/fp8_tilelang.py --build FOLDER

without FOLDER, the shipped cut alone is checked and timed, from DIR.  Each cut is checked in a process of its own, so that one
that hangs costs its minute and nothing else: ragged, windowed and empty cases against `eight_bit:fp8_block` on the CPU, which
has the same codes, so that answers differ by sums alone: by what those move over an edge between two numbers of e4m3.  Those
that pass are timed after 16,384 keys; the fastest then at three contexts, its codes made before the call and within it.  A
minute and a half at most.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracle.kernels import ahead_of_time
from oracle.kernels.tilelang_families import FP8_FAMILIES, KEYS, Fp8Family

Facts = dict[str, Any]

SHIPPED = FP8_FAMILIES["fp8_hd512"]
CUTS: dict[str, Fp8Family] = {
    name: replace(
        SHIPPED,
        name=name,
        k_stages=k_stages,
        v_stages=v_stages,
        chunk=chunk,
        products=products,
        held=held,
        ahead=ahead,
        registers=registers,
    )
    for name, k_stages, v_stages, chunk, products, held, ahead, registers in (
        ("base", 3, 2, 64, 1, False, True, (24, 120, 184)),
        ("held64", 3, 2, 64, 1, True, True, (24, 120, 184)),
        ("held32x2", 3, 2, 32, 2, True, True, (24, 120, 184)),
        ("held64_k2v2", 2, 2, 64, 1, True, True, (24, 120, 184)),
        ("held32x2_k2v2", 2, 2, 32, 2, True, True, (24, 120, 184)),
        ("single128", 2, 2, 128, 1, False, False, (24, 72, 208)),
    )
}
CONTEXTS = (0, 16384, 57344)
BAR = 1.2  # times the rate of the bf16 kernel, after 16,384 keys
SHARE = 0.5  # of the error that 8 bits cost: what answers to the same codes may differ by, in root mean squares
LSE_APART = 0.04  # q.k in FP22 loses at most 0.033 of its largest product, which is about 1 here
CHECK_S = 60  # seconds that the check of a cut may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a cut is checked on: sequences of `rows` new tokens that end with the last of `keys`."""

    name: str
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    page: int = 64
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    spare: int = 0  # rows past the plan


CASES = (
    Case(name="ragged", rows=(1, 7, 64, 130, 203), keys=(1, 300, 64, 513, 1000), spare=5),
    Case(name="long", rows=(9,), keys=(6001,)),
    Case(name="window", rows=(100, 3, 250), keys=(700, 1000, 250), page=16, window=(100, 0)),
    Case(name="two-sided", rows=(65, 190), keys=(129, 640), causal=False, window=(37, 20)),
    Case(name="not causal", rows=(17, 70), keys=(65, 200), causal=False),
    Case(name="empty", rows=(40, 5, 9), keys=(13, 0, 70), page=16, spare=3),
)


def inputs(case: Case) -> tuple[tuple[Tensor, Tensor, Tensor], Facts]:
    """q and the caches of a case in bf16 on the CPU, pages shuffled, those of nobody full of NaN; and the rest of the call."""
    random = torch.Generator().manual_seed(len(case.name))
    heads, kv_heads, dim = 2 * SHIPPED.group, 2, SHIPPED.head_dim
    pages = [-(-keys // case.page) for keys in case.keys]
    order = torch.randperm(sum(pages) + 3, generator=random)
    table = torch.full((len(pages) + 1, max(pages) + 1), -(10**7), dtype=torch.int32)  # past the live sequences: nonsense
    pools = [torch.full((len(order), case.page, kv_heads, dim), math.nan) for _ in range(2)]
    first = 0
    for seq, (count, keys) in enumerate(zip(pages, case.keys, strict=True)):
        ids = order[first : first + count]
        table[seq, :count] = ids.int()
        first += count
        for pool in pools:
            slots = pool[ids].flatten(0, 1)
            slots[:keys] = torch.randn(keys, kv_heads, dim, generator=random) * (1 + torch.rand(keys, 1, 1, generator=random))
            pool[ids] = slots.view(count, case.page, kv_heads, dim)
    table[: len(pages)] = torch.where(table[: len(pages)] < 0, 0, table[: len(pages)])
    starts = [0, *torch.tensor(case.rows).cumsum(0).tolist(), -(10**7)]
    plan = {
        "cu_seqlens_q": torch.tensor(starts, dtype=torch.int32),
        "seqused_k": torch.tensor([*case.keys, 10**7], dtype=torch.int32),
        "page_table": table,
        "softmax_scale": dim**-0.5,
        "causal": case.causal,
        "window_size": case.window,
        "num_seqs": len(pages),
    }
    q = torch.randn(sum(case.rows) + case.spare, heads, dim, generator=random)
    return (q.bfloat16(), pools[0].bfloat16(), pools[1].bfloat16()), plan


def exact(case: Case, tensors: tuple[Tensor, Tensor, Tensor], plan: Facts) -> Tensor:
    """The answer in float64, (live rows, heads, dim); 0 where a row sees nothing."""
    q, k_cache, v_cache = tensors
    left, right = (10**6 if limit < 0 else limit for limit in case.window)
    right = 0 if case.causal else right
    found, start = [], 0
    for seq, (rows, keys) in enumerate(zip(case.rows, case.keys, strict=True)):
        ids = plan["page_table"][seq, : -(-keys // case.page)].long()
        k, v = (
            cache[ids].flatten(0, 1)[:keys].double().repeat_interleave(SHIPPED.group, 1).transpose(0, 1)
            for cache in (k_cache, v_cache)
        )
        ahead = torch.arange(keys)[None, :] - (keys - rows + torch.arange(rows))[:, None]
        logits = q[start : start + rows].double().transpose(0, 1) @ k.transpose(1, 2) * plan["softmax_scale"]
        logits = logits.masked_fill((ahead > right) | (ahead < -left), -math.inf)
        found.append((torch.softmax(logits, -1).nan_to_num(0.0) @ v).transpose(0, 1))
        start += rows
    return torch.cat(found)


def check(folder: Path, family: Fp8Family) -> Facts:
    """How far the answers of a cut are from the CPU's, by case; `right` where all are as near as they should be."""
    from oracle.contract import Call
    from oracle.kernels.eight_bit import kernel
    from oracle.kernels.tilelang_fp8 import FP8, attend
    from oracle.kernels.triton_host import launch_for
    from oracle.kernels.triton_quantise import quantised

    torch.set_num_threads(2)
    library = ahead_of_time.load(folder, family, KEYS)
    library.prepare()
    found: Facts = {"right": True}
    for case in CASES:
        tensors, plan = inputs(case)
        live = sum(case.rows)
        want, want_lse = kernel("fp8-block")(*tensors, **plan, return_lse=True)
        cost = float((want[:live].double() - exact(case, tensors, plan)).square().mean().sqrt())
        there: Facts = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in plan.items()}
        q, k_cache, v_cache = (x.cuda() for x in tensors)
        call = Call(q=q, k_cache=k_cache, v_cache=v_cache, **there)
        answers = []
        for _ in range(2):
            out, lse = torch.full_like(call.q, math.nan), torch.full(call.q.shape[:2], math.nan, device="cuda")
            attend(family, call, quantised(launch_for(call, out, lse), FP8), out, lse, library)
            answers.append((out.cpu(), lse.cpu()))
        (out, lse), again = answers
        empty = want_lse[:live] == -math.inf
        apart = (lse[:live] - want_lse[:live])[~empty].abs()
        facts = {
            "share": round(float((out[:live].double() - want[:live].double()).square().mean().sqrt()) / cost, 4),
            "most": float((out[:live].double() - want[:live].double()).abs().max()),
            "lse": float(apart.max()),
            "finite": bool(torch.isfinite(out[:live]).all()),
            "empty": bool((lse[:live][empty] == -math.inf).all() and (out[:live][empty] == 0).all()),
            "past the plan": bool(torch.isnan(out[live:]).all() and torch.isnan(lse[live:]).all()),
            "same bits": all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip((out, lse), again, strict=True)),
        }
        whole = all(facts[name] for name in ("finite", "empty", "past the plan", "same bits"))
        found[case.name] = facts
        found["right"] &= whole and facts["share"] <= SHARE and facts["lse"] <= LSE_APART
    return found


def checked(folder: Path, families: dict[str, Fp8Family]) -> Facts:
    """`check` of every cut, each in its own process, all at once."""
    command = [sys.executable, __file__, "--check", str(folder)]
    running = {
        name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for name in families
    }
    found: Facts = {}
    for name, process in running.items():
        try:
            said, wrong = process.communicate(timeout=CHECK_S)
            found[name] = (
                json.loads(said.splitlines()[-1]) if process.returncode == 0 else {"right": False, "error": wrong[-800:]}
            )
        except subprocess.TimeoutExpired:
            process.kill()
            found[name] = {"right": False, "error": f"no answer within {CHECK_S} s"}
        print(name, json.dumps(found[name]), flush=True)
    return found


def timed(folder: Path, families: dict[str, Fp8Family], out: Path, report: Facts) -> None:
    """Adds to the report the rates of the cuts after 16,384 keys, and of the fastest at all contexts."""
    from pairs import Problem, problem, sustained
    from timed import GLOBAL, absent, ready

    from oracle.contract import Call
    from oracle.kernels.tilelang_fp8 import FP8, attend
    from oracle.kernels.triton_host import launch_for
    from oracle.kernels.triton_quantise import quantised

    libraries = {name: ahead_of_time.load(folder, family, KEYS) for name, family in families.items()}
    for library in libraries.values():
        library.prepare()

    def quantising(run: Callable[..., Any], launch: Any) -> Any:
        return run(codes=quantised(launch, FP8))

    def kernels(asked: Problem, names: list[str], whole: bool) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Tensor]]]:
        if not absent("tilelang"):
            call, _ = ready("tilelang", asked)
            yield "tilelang bf16", call, call
        answer, lse = torch.full_like(asked.q, math.nan), torch.empty(asked.q.shape[:2], device="cuda")
        request = Call(q=asked.q, k_cache=asked.k_cache, v_cache=asked.v_cache, **asked.plan)
        launch = launch_for(request, answer, lse)
        codes = quantised(launch, FP8)
        for name in names:
            run = partial(attend, families[name], request, out=answer, lse=lse, kernel=libraries[name])
            yield f"{name}, codes ready", partial(run, codes=codes), lambda: answer
            if whole:
                yield f"{name}, quantising timed", partial(quantising, run, launch), lambda: answer

    def rates(context: int, names: list[str], pairs: int, whole: bool) -> Iterator[Facts]:
        asked = problem(replace(GLOBAL, context=context))
        bf16 = math.nan
        for name, call, answer in kernels(asked, names, whole):
            call()
            facts: Facts = {"kernel": name, "context": context}
            facts |= {key: float(f"{x:.4g}") for key, x in asked.errors(answer()).items()}
            facts |= sustained(call, asked.shape.flops, pairs=pairs).facts()
            bf16 = facts["ratio"] if name == "tilelang bf16" else bf16
            facts["over_tilelang"] = round(facts["ratio"] / bf16, 3) if bf16 == bf16 else None
            facts["bar"] = BAR if context == 16384 and name != "tilelang bf16" else None
            print(json.dumps({k: v for k, v in facts.items() if not isinstance(v, list)}), flush=True)
            yield facts

    from pairs import write

    first = list(rates(16384, list(families), 1, False))
    report["cuts"] = first
    write(report, out)
    best = max((f for f in first if f["kernel"] != "tilelang bf16"), key=lambda f: f["ratio"])["kernel"].partition(",")[0]
    report["best"] = best
    report["pairs"] = []
    for context in CONTEXTS:
        for facts in rates(context, [best], 2, True):
            report["pairs"].append(facts)
            write(report, out)


def main() -> None:
    """See the module's docstring."""
    match sys.argv[1:]:
        case ["--build", where, *names]:
            for name in names or CUTS:
                print(ahead_of_time.build(CUTS[name], KEYS, Path(where)), flush=True)
        case ["--check", where, name]:
            print(json.dumps(check(Path(where), CUTS.get(name, SHIPPED))))
        case [out, *rest]:
            from pairs import versions, write

            folder = Path(rest[0] if rest else os.environ["ATTENTION_ORACLE_LIBRARIES"])
            wanted = CUTS if rest else {SHIPPED.name: SHIPPED}
            families = {name: f for name, f in wanted.items() if (folder / ahead_of_time.file_name(f, KEYS)).exists()}
            if not families:
                raise SystemExit(f"{folder}: got no library of {', '.join(wanted)}; build some with --build {folder}")
            path = Path(out) / "fp8_tilelang.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            report: Facts = {"versions": versions(" ".join(["python3 ci/gpu/fp8_tilelang.py OUT", *rest]))}
            report["checked"] = checked(folder, families)
            write(report, path)
            right = {name: family for name, family in families.items() if report["checked"][name]["right"]}
            if right:
                timed(folder, right, path, report)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
