"""Waypoints: one text at lengths round the window and at a long one, whole, in chunks, token by token, and in mixed company."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oracle.checkpoints.divergence import divergence
from oracle.checkpoints.drifted import Waypoint
from oracle.checkpoints.loading import CheckpointError
from oracle.checkpoints.lockstep import Progress, fresh
from oracle.checkpoints.paged import paged, scattered, step
from oracle.checkpoints.projections import applied
from oracle.checkpoints.texts import cut

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oracle.checkpoints.variants import Subject, Variant

WITHOUT_WINDOW = 512  # the length about which models without a window are run
LONG = 4  # windows in the long text
DECODED = 32  # tokens that are also run one at a time
CHUNKED = 8  # tokens of a chunk that is prefilled in their company


@dataclass(frozen=True, slots=True)
class Ran:
    """The logits (tokens, vocabulary) of one way to run a text, at its last positions."""

    logits: Tensor

    def against(self, other: Ran, tokens: Tensor, floor: float) -> tuple[float, float, float, int]:
        """(mean KL of this from the other, share of equal best tokens, largest difference of a logit, positions apart).

        Positions are apart where the best tokens differ although the other's two best are more than twice `floor` apart, which no
        two runs whose logits are within `floor` can do; and where there is no distribution at all.
        """
        mine, theirs = self.logits, other.logits
        d = divergence(theirs, mine, tokens[-len(mine) :])
        best, second = theirs.double().topk(2, 1).values.unbind(1)
        apart = ~d.finite | (~d.agree1 & ~(best - second <= 2 * floor))
        return float(d.kl.mean()), float(d.agree1.double().mean()), largest(mine, theirs), int(apart.sum())


def largest(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference of two logits at the same place; NaN where one is NaN."""
    return float((a.double() - b.double()).abs().max())


def waypoints(
    subject: Subject,
    reference: Variant,
    floor: Variant,
    variants: Sequence[Variant],
    documents: Mapping[str, str],
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
) -> tuple[Waypoint, ...]:
    """What each variant says along one text, against the reference that reads it whole, and against itself in other steps.

    Lengths are one less than the window, the window, one more, and LONG windows (without a window, WITHOUT_WINDOW).  The floor of
    the best tokens is the largest difference of a logit that `floor` shows on the same text.  Raises CheckpointError where no
    document is long enough.
    """
    window = _window(subject)
    lengths = [window - 1, window, window + 1, LONG * window]
    limit = getattr(subject.model.config.get_text_config(), "max_position_embeddings", None) or lengths[-1]
    lengths = [n for n in lengths if n <= limit]
    company = max(window + 1, 2 * CHUNKED * DECODED + 1)  # tokens that are run in company and one at a time
    if not lengths or company > limit:
        raise CheckpointError(f"waypoints need a context of {max(window - 1, company)} tokens; the model's is {limit}")
    (text,) = cut(documents, tokenizer, {max(company, lengths[-1]): 1})
    tokens = torch.tensor(text.tokens, device=subject.model.device)
    made: list[Waypoint] = []
    with paged(subject.model), torch.inference_mode():
        for n in lengths:
            whole = _run(subject, reference, tokens[:n], [n - 1])
            gap = largest(whole.logits, _run(subject, floor, tokens[:n], [n - 1]).logits)
            for variant in variants:
                name = variant.configuration.text
                chunk = _chunk(n)
                ways = {f"{n} whole": [n - 1], f"{n} in chunks of {chunk}": _chunks(n - 1, chunk)}
                for way, steps in ways.items():
                    ran = _run(subject, variant, tokens[:n], steps)
                    made.append(_waypoint(way, name, n, ran.against(whole, tokens[1:n], gap), None))
                progress(f"waypoints of {name}", n, lengths[-1])
        for variant in variants:
            made += _among_itself(subject, variant, tokens[:company], gap)
    return tuple(made)


def _among_itself(subject: Subject, variant: Variant, tokens: Tensor, floor: float) -> list[Waypoint]:
    """Prefill against teacher-forced decode, and a step of mixed company against serial steps, of one variant."""
    name, n = variant.configuration.text, len(tokens)
    whole = _run(subject, variant, tokens, [n - 1])
    decoded = _run(subject, variant, tokens, [n - 1 - DECODED, *[1] * DECODED])
    tail = Ran(decoded.logits[-DECODED:]).against(Ran(whole.logits[-DECODED:]), tokens[1:], floor)
    half = n // 2
    serial = [
        _run(subject, variant, tokens, [half, *[1] * DECODED]),
        _run(subject, variant, tokens[half:], _chunks(CHUNKED * DECODED, CHUNKED)),
    ]
    mixed = _mixed(subject, variant, tokens, half)
    exact, worst = True, (0.0, 1.0, 0.0, 0)
    for one, other, offset in zip(mixed, serial, (half, 0), strict=True):
        count = DECODED if offset else CHUNKED * DECODED
        true = tokens[half + 1 : half + 1 + count]
        found = Ran(one.logits[-count:]).against(Ran(other.logits[-count:]), true, floor)
        exact &= found[3] == 0
        worst = max(worst, found, key=lambda f: math.inf if math.isnan(f[2]) else f[2])
    return [
        _waypoint(f"last {DECODED} decoded against prefilled", name, n, tail, tail[3] == 0),
        _waypoint("mixed steps against serial", name, n, worst, exact),
    ]


def _mixed(subject: Subject, variant: Variant, tokens: Tensor, half: int) -> list[Ran]:
    """A sequence that decodes its tokens after `half` while another is prefilled in chunks of CHUNKED in the same steps."""
    table = scattered(2, len(tokens), tokens.device)
    run = fresh(variant, table)
    logits: list[list[Tensor]] = [[], []]
    with applied(subject.modules, variant.weights):
        first = step(subject.model, run, [tokens[:half], tokens[:0]])
        logits[0].append(first[0])
        for i in range(DECODED):
            pair = step(
                subject.model, run, [tokens[half + i : half + i + 1], tokens[half + CHUNKED * i : half + CHUNKED * (i + 1)]]
            )
            for own, new in zip(logits, pair, strict=True):
                own.append(new)
    return [Ran(torch.cat(own)) for own in logits]


def _run(subject: Subject, variant: Variant, tokens: Tensor, steps: Sequence[int]) -> Ran:
    """The first sum(steps) tokens, in steps of so many."""
    run = fresh(variant, scattered(1, len(tokens), tokens.device))
    with applied(subject.modules, variant.weights):
        parts = [step(subject.model, run, [part])[0] for part in torch.split(tokens[: sum(steps)], list(steps))]
    return Ran(torch.cat(parts))


def _waypoint(way: str, name: str, n: int, found: tuple[float, float, float, int], exact: bool | None) -> Waypoint:
    kl, agree1, max_logit, apart = found
    return Waypoint(name=way, configuration=name, tokens=n, kl=kl, agree1=agree1, max_logit=max_logit, apart=apart, exact=exact)


def _window(subject: Subject) -> int:
    """The smallest window of the sliding layers, WITHOUT_WINDOW where there is none."""
    text = subject.model.config.get_text_config()
    return int(text.sliding_window) if "sliding" in subject.kinds else WITHOUT_WINDOW


def _chunk(n: int) -> int:
    """A quarter of the text, and no divisor of it: chunks end inside pages and tiles."""
    return n // 4 + 3


def _chunks(total: int, size: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]
