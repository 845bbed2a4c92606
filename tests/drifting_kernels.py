"""Kernels for door 3, named by path: one right, the others each with one thing that a checkpoint must show."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from oracle.contract import Record
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import as_kernel

BOTH = Record(dtypes=("bf16",), head_dims=(64, 128))

plain = as_kernel(Arithmetic(), "plain", BOTH)


def noisy(q: Tensor, k_cache: Tensor, v_cache: Tensor, **given: Any) -> Tensor:
    """The right answer and a tenth of noise."""
    out = plain(q, k_cache, v_cache, **given)
    assert isinstance(out, Tensor)
    torch.manual_seed(0)
    return (out + 0.1 * torch.randn_like(out)).to(out.dtype)


noisy.record = BOTH  # type: ignore[attr-defined]


def dies_later(q: Tensor, k_cache: Tensor, v_cache: Tensor, **given: Any) -> Tensor:
    """Right for a single sequence, and ends its process for several."""
    if len(given["seqused_k"]) > 1:
        os._exit(0)
    out = plain(q, k_cache, v_cache, **given)
    assert isinstance(out, Tensor)
    return out


dies_later.record = BOTH  # type: ignore[attr-defined]


def forges(q: Tensor, k_cache: Tensor, v_cache: Tensor, **given: Any) -> Tensor:
    """Wrong, and would make every divergence 0 if it ran beside the measurement."""
    measurement: Any = import_module("oracle.checkpoints.lockstep")
    honest = measurement.divergence
    measurement.divergence = lambda reference, candidate, *rest: honest(reference, reference, *rest)
    return noisy(q, k_cache, v_cache, **given)


forges.record = BOTH  # type: ignore[attr-defined]

small_dims = as_kernel(Arithmetic(), "small_dims", replace(BOTH, head_dims=(64,)))
