"""What the decode and 8-bit kernels become on compute capability 9.0, compiled on any machine, with or without a GPU.

    TRITON_INTERPRET=0 PYTHONPATH=.:ci/gpu python3 ci/gpu/compiled.py OUT [NAME...]

writes OUT/compiled.json: of each kernel, head dim and cache its registers and stack bytes of a thread (a stack is spilled
registers), bytes of shared memory, and how often machine code has each of a few instructions.  NAME is the first word of a
row, decode, fp8, fp8_hadamard, int8 or int8_v8; without one, all: three minutes on one core.  Needs Triton, whose ptxas and
cuobjdump it uses, and no driver: what it launches is compiled and goes no further.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from pairs import write
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from oracle.contract import Call
from oracle.kernels import triton_decode, triton_eight_bit
from oracle.kernels.triton_host import Launch, launch_for
from oracle.kernels.triton_quantise import quantised

Facts = dict[str, Any]

SHARED = 227 * 2**10  # bytes of shared memory that a program can have
SHAPES = {512: (32, 4), 256: (32, 16), 128: (32, 8), 64: (32, 8)}  # head dim -> query heads, kv heads
INSTRUCTIONS = ("HGMMA", "QGMMA", "IGMMA", "HMMA", "UTMALDG", "LDGSTS", "LDL", "STL")


class Nobody:
    """A driver of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def call_of(dim: int, cache: torch.dtype, page: int) -> Call:
    """A call of the shape, of zeros: 32 sequences of up to 16k keys."""
    q_heads, kv_heads = SHAPES[dim]
    pool = torch.zeros(2, page, kv_heads, dim, dtype=cache)
    return Call(
        q=torch.zeros(64, q_heads, dim, dtype=torch.bfloat16),
        k_cache=pool,
        v_cache=pool.clone(),
        cu_seqlens_q=torch.zeros(33, dtype=torch.int32),
        seqused_k=torch.zeros(32, dtype=torch.int32),
        page_table=torch.zeros(32, 16384 // page, dtype=torch.int32),
        softmax_scale=1.0,
    )


def rows() -> Iterator[tuple[str, Any, Call]]:
    """Name, what to launch, and for which call."""
    for dim in SHAPES:
        for cache, page in ((torch.bfloat16, 64), (torch.bfloat16, 16), (torch.float8_e4m3fn, 64)):
            what = f"decode {dim} {'bf16' if cache == torch.bfloat16 else 'e4m3'} page {page}"
            yield what, triton_decode._start, call_of(dim, cache, page)
        for name in ("fp8", "fp8_hadamard", "int8", "int8_v8"):
            scheme = triton_eight_bit.HADAMARD if name == "fp8_hadamard" else getattr(triton_eight_bit, name.upper())
            whole: Callable[[Launch], Any] = partial(triton_eight_bit._start, scheme, None)
            codes: Callable[[Launch], Any] = partial(quantised, scheme=scheme)  # of fp8_hadamard: the attention is fp8's
            yield f"{name} {dim}", codes if scheme.rotated else whole, call_of(dim, torch.bfloat16, 64)


def figures(compiled: Any) -> Facts:
    """What a compiled kernel needs and has."""
    tools = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        used, code = (
            subprocess.run([tools / "cuobjdump", option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    registers, stack = (int(re.search(rf"{name}:(\d+)", used)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    counts = {name: len(re.findall(rf"\b{name}\b", code)) for name in INSTRUCTIONS}
    shared = compiled.metadata.shared
    return {"registers": registers, "stack": stack, "shared": shared, "fits": shared <= SHARED} | {
        name: count for name, count in counts.items() if count
    }


def main() -> None:
    """Writes the report as it grows."""
    out, names = Path(sys.argv[1]) / "compiled.json", sys.argv[2:]
    out.parent.mkdir(parents=True, exist_ok=True)
    report: Facts = {"versions": {"triton": triton.__version__, "command": "ci/gpu/compiled.py OUT"}, "found": {}}
    launched: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launched.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    JITFunction.run = compile_only
    driver.set_active(Nobody())
    for what, start, call in rows():
        if names and what.split()[0] not in names:
            continue
        begin = time.perf_counter()
        launched.clear()
        answer: Tensor = torch.zeros_like(call.q)
        launch: Launch = launch_for(call, answer, torch.zeros(call.q.shape[:2]))
        start(launch)
        for name, compiled in launched:
            row = f"{what} {name}"
            while row in report["found"]:
                row += "'"  # the second launch of the decode kernel: sequences of more rows
            report["found"][row] = figures(compiled)
            print(row, report["found"][row], flush=True)
        print(what, round(time.perf_counter() - begin, 1), "s", flush=True)
        write(report, out)


if __name__ == "__main__":
    main()
