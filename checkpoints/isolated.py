"""A kernel inside a model, and yet in a process of its own: what it does there reaches neither the model nor the figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from oracle.checkpoints.configurations import Plugged
from oracle.contract import OPTIONAL, REQUIRED, Call, Record
from oracle.isolation.outcome import Description, Failure
from oracle.isolation.process import KernelProcess, patience_s


class KernelFailed(Exception):
    """A kernel gave no result inside a model."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


def isolated(name: str, process: KernelProcess, description: Description, record: Record) -> Plugged:
    """The kernel of `process`, which the layers of a model on the CPU can call; the kernel works on copies.

    A call raises KernelFailed where the kernel gives no result.
    """

    def function(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> Tensor:
        call = Call(q=q, k_cache=k_cache, v_cache=v_cache, **options)
        pairs = (call.cu_seqlens_q.diff() * call.seqused_k).sum().item()
        work = pairs * q.shape[1] * (q.shape[2] + v_cache.shape[3])
        returned = process.call(call, patience_s(work, record))
        if isinstance(returned, Failure):
            raise KernelFailed(returned)
        return returned.out

    return Plugged(
        name=name,
        target=description.target,
        function=function,
        record=replace(record, devices=("cpu",)),  # the device that its process copies to is no concern of the model's
        takes=frozenset(option for option in (*REQUIRED, *OPTIONAL) if description.takes(option)),
        source_sha256=description.source_sha256 or "",
    )
