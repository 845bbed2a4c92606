"""JAX's `jax.nn.dot_product_attention`, the XLA implementation.

JAX compiles for every shape, so lengths are padded to powers of two, as its users pad, and the padding is masked: `mask` hides
keys past the sequence, and rows past it are cut off.  Its own `is_causal` and `local_window_size` count both sequences from their
first token, so the contract's bottom-right rule is a mask as well.

Read in JAX 0.10's source: scores and softmax in fp32, P in the format of k, hidden scores are -0.7 times the largest float32,
and the LSE is rounded to the format of k: only with float32 is it one that the contract knows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from oracle.contract import SCALES, Answer, Call, Precision, Record, contract_kernel
from oracle.kernels.field.sequences import Attend, Dense, by_sequence

_SHORTEST = 16


@cache
def _jitted() -> Callable[..., Any]:
    """(q, k, v, mask, scale) -> (out, LSE), compiled once for each shape."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of a GPU that others use too
    import jax

    def run(q: Any, k: Any, v: Any, mask: Any, scale: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, return_residual=True, implementation="xla")

    compiled: Callable[..., Any] = jax.jit(run)
    return compiled


def _padded(length: int) -> int:
    return max(_SHORTEST, 1 << (length - 1).bit_length())


def _attend(return_lse: bool) -> Attend:
    """JAX over one sequence."""

    def attend(dense: Dense) -> tuple[Tensor, Tensor | None]:
        import jax

        rows, keys = dense.q.shape[0], dense.k.shape[0]
        extra = (_padded(rows) - rows, _padded(keys) - keys)
        pad = torch.nn.functional.pad
        q, k, v = (pad(x, (0, 0, 0, 0, 0, n)) for x, n in ((dense.q, extra[0]), (dense.k, extra[1]), (dense.v, extra[1])))
        mask = pad(dense.mask(), (0, extra[1], 0, extra[0]))
        given = [jax.dlpack.from_dlpack(x[None].contiguous()) for x in (q, k, v, mask[None])]
        out, lse = (from_dlpack(x)[0] for x in _jitted()(*given, dense.call.softmax_scale))
        return out[:rows], lse[:rows] if return_lse else None

    return attend


def _record(*dtypes: str) -> Record:
    return Record(
        dtypes=dtypes,
        head_dims=(40, 64, 80, 96, 128, 256, 512),
        page_sizes=(1, 8, 16, 32, 64, 128, 256),
        precision=Precision(eps_exp=2.0**-21, subtract_first=True),
    )


_LACKS = ("softcap", "sinks", *SCALES)


@contract_kernel(_record("bf16"), lacks=(*_LACKS, "return_lse"))
def attention_bf16(call: Call, _: bool) -> Answer:
    """Attention by JAX in bfloat16."""
    return by_sequence(call, _attend(False))


@contract_kernel(_record("fp16"), lacks=(*_LACKS, "return_lse"))
def attention_fp16(call: Call, _: bool) -> Answer:
    """Attention by JAX in float16."""
    return by_sequence(call, _attend(False))


@contract_kernel(replace(_record("fp32"), devices=("cpu",)), lacks=_LACKS)  # on a GPU its products are TF32
def attention_fp32(call: Call, return_lse: bool) -> Answer:
    """Attention by JAX in float32."""
    return by_sequence(call, _attend(return_lse), return_lse=return_lse)
