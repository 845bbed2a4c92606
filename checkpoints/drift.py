"""A drift report, measured: configurations of one checkpoint against its reference, over blocks of text."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import oracle
from oracle.checkpoints.attribution import attribute
from oracle.checkpoints.configurations import Configuration, Plugged, configuration
from oracle.checkpoints.decision import decide
from oracle.checkpoints.divergence import Divergence
from oracle.checkpoints.drifted import Drift, Row
from oracle.checkpoints.figures import figures
from oracle.checkpoints.journal import Journal
from oracle.checkpoints.loading import CheckpointError, load_model, tokenizer_sha256, weights_sha256
from oracle.checkpoints.lockstep import BATCH, CHUNK, Finished, Progress, batched, lockstep
from oracle.checkpoints.paged import PAGE_SIZE
from oracle.checkpoints.ranks import Ranks
from oracle.checkpoints.texts import Block, cut, parse_blocks, read_documents, scored, tokens_sha256
from oracle.checkpoints.variants import Subject, Variant
from oracle.checkpoints.waypoints import waypoints

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FLOOR = "bf16+other-attention"
PACKAGES = ("transformers", "torchao", "tokenizers", "safetensors", "gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user asked for."""

    checkpoint: Path
    configurations: tuple[str, ...]
    texts: tuple[Path, ...]
    blocks: str  # "64x512,4x4096"
    reference: str = "bf16"
    floor: str = FLOOR
    decisions: tuple[tuple[str, str], ...] = ()  # (candidate, incumbent), both among the configurations
    margin: float = 0.05
    attribute: tuple[str, ...] = ()  # configurations whose layers are swapped one by one
    waypoints: tuple[str, ...] = ()  # configurations that are run at lengths round the window
    device: str = "cpu"  # a key of loading.DEVICES
    work: Path | None = None  # folder of unfinished runs, None = the user's cache folder


@dataclass(frozen=True, slots=True)
class Measured:
    """One configuration over all blocks."""

    divergence: Divergence
    seconds: float
    calls: tuple[int, ...]  # of each layer's kernel


def measure(asked: Asked, ranks: Ranks, progress: Progress, kernels: Mapping[str, Plugged] | None = None) -> Drift:
    """The report.  What is finished of a run that was stopped is taken from its journal, which is removed at the end.

    `kernels` are those that the attention words of the configurations mean before any other.

    Raises CheckpointError: something that was asked for does not fit, a configuration's path did not run, or one that rounds
    somewhere drifts nowhere.
    """
    began = time.perf_counter()
    candidates = _wanted(asked)
    documents, counts = read_documents(asked.texts), parse_blocks(asked.blocks)
    model, tokenizer = load_model(asked.checkpoint, "bf16", attention="sdpa", device=asked.device)
    subject = Subject(model, kernels or {})
    blocks = cut(documents, tokenizer, counts)
    _check_fits(asked.checkpoint, subject, blocks)  # before anything is quantised
    reference = subject.variant(configuration(asked.reference))
    variants = {c.text: subject.variant(c) for c in candidates}
    identity = _identity(asked, subject, tokenizer, blocks)
    setting = _setting(subject) | _sources([reference, *variants.values()])
    journal = Journal.of(identity | setting | {"configurations": list(variants)}, asked.work)
    measured = dict(
        zip(variants, _measured(subject, reference, list(variants.values()), blocks, journal, ranks, progress), strict=True)
    )
    text = scored(blocks, list(documents))
    for name, one in measured.items():
        _check_drifted(variants[name], one.divergence)
    drift = Drift(
        reference=asked.reference,
        rows=tuple(
            Row(
                configuration=name,
                floor=name == asked.floor,
                figures=figures(one.divergence, text),
                divergence=one.divergence,
                ran=_ran(variants[name], one.calls),
                tokens_per_second=sum(len(block.tokens) for block in blocks) / one.seconds,
            )
            for name, one in measured.items()
        ),
        decisions=tuple(
            decide(ours, theirs, measured[ours].divergence, measured[theirs].divergence, text, asked.margin)
            for ours, theirs in asked.decisions
        ),
        attributions=tuple(
            attribute(subject, reference, configuration(name), blocks, list(documents), ranks, progress)
            for name in asked.attribute
        ),
        waypoints=waypoints(
            subject, reference, variants[asked.floor], [variants[n] for n in asked.waypoints], documents, tokenizer, progress
        )
        if asked.waypoints
        else (),
        text=text,
        pieces=_pieces(tokenizer, blocks),
        layers=subject.shapes(),
        identity=identity,
        environment=setting | {"seconds": time.perf_counter() - began, "command": " ".join(["oracle", *sys.argv[1:]])},
    )
    ranks.wait()
    journal.remove()
    return drift


def _wanted(asked: Asked) -> list[Configuration]:
    """The configurations to measure: the floor first, each once.  Raises CheckpointError where one to be judged is missing."""
    names = [*([asked.floor] if asked.floor else []), *asked.configurations]
    judged = {*(name for pair in asked.decisions for name in pair), *asked.attribute, *asked.waypoints}
    if unknown := sorted(judged - {*names}):
        raise CheckpointError(f"{unknown[0]}: is to be judged, but is not among the configurations {', '.join(names)}")
    if asked.waypoints and not asked.floor:
        raise CheckpointError("waypoints need a floor: name a second correct kernel with --floor")
    return [configuration(name) for name in dict.fromkeys(names) if name != asked.reference]


def _check_fits(checkpoint: Path, subject: Subject, blocks: Sequence[Block]) -> None:
    """Raises CheckpointError where a block is longer than the model's context, or has a token that the model does not."""
    config = subject.model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    longest, largest = max(len(block.tokens) for block in blocks), max(max(block.tokens) for block in blocks)
    if limit is not None and longest > limit:
        raise CheckpointError(
            f"{checkpoint}: blocks of {longest} tokens; the model's context is {limit}: ask for shorter --blocks"
        )
    if largest >= config.vocab_size:
        raise CheckpointError(
            f"{checkpoint}: its tokenizer gave token {largest}, its model has {config.vocab_size}: they do not belong together"
        )


def _measured(
    subject: Subject,
    reference: Variant,
    variants: Sequence[Variant],
    blocks: Sequence[Block],
    journal: Journal,
    ranks: Ranks,
    progress: Progress,
) -> list[Measured]:
    """Every variant over all blocks, what the journal has included."""
    batches, known = batched(blocks), journal.finished(len(blocks), len(variants))
    ranks.wait()  # all have read before the first writes
    total = sum(len(block.tokens) for block in blocks)
    whole = [batch for batch in batches if all(i in known for i in batch)]
    found: dict[int, Finished] = {i: known[i] for batch in ranks.own(whole) for i in batch}
    done = sum(len(blocks[i].tokens) for batch in whole for i in batch)
    missing = [batch for batch in batches if not all(i in known for i in batch)]
    for finished in lockstep(subject, reference, variants, blocks, ranks.own(missing)):
        journal.add(finished)
        found[finished.block] = finished
        done += len(blocks[finished.block].tokens) * ranks.world
        progress("drift", min(done, total), total)
    lengths, layers = [len(block.tokens) - 1 for block in blocks], len(subject.kinds)
    measured = []
    for c in range(len(variants)):
        divergence = ranks.gathered({i: f.divergences[c] for i, f in found.items()}, lengths)
        sums = torch.tensor([[f.seconds[c], *f.calls[c]] for f in found.values()] or [[0.0] * (layers + 1)], dtype=torch.float64)
        seconds, *calls = ranks.sum(sums.sum(0)).tolist()
        measured.append(Measured(divergence, seconds, tuple(map(int, calls))))
    return measured


def _check_drifted(variant: Variant, d: Divergence) -> None:
    """Raises CheckpointError where a configuration that rounds somewhere has the reference's distributions, all of them."""
    if variant.must_drift and bool((d.kl == 0).all()) and bool((d.nll_candidate == d.nll_reference).all()):
        name = variant.configuration.text
        raise CheckpointError(f"{name}: it rounds, and yet all {len(d.kl)} distributions are the reference's: it did not run")


def _ran(variant: Variant, calls: Sequence[int]) -> dict[str, int]:
    """What ran in each layer -> calls of its kernel, each counted once for every block that was in it."""
    ran = {}
    for layer, kernel in variant.kernels.items():
        weights = variant.configuration.weights if layer in variant.weights else "own"
        cache = ", e4m3 cache" if layer in variant.eight_bit else ""
        ran[f"layer {layer}: {kernel.name} attention, {weights} weights{cache}"] = calls[layer]
    return ran


def _sources(variants: Iterable[Variant]) -> dict[str, str]:
    """What the variants' kernels are made from: target -> SHA-256 of the file that it is in."""
    return {kernel.target: kernel.source_sha256 for variant in variants for kernel in variant.kernels.values()}


def _identity(asked: Asked, subject: Subject, tokenizer: PreTrainedTokenizerBase, blocks: Sequence[Block]) -> dict[str, object]:
    """What two reports must have in common to be compared."""
    return {
        "checkpoint": type(subject.model).__name__,
        "weights_sha256": weights_sha256(asked.checkpoint),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "tokens_sha256": tokens_sha256(blocks),
        "blocks": asked.blocks,
        "reference": asked.reference,
    }


def _setting(subject: Subject) -> dict[str, object]:
    """What else the figures may depend on."""
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, object] = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "oracle": oracle.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **versions,
        "device": ", ".join(_devices(subject)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "world": int(os.environ.get("WORLD_SIZE", "1")),
        "page_size": PAGE_SIZE,
        "chunk": CHUNK,
        "batch": BATCH,
    }


def _devices(subject: Subject) -> list[str]:
    """Where the model lies, by name: "cpu", or what the CUDA devices are."""
    places = dict.fromkeys(parameter.device for parameter in subject.model.parameters())
    return [place.type if place.type == "cpu" else torch.cuda.get_device_name(place) for place in places]


def _pieces(tokenizer: PreTrainedTokenizerBase, blocks: Sequence[Block]) -> tuple[str, ...]:
    """The text of each token id that occurs in the blocks, by id; "" for the others."""
    used = {token for block in blocks for token in block.tokens}
    return tuple(str(tokenizer.decode([i])) if i in used else "" for i in range(max(used) + 1))
