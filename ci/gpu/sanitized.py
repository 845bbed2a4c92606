"""compute-sanitizer on the kernels: memcheck on all, and racecheck (shared memory only) on Triton's.

    PYTHONPATH=. ATTENTION_ORACLE_LIBRARIES=DIR python3 ci/gpu/sanitized.py OUT [TOOL KERNEL]

writes OUT/sanitized.json.  `python3 ci/gpu/sanitized.py --calls KERNEL` is what runs under it: one small batch after the other.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from pairs import Shape, problem, versions, write
from tilelang_cases import BATCHES, lay

from oracle.isolation.sanitizer import faults, sanitizer
from oracle.kernels.tilelang_families import FAMILIES, PAGE_SIZES

Facts = dict[str, Any]

DIMS = ((512, 8), (256, 2), (128, 4), (64, 4))  # head dim, group
ASKED = (
    *(("memcheck", kernel) for kernel in ("tilelang", "split_64", "split_tuned", "prefill_16", "shared_kv")),
    *(("racecheck", kernel) for kernel in ("split_64", "split_tuned", "prefill_16", "shared_kv")),
)


def calls(kernel: str) -> int:
    """The kernel is called on small batches of every family that it takes; how many calls that were."""
    return (_tilelang if kernel == "tilelang" else _triton)(kernel)


def _tilelang(kernel: str) -> int:
    from oracle.kernels import tilelang_prefill

    batches = [b for b in BATCHES if b.name in ("mixed", "both sides")]
    for family in FAMILIES.values():
        for page in PAGE_SIZES:
            for batch in batches:
                lay(batch, family, page).run(getattr(tilelang_prefill, family.name))
    torch.cuda.synchronize()
    return len(FAMILIES) * len(PAGE_SIZES) * len(batches)


def _triton(kernel: str) -> int:
    from timed import ready

    from oracle.kernels import triton_prefill, triton_split

    forms = ["rebuilt_bf16", "rebuilt_fp32", "folded"] if kernel == "shared_kv" else [""]
    done = 0
    for dim, group in DIMS[: 2 if kernel == "shared_kv" else None]:
        for page in (16, 64):
            for form in forms:
                asked = problem(Shape(q_heads=group, kv_heads=1, dim=dim, rows=70, context=200, page=page))
                if form:
                    ready(f"shared_kv {form}", asked)[0]()
                else:
                    asked.call(getattr(triton_prefill if kernel == "prefill_16" else triton_split, kernel))
                torch.cuda.synchronize()
                done += 1
    return done


def main() -> None:
    """Runs each tool on each kernel, all at the same time, and writes the report when each has ended."""
    out, tool = Path(sys.argv[1]), sanitizer()
    out.mkdir(parents=True, exist_ok=True)
    report: Facts = {"versions": versions("python3 ci/gpu/sanitized.py OUT"), "found": {}}
    if tool is None:
        raise SystemExit("ci/gpu/sanitized.py: no compute-sanitizer here")
    asked = [pair for pair in ASKED if not sys.argv[2:] or list(pair) == sys.argv[2:4]]
    running = {pair: _start(tool, *pair) for pair in asked}
    for pair, process in running.items():
        said = process.communicate()[0]
        errors = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", said)
        counted = re.findall(r"calls: (\d+)", said)
        report["found"][" ".join(pair)] = {
            "calls": int(counted[0]) if counted else 0,
            "summary": errors[-1] if errors else said[-800:],
            "faults": [fault for fault in faults(said) if "SUMMARY" not in fault][:5],
        }
        print(pair, report["found"][" ".join(pair)], flush=True)
        write(report, out / "sanitized.json")


def _start(tool: str, kind: str, kernel: str) -> subprocess.Popen[str]:
    command = (
        [tool, "--tool", kind, "--report-api-errors", "no", "--print-limit", "20"]
        if kind == "memcheck"
        else [tool, "--tool", kind]
    )
    command += [sys.executable, __file__, "--calls", kernel]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


if __name__ == "__main__":
    if sys.argv[1] == "--calls":
        print("calls:", calls(sys.argv[2]))
    else:
        main()
