"""A drift report that the tests of its texts share: made logits, measured, estimated and decided on by the real functions."""

from __future__ import annotations

from functools import cache

import torch

from oracle.checkpoints.decision import decide
from oracle.checkpoints.divergence import Divergence, divergence
from oracle.checkpoints.drifted import Attribution, Drift, Row, Swap, Waypoint
from oracle.checkpoints.figures import Estimate, figures
from oracle.checkpoints.texts import Text

PIECES = (
    " the", " of", " and", " a", " page", " row", " key", " head", " is", " in", " to", " window", " layer", " sum", " softmax",
    " max", " token", " block", " value", " that", " this", " exact", " wrong", ".", ",", "\n", "<|end|>", "é", "\t",
)  # fmt: skip
FLOOR = "bf16+other-attention"
# Seed and size of each configuration's noise.  With one seed, two drift alike, block by block.
NOISE = {
    FLOOR: (3, 0.05),
    "fp8": (4, 0.3),
    "fp8+int8-attention": (4, 0.301),
    "bf16+near": (5, 0.05),
    "kernels/mine.py:attention": (6, 0.9),
}
DOCUMENTS = ("guide.txt", "manual.txt", "notes.txt")


def text_of(blocks: int, length: int) -> Text:
    """Blocks of made tokens, the documents in turn, every token but the first of a block scored."""
    made = torch.Generator().manual_seed(1)
    tokens = torch.randint(len(PIECES), (blocks, length), generator=made)
    block = torch.arange(blocks).repeat_interleave(length - 1)
    return Text(
        block=block,
        document=block * len(DOCUMENTS) // blocks,
        position=torch.arange(length - 1).repeat(blocks),
        token=tokens[:, 1:].flatten(),
        documents=DOCUMENTS,
        blocks=tuple(tuple(one) for one in tokens.tolist()),
    )


def measured(text: Text, noise: float, seed: int) -> Divergence:
    """Of a reference's made logits, and of the same with so much noise on each block, more on some of its tokens."""
    made = torch.Generator().manual_seed(2)
    reference = 3 * torch.randn(len(text.token), len(PIECES), generator=made)
    reference[torch.arange(len(text.token)), text.token] += 5  # the true token is mostly the likely one
    made.manual_seed(seed)
    tokens = torch.randn(len(text.token), 1, generator=made).exp()
    changed = reference + noise * tokens * torch.randn(reference.shape, generator=made)
    return divergence(reference, changed, text.token)


def row_of(text: Text, name: str, divergence: Divergence) -> Row:
    """A configuration's row with its figures."""
    return Row(
        configuration=name,
        floor=name == FLOOR,
        figures=figures(divergence, text),
        divergence=divergence,
        ran={f"layer {layer}: {name.rpartition('+')[2]}": 8 * layer + 8 for layer in range(2)},
        tokens_per_second=1234.5,
    )


@cache
def sample(blocks: int = 12, length: int = 65) -> Drift:
    """The report; one accept, one reject, an attribution, and waypoints on both sides of the line."""
    text = text_of(blocks, length)
    found = {name: measured(text, noise, seed) for name, (seed, noise) in NOISE.items()}
    pairs = (("fp8+int8-attention", "fp8"), ("kernels/mine.py:attention", "fp8"))
    whole = figures(found["fp8"], text).kl
    return Drift(
        reference="bf16",
        rows=tuple(row_of(text, name, divergence) for name, divergence in found.items()),
        decisions=tuple(decide(one, other, found[one], found[other], text) for one, other in pairs),
        attributions=(attribution(whole),),
        waypoints=(
            waypoint("1023 whole", 1023, kl=0.0312, agree1=0.951, max_logit=1.25, apart=3),
            waypoint("4096 in chunks of 1024", 4096, kl=0.0333, agree1=0.949, max_logit=2.75, apart=9),
            waypoint("mixed steps", 512, kl=0.0, agree1=1.0, max_logit=0.0, apart=0, exact=True),
        ),
        text=text,
        pieces=PIECES,
        layers=("sliding, 8 q heads, 2 kv heads, head dim 256, window 1024", "global, 8 q heads, 1 kv head, head dim 512"),
        identity={
            "checkpoint": "TinyForCausalLM",
            "weights_sha256": "a1" * 32,
            "tokenizer_sha256": "b2" * 32,
            "tokens_sha256": "c3" * 32,
            "blocks": f"{blocks}x{length}",
            "reference": "bf16",
        },
        environment={"torch": "2", "threads": 1, "seconds": 2.5, "command": "oracle drift tiny --configs fp8,fp8+int8-attention"},
    )


def waypoint(
    name: str, tokens: int, *, kl: float, agree1: float, max_logit: float, apart: int, exact: bool | None = None
) -> Waypoint:
    """Of fp8."""
    return Waypoint(
        name=name, configuration="fp8", tokens=tokens, kl=kl, agree1=agree1, max_logit=max_logit, apart=apart, exact=exact
    )


def attribution(whole: Estimate) -> Attribution:
    """Two layers, the global one with most of the drift and kept."""
    parts = ((0, "sliding", 0.3), (1, "global", 0.75))
    swaps = tuple(
        Swap(layer=layer, kind=kind, kl=Estimate(**{end: share * getattr(whole, end) for end in ("value", "low", "high", "se")}))
        for layer, kind, share in parts
    )
    return Attribution(
        configuration="fp8",
        control=0.0,
        whole=whole,
        swaps=swaps,
        additivity=1.05,
        kept=(1,),
        suggested="fp8@0",
        suggested_kl=swaps[0].kl,
    )
