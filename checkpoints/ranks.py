"""Several processes of one drift run, as `torchrun` starts them: each measures its share of the batches, all know the whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import torch

from oracle.checkpoints.divergence import COLUMNS, Divergence, from_tensors, to_tensors

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

    def gathered(self, parts: Mapping[int, Divergence], lengths: Sequence[int]) -> Divergence:
        """The divergence of all blocks in order, `lengths[i]` positions of block i, where each process holds `parts` of them."""
        whole = torch.zeros(sum(lengths), len(COLUMNS), dtype=torch.float64)
        ends = list(accumulate(lengths))
        for block, part in parts.items():
            columns = to_tensors(part)
            rows = slice(ends[block] - lengths[block], ends[block])
            whole[rows] = torch.stack([columns[name].double().cpu() for name in COLUMNS], 1)
        self.sum(whole)
        return from_tensors({name: column.to(COLUMNS[name]) for name, column in zip(COLUMNS, whole.unbind(1), strict=True)})


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
