"""Configurations in lockstep over the same tokens: nothing of tokens times vocabulary is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oracle.checkpoints.divergence import Divergence, divergence, joined
from oracle.checkpoints.paged import Run, paged, scattered, step
from oracle.checkpoints.projections import applied
from oracle.checkpoints.texts import Block

if TYPE_CHECKING:
    from torch import Tensor

    from oracle.checkpoints.variants import Subject, Variant

CHUNK = 1024  # tokens of a sequence in one step
BATCH = 1024  # tokens of all sequences in one step: more sequences at once where they are short

Progress = Callable[[str, int, int], None]  # what is being measured, tokens done, tokens in all


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One block, measured."""

    block: int  # index into the blocks
    divergences: tuple[Divergence, ...]  # of each candidate, position by position
    seconds: tuple[float, ...]  # of each candidate's steps, its share of the batch's
    calls: tuple[tuple[int, ...], ...]  # of each candidate, layer by layer: calls of its kernel that the block was part of


def lockstep(
    subject: Subject, reference: Variant, candidates: Sequence[Variant], blocks: Sequence[Block], batches: Sequence[Sequence[int]]
) -> Iterator[Finished]:
    """The blocks of each batch (indices of equally long `blocks`) from empty caches, by the reference and each candidate.

    Raises CheckpointError as `step` does.
    """
    with paged(subject.model), torch.inference_mode():
        for batch in batches:
            yield from _together(subject, reference, candidates, batch, [blocks[i] for i in batch])


def batched(blocks: Sequence[Block]) -> list[list[int]]:
    """The indices of all blocks, in order, equally long neighbours together as far as BATCH tokens reach."""
    batches: list[list[int]] = []
    for i, block in enumerate(blocks):
        last = batches[-1] if batches else []
        if last and len(blocks[last[0]].tokens) == len(block.tokens) and (len(last) + 1) * len(block.tokens) <= BATCH:
            last.append(i)
        else:
            batches.append([i])
    return batches


def fresh(variant: Variant, table: Tensor) -> Run:
    """A run of the variant with nothing in its cache yet."""
    none = torch.zeros(len(table), dtype=torch.int64)
    return Run(kernels=variant.kernels, eight_bit=variant.eight_bit, table=table, past=none, new=none)


def _together(
    subject: Subject, reference: Variant, candidates: Sequence[Variant], numbers: Sequence[int], blocks: Sequence[Block]
) -> Iterator[Finished]:
    tokens = torch.tensor([block.tokens for block in blocks], device=subject.model.device)
    count, length = tokens.shape
    table = scattered(count, length, tokens.device)
    runs = [fresh(variant, table) for variant in (reference, *candidates)]
    parts: list[list[list[Divergence]]] = [[[] for _ in candidates] for _ in blocks]  # block, candidate, chunk
    seconds = [0.0] * len(candidates)
    for start in range(0, length, CHUNK):
        chunk, following = tokens[:, start : start + CHUNK], tokens[:, start + 1 : start + CHUNK + 1]
        with applied(subject.modules, reference.weights):
            truth = step(subject.model, runs[0], list(chunk))
        for c, (variant, run) in enumerate(zip(candidates, runs[1:], strict=True)):
            began = time.perf_counter()
            with applied(subject.modules, variant.weights):
                logits = step(subject.model, run, list(chunk))
            seconds[c] += time.perf_counter() - began
            for b, true in enumerate(following):
                parts[b][c].append(divergence(truth[b][: len(true)], logits[b][: len(true)], true.to(logits[b].device)))
    calls = tuple(tuple(run.calls[layer] for layer in sorted(run.kernels)) for run in runs[1:])
    for number, own in zip(numbers, parts, strict=True):
        shares = tuple(spent / count for spent in seconds)
        yield Finished(block=number, divergences=tuple(map(joined, own)), seconds=shares, calls=calls)
