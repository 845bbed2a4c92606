"""How far cuDNN, FlashInfer and our Triton kernels are from exact attention on the same inputs: paged causal prefill in bf16.

    PYTHONPATH=. python3 ci/gpu/field_errors.py OUT

writes OUT/field_errors.json, after each shape and class: for every kernel the root of the mean squared error over that of the
exact answer, beside the same of the exact answer rounded to bf16, and the ratio to `prefill_16`.  Asked is whether cuDNN's error
is 1.5 times Triton's, and FlashInfer's equal to it.  FlashInfer compiles a module at its first call of a head dim.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from pairs import Problem, Shape, described, problem, versions, write
from timed import flashinfer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from oracle.kernels.field import cudnn_paged
from oracle.kernels.triton_prefill import prefill_16, prefill_32
from oracle.kernels.triton_split import split_tuned

Facts = dict[str, Any]

SHAPES = (
    Shape(q_heads=32, kv_heads=8, dim=128, rows=2048, context=0, page=16),  # Llama 3's
    Shape(q_heads=32, kv_heads=8, dim=128, rows=2048, context=6144, page=16),
    Shape(q_heads=32, kv_heads=16, dim=256, rows=2048, context=0, page=16),  # Gemma 4's sliding layers, without the window
    Shape(q_heads=32, kv_heads=16, dim=256, rows=2048, context=6144, page=16),
    Shape(q_heads=32, kv_heads=4, dim=512, rows=2048, context=6144, page=16),  # Gemma 4's global layers
)
CLASSES = {"normal": 1.0, "large": 8.0}  # by the standard deviation of the logits
PACKAGES = ("nvidia-cudnn-frontend", "flashinfer-python", "nvidia-cudnn-cu13")


def torch_sdpa(asked: Problem, backend: SDPBackend) -> Tensor:
    """torch's SDPA over the keys as they are, without pages: a square call where there is no context."""
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (asked.q, asked.k, asked.v))
    square = asked.shape.context == 0
    mask: Any = None
    if not square:
        flash = backend is SDPBackend.FLASH_ATTENTION
        mask = causal_lower_right(q.shape[2], k.shape[2]) if flash else _seen(asked)[None, None]
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=square, scale=asked.shape.dim**-0.5, enable_gqa=True
        )
    return out[0].transpose(0, 1)


def _seen(asked: Problem) -> Tensor:
    """Which key each row sees: (rows, keys), bool."""
    s = asked.shape
    return torch.ones(s.rows, len(asked.k), dtype=torch.bool, device="cuda").tril(s.context)


KERNELS: dict[str, Callable[[Problem], Tensor]] = {
    "prefill_16": lambda asked: asked.call(prefill_16),
    "prefill_32": lambda asked: asked.call(prefill_32),
    "split_tuned": lambda asked: asked.call(split_tuned),
    "torch sdpa cudnn": partial(torch_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "torch sdpa flash": partial(torch_sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "cudnn frontend, paged": lambda asked: asked.call(cudnn_paged.paged),
    "flashinfer fa2, paged": lambda asked: flashinfer(asked)(),
}


def exact(asked: Problem, head: int) -> Tensor:
    """The answer of a query head in fp64: (rows, dim)."""
    s = asked.shape
    kv = head // (s.q_heads // s.kv_heads)
    logits = asked.q[:, head].double() @ asked.k[:, kv].double().T * s.dim**-0.5
    return torch.softmax(logits.masked_fill(~_seen(asked), -math.inf), 1) @ asked.v[:, kv].double()


def scaled(asked: Problem, deviation: float) -> Problem:
    """The same with a q whose logits have this standard deviation."""
    return replace(asked, q=asked.q * deviation)


def rms(error: Iterable[Tensor], answer: Iterable[Tensor]) -> float:
    """Root mean square of the errors over that of the exact answers, both by head in fp64; to four digits."""
    squares = [float(sum(x.square().sum() for x in by_head)) for by_head in (error, answer)]
    return float(f"{math.sqrt(squares[0] / squares[1]):.4g}")


def errors(asked: Problem) -> Facts:
    """Of every kernel on the problem, or why it gives no answer."""
    heads = range(0, asked.shape.q_heads, 4)
    truth = {head: exact(asked, head) for head in heads}
    found: Facts = {"rounding to bf16": rms((x.bfloat16().double() - x for x in truth.values()), truth.values())}
    for name, kernel in KERNELS.items():
        try:
            out = kernel(asked)
            torch.cuda.synchronize()
        except (RuntimeError, ImportError, ValueError, AssertionError) as e:
            found[name] = {"refused": f"{type(e).__name__}: {e}"[:200]}
            continue
        found[name] = {"rms": rms((out[:, head].double() - x for head, x in truth.items()), truth.values())}
    ours = found["prefill_16"]["rms"]
    for facts in found.values():
        if isinstance(facts, dict) and "rms" in facts:
            facts["of prefill_16"] = round(facts["rms"] / ours, 4)
    return found


def main(folder: Path) -> None:
    """Every shape, every class."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Facts] = []
    packages = {}
    for package in PACKAGES:
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "not installed"
    packages["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]  # torch's
    for shape in SHAPES:
        asked = problem(shape)
        for name, deviation in CLASSES.items():
            rows.append({"shape": described(shape), "inputs": name, **errors(scaled(asked, deviation))})
            print(rows[-1], flush=True)
            report = {"machine": versions("python3 ci/gpu/field_errors.py OUT"), "packages": packages, "errors": rows}
            write(report, folder / "field_errors.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
