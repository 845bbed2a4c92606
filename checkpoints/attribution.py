"""Where a configuration's drift comes from: one layer at a time swapped into the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from oracle.checkpoints.clusters import Estimate, clustered_mean
from oracle.checkpoints.divergence import Divergence
from oracle.checkpoints.drifted import Attribution, Swap
from oracle.checkpoints.loading import CheckpointError
from oracle.checkpoints.lockstep import batched, lockstep
from oracle.checkpoints.texts import Block, Text, scored

if TYPE_CHECKING:
    from oracle.checkpoints.configurations import Configuration
    from oracle.checkpoints.lockstep import Progress
    from oracle.checkpoints.ranks import Ranks
    from oracle.checkpoints.variants import Subject, Variant

BLOCKS = 32  # of the shortest length, on which layers are swapped
GOAL = 0.5  # of the drift, which the suggested configuration is to be rid of


def attribute(
    subject: Subject,
    reference: Variant,
    config: Configuration,
    blocks: Sequence[Block],
    documents: Sequence[str],
    ranks: Ranks,
    progress: Progress,
) -> Attribution:
    """The mean KL of each layer of `config` swapped alone into the reference, on up to BLOCKS of the shortest blocks.

    The reference swapped for itself is the control.  The suggestion keeps the layers of the largest swaps as they are in the
    reference, as few as rid it of GOAL of the swaps' sum, and is measured; there is none where that takes more than half of them.
    Raises CheckpointError where the control is not exactly 0, or a layer that rounds drifts nowhere.
    """
    shortest = min(len(block.tokens) for block in blocks)
    few = [block for block in blocks if len(block.tokens) == shortest][:BLOCKS]
    text = scored(few, documents)
    whole = subject.variant(config)
    layers = [i for i in range(len(subject.kinds)) if changes(whole, reference, i)]
    swaps = [subject.variant(config.only([layer])) for layer in layers]
    kls = [
        _mean_kl(d, text)
        for d in _measured(subject, reference, [reference, whole, *swaps], few, ranks, progress, f"layers of {config.text}")
    ]
    control, together, alone = kls[0], kls[1], kls[2:]
    if control.value != 0.0:
        raise CheckpointError(
            f"{config.text}: the reference drifts {control.value:.3g} nats from itself: its kernel is not deterministic"
        )
    for layer, variant, kl in zip(layers, swaps, alone, strict=True):
        if variant.must_drift and kl.value == 0.0:
            raise CheckpointError(f"{config.text}: layer {layer} drifts nowhere although it rounds; its path did not run")
    kept = _kept({layer: kl.value for layer, kl in zip(layers, alone, strict=True)})
    suggested = config.only(set(layers) - set(kept)) if kept else None
    measured: Estimate | None = None
    if suggested is not None:
        (d,) = _measured(subject, reference, [subject.variant(suggested)], few, ranks, progress, suggested.text)
        measured = _mean_kl(d, text)
    total = sum(kl.value for kl in alone)
    return Attribution(
        configuration=config.text,
        control=control.value,
        whole=together,
        swaps=tuple(Swap(layer=i, kind=subject.kinds[i], kl=kl) for i, kl in zip(layers, alone, strict=True)),
        additivity=together.value / total if total else torch.nan,
        kept=kept,
        suggested=suggested.text if suggested else "",
        suggested_kl=measured,
    )


def changes(variant: Variant, reference: Variant, layer: int) -> bool:
    """Whether the variant runs the layer otherwise than the reference."""
    return (
        variant.kernels[layer] != reference.kernels[layer]
        or (layer in variant.weights) != (layer in reference.weights)
        or (layer in variant.eight_bit) != (layer in reference.eight_bit)
    )


def _mean_kl(d: Divergence, text: Text) -> Estimate:
    """The mean KL over all finite positions, clustered by block."""
    return clustered_mean(d.kl[d.finite].numpy(), text.block[d.finite].numpy())


def _kept(alone: dict[int, float]) -> tuple[int, ...]:
    """The fewest layers whose swaps sum to GOAL of all; none where that takes more than half of the layers."""
    total, kept = sum(alone.values()), list[int]()
    for layer in sorted(alone, key=lambda i: (-alone[i], i)):
        if sum(alone[i] for i in kept) >= GOAL * total:
            break
        kept.append(layer)
    return tuple(sorted(kept)) if 2 * len(kept) <= len(alone) else ()


def _measured(
    subject: Subject,
    reference: Variant,
    variants: Sequence[Variant],
    blocks: Sequence[Block],
    ranks: Ranks,
    progress: Progress,
    what: str,
) -> list[Divergence]:
    """The divergence of each variant over all blocks."""
    parts: list[dict[int, Divergence]] = [{} for _ in variants]
    done, total = 0, sum(len(block.tokens) for block in blocks)
    for block in lockstep(subject, reference, variants, blocks, ranks.own(batched(blocks))):
        for part, d in zip(parts, block.divergences, strict=True):
            part[block.block] = d
        done += len(blocks[block.block].tokens)
        progress(what, done * ranks.world, total)
    return [ranks.gathered(part, [len(block.tokens) - 1 for block in blocks]) for part in parts]
