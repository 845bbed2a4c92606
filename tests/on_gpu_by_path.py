"""Kernels for a GPU that are right but for one fault that only compute-sanitizer or a graph's replay shows."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oracle.contract import Record
from oracle.kernels.triton_prefill import prefill_16

_LONGEST: dict[tuple[int, ...], int] = {}


@triton.jit  # type: ignore[untyped-decorator]  # triton's
def _sum_to(x, into, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # compiled from its source
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(into, tl.sum(tl.load(x + at, mask=at < count, other=0).to(tl.float32), 0))


def _sum_of(x: Tensor, count: int) -> None:
    _sum_to[(triton.cdiv(count, 256),)](x, torch.zeros(1, device=x.device), count, BLOCK=256)


def reads_past_the_plan_array(q: Tensor, k_cache: Tensor, v_cache: Tensor, **keywords: Any) -> object:
    """Reads one element past seqused_k and uses nothing of it."""
    lengths = keywords["seqused_k"]
    _sum_of(lengths, lengths.numel() + 1)
    return prefill_16(q, k_cache, v_cache, **keywords)


def keeps_the_longest(q: Tensor, k_cache: Tensor, v_cache: Tensor, **keywords: Any) -> object:
    """Cuts keys off after the longest sequence, which it counts on the host: in a graph, that of the call captured."""
    lengths = keywords["seqused_k"]
    key = (*q.shape, *keywords["page_table"].shape)
    if not torch.cuda.is_current_stream_capturing():
        live = keywords.get("num_seqs") or len(lengths)
        _LONGEST[key] = int(lengths[:live].max())
    return prefill_16(q, k_cache, v_cache, **keywords | {"seqused_k": lengths.clamp(max=_LONGEST[key])})


def reads_lengths_on_the_host(q: Tensor, k_cache: Tensor, v_cache: Tensor, **keywords: Any) -> object:
    """Right, and cannot be captured."""
    assert int(keywords["seqused_k"].max()) >= 0 or keywords.get("num_seqs") is not None
    return prefill_16(q, k_cache, v_cache, **keywords)


_RECORD: Record = getattr(prefill_16, "record")  # noqa: B009  # functions have no declared attributes
reads_past_the_plan_array.record = _RECORD  # type: ignore[attr-defined]
keeps_the_longest.record = _RECORD  # type: ignore[attr-defined]
reads_lengths_on_the_host.record = _RECORD  # type: ignore[attr-defined]
