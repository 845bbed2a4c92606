"""What a first call costs: the first and the second call of a kernel at lengths that it has not seen, in a new process.

`python3 ci/gpu/first_calls.py KERNEL...` is that process and prints JSON; a KERNEL is a module's and a function's name.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from typing import Any

from pairs import first_call_ms, problem
from timed import GLOBAL, LLAMA, SLIDING, absent

Facts = dict[str, Any]

LENGTHS = ((8192, 0), (8191, 0), (1000, 3000), (1, 4095))  # new rows, context
SPLIT = "triton_split:split_tuned"
TILELANG = ("tilelang_prefill:hd512", "tilelang_prefill:hd256", "tilelang_prefill:hd128")
SHAPES = dict(zip((SPLIT, *TILELANG), (GLOBAL, GLOBAL, replace(SLIDING, left=-1), LLAMA), strict=True))


def found() -> Facts:
    """Milliseconds of first and second calls: Triton compiling, Triton's cache warm, and TileLang's libraries."""
    with tempfile.TemporaryDirectory() as cache:
        facts = {
            f"split_tuned, {what}": _apart(SPLIT, TRITON_CACHE_DIR=cache)["split_tuned"]
            for what in ("nothing compiled", "compiled by an earlier process")
        }
    if why := absent("tilelang"):
        return facts | {"tilelang": why}
    return facts | {f"tilelang {name}": calls for name, calls in _apart(*TILELANG).items()}


def _apart(*kernels: str, **environment: str) -> Facts:
    """What a process of their own prints of these kernels."""
    command = [sys.executable, __file__, *kernels]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    if done.returncode:
        raise RuntimeError(f"ci/gpu/first_calls.py {' '.join(kernels)}: {done.stderr[-2000:]}")
    facts: Facts = json.loads(done.stdout.splitlines()[-1])
    return facts


def _calls(kernel: str) -> Facts:
    """First and second calls of one kernel; CUDA is up and the first problem laid before the clock starts."""
    module, name = kernel.split(":")
    function = getattr(importlib.import_module(f"oracle.kernels.{module}"), name)
    facts: Facts = {}
    for rows, context in LENGTHS:
        call = partial(problem(replace(SHAPES[kernel], rows=rows, context=context)).call, function)
        facts[f"{rows} rows after {context}"] = [round(first_call_ms(call), 2) for _ in range(2)]
    return facts


if __name__ == "__main__":
    print(json.dumps({name.split(":")[1]: _calls(name) for name in sys.argv[1:]}))
