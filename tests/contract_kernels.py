"""Kernels of the contract for tiny models, named by path: one correct, the others each with one thing wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oracle.contract import Record
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import as_kernel

SMALL = Record(dtypes=("fp32", "bf16"), head_dims=(16, 32, 64, 128), uneven_head_dims=((24, 16),))

plain = as_kernel(Arithmetic(p_format="fp32"), "plain", SMALL)


def past_the_plan(q: Tensor, k_cache: Tensor, v_cache: Tensor, **given: Any) -> Tensor:
    """Reads one key too many."""
    return plain(q, k_cache, v_cache, **given | {"seqused_k": given["seqused_k"] + 1, "causal": False})  # type: ignore[return-value]


past_the_plan.record = SMALL  # type: ignore[attr-defined]


def no_window(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    page_table: Tensor,
    softmax_scale: float,
) -> Tensor:
    """Takes no window."""
    return torch.zeros_like(q)


no_window.record = SMALL  # type: ignore[attr-defined]


def wrong_shape(q: Tensor, k_cache: Tensor, v_cache: Tensor, **given: Any) -> Tensor:
    """Answers one row too few."""
    return torch.zeros_like(q)[1:]


wrong_shape.record = SMALL  # type: ignore[attr-defined]


def random(q: Tensor, k_cache: Tensor, v_cache: Tensor, **given: Any) -> Tensor:
    """Never the same twice."""
    out = plain(q, k_cache, v_cache, **given)
    assert isinstance(out, Tensor)
    return out + 0.1 * torch.randn_like(out)


random.record = SMALL  # type: ignore[attr-defined]
