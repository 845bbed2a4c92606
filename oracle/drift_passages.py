"""The worst passages of a drift report's text, token by token, for a page that colours them by KL."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from oracle.checkpoints.drifted import Drift, Row
from oracle.drift_numbers import number, visible

MOST = 6  # passages
BEFORE, AFTER = 80, 40  # tokens of a passage before the worst one, and from it on
TRIED = 256  # worst tokens looked at for passages that do not say the same again
LEVELS = ("50", "90", "99", "99.9")  # percentiles where the colour changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token as a page shows it."""

    piece: str  # visible signs and line ends only
    marks: str  # CSS classes
    about: str  # its KL in words, "" where it was not scored


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A worst token and what stands round it."""

    title: str
    tokens: tuple[Token, ...]


def passages(drift: Drift, row: Row) -> list[Passage]:
    """At most MOST passages round the worst tokens of `row`, the worst first; a token that is not finite is worse than any.

    No passage is made for a token that stands in an earlier one.
    """
    text = drift.text
    kl = row.divergence.kl.masked_fill(~row.divergence.finite, math.inf).cpu()
    scored = {(int(b), int(p) + 1): i for i, (b, p) in enumerate(zip(text.block, text.position, strict=True))}
    bounds = [row.figures.kl_percentiles[level].value for level in LEVELS]
    found: list[Passage] = []
    spans: list[tuple[int, int, int]] = []  # block, first, last + 1
    for index in torch.argsort(kl, descending=True, stable=True)[:TRIED].tolist():
        block, at = int(text.block[index]), int(text.position[index]) + 1
        if len(found) == MOST or any(block == b and first <= at < last for b, first, last in spans):
            continue
        first, last = max(0, at - BEFORE), min(len(text.blocks[block]), at + AFTER)
        spans.append((block, first, last))
        name = visible(text.documents[int(text.document[index])])
        title = f"KL {number(float(kl[index]))} at position {at - 1} of block {block}, {name}"
        tokens = []
        for place in range(first, last):
            n = scored.get((block, place))
            piece = drift.pieces[text.blocks[block][place]]
            tokens.append(_token(piece, None if n is None else float(kl[n]), bounds, worst=place == at))
        found.append(Passage(title=title, tokens=tuple(tokens)))
    return found


def _token(piece: str, kl: float | None, bounds: list[float], *, worst: bool) -> Token:
    shown = visible(piece).replace("↵", "↵\n")
    if kl is None:
        return Token(piece=shown, marks="", about="")
    level = "lost" if not math.isfinite(kl) else f"t{sum(kl > bound for bound in bounds)}"
    marks = [*([level] if level != "t0" else []), *(["worst"] if worst else [])]
    return Token(piece=shown, marks=" ".join(marks), about=f"KL {number(kl)}" if math.isfinite(kl) else "not finite")
