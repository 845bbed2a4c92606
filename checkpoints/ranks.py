"""Several processes of one drift run, as `torchrun` starts them: each measures its share of the batches, all know the whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from oracle.checkpoints.divergence import Divergence, from_tensors, to_tensors

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    world: int = 1

    def own(self, work: Sequence[T]) -> list[T]:
        """This process's share."""
        return list(work[self.rank :: self.world])

    def wait(self) -> None:
        """Returns when every process has come here."""
        if self.world > 1:
            torch.distributed.barrier()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of what every process gives, on each of them; `values` is overwritten."""
        if self.world > 1:
            torch.distributed.all_reduce(values)
        return values

    def gathered(self, parts: dict[int, Divergence], lengths: Sequence[int]) -> list[Divergence]:
        """The divergence of every block, `lengths[i]` positions of block i, where each process holds `parts` of them."""
        names = list(to_tensors(_empty()))
        whole = torch.zeros(sum(lengths), len(names), dtype=torch.float64)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        for block, part in parts.items():
            columns = to_tensors(part)
            rows = slice(starts[block], starts[block] + lengths[block])
            whole[rows] = torch.stack([columns[name].double().cpu() for name in names], 1)
        self.sum(whole)
        kinds = {name: column.dtype for name, column in to_tensors(_empty()).items()}
        return [
            from_tensors({name: whole[start : start + n, c].to(kinds[name]) for c, name in enumerate(names)})
            for start, n in zip(starts, lengths, strict=True)
        ]


@contextmanager
def ranks() -> Iterator[Ranks]:
    """The processes that torchrun started, joined by gloo; a single one without it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    torch.distributed.init_process_group("gloo")
    try:
        yield Ranks(torch.distributed.get_rank(), world)
    finally:
        torch.distributed.destroy_process_group()


def _empty() -> Divergence:
    """Of no position: what the columns are called, and of which dtype."""
    number, truth = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.bool)
    return Divergence(
        kl=number,
        kl_reverse=number,
        js=number,
        agree1=truth,
        agree5=number,
        nll_reference=number,
        nll_candidate=number,
        confidence=number,
        finite=truth,
    )
