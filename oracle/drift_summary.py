"""A drift report in plain words and numbers, piece by piece, for every text that is made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from oracle.checkpoints.decision import Decision, Ruling, above_floor
from oracle.checkpoints.drifted import Attribution, Drift, Row, Waypoint
from oracle.checkpoints.figures import Estimate, Figures
from oracle.drift_numbers import bar, count, ends, number, percent, plus_minus, signed, visible

LINE = 2.0  # largest difference of a logit at a waypoint: the line of the projects that this one grew out of
BEFORE = 12  # tokens shown before a worst one
MOST = 4  # worst tokens shown of a configuration
FLOOR, NOT_DISTINGUISHABLE = "the floor", "not distinguishable"
HASH = 12  # characters shown of a hash

COLUMNS = (
    "configuration", "KL, nats", "times the floor", "KL p99", "KL max", "top-1", "top-5", "ln ppl ratio", "Δp RMS", "not finite"
)  # fmt: skip
LAYER_COLUMNS = ("layer", "", "KL of this layer alone, nats", "times the floor", "")
WAYPOINT_COLUMNS = (
    "waypoint", "configuration", "tokens", "KL, nats", "top-1", "max logit difference", f"line {LINE}", "apart", "exact"
)  # fmt: skip
WORST_COLUMNS = ("configuration", "KL, nats", "where", f"the {BEFORE} tokens before, and the token to predict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One configuration as a row of the table with COLUMNS."""

    note: str  # FLOOR, NOT_DISTINGUISHABLE or ""
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLine:
    """One layer as a row of the table with LAYER_COLUMNS."""

    kept: bool  # the suggestion keeps it as it is in the reference
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """One token of the text with what stands before it, as the tokenizer wrote them: nothing is escaped."""

    configuration: str
    index: int  # among the scored positions
    kl: float  # nats
    document: str
    block: int
    position: int  # of the predicting token in its block
    token: int  # the id that is to be predicted
    before: tuple[str, ...]  # pieces, at most BEFORE
    piece: str

    @property
    def where(self) -> str:
        """Block, position and document in words."""
        return f"block {self.block}, position {self.position} of {visible(self.document)}"


def headline(drift: Drift, quote: Callable[[str], str] = str) -> str:
    """What was decided, or where nothing was to be decided, what was found; names are quoted."""
    if (one := leading(drift)) is not None:
        return decision(one, quote)
    if drift.decisions:
        rulings = [d.ruling for d in drift.decisions]
        return f"{len(rulings)} decisions: {', '.join(f'{rulings.count(r)} {r}' for r in Ruling if r in rulings)}"
    kl = [row.figures.kl.value for row in drift.rows if not row.floor]
    floor = "no floor was measured" if drift.floor is None else f"the floor is {plus_minus(drift.floor.figures.kl)}"
    if not kl:
        return f"nothing was measured against {quote(visible(drift.reference))} but its floor; {floor}"
    span = number(kl[0]) if len(kl) == 1 else f"{number(min(kl))} to {number(max(kl))}"
    return f"KL from {quote(visible(drift.reference))}: {span} nats in {count(len(kl), 'configuration')}; {floor}"


def leading(drift: Drift) -> Decision | None:
    """The decision that a report is headed by: its only one.  Of several, none speaks for the others."""
    return drift.decisions[0] if len(drift.decisions) == 1 else None


def measured(drift: Drift) -> str:
    """How much was measured."""
    text = drift.text
    return f"{count(len(text.token), 'token')} in {count(len(text.blocks), 'block')} of {count(len(text.documents), 'document')}"


def decision(d: Decision, quote: Callable[[str], str] = str) -> str:
    """A decision in one sentence; the excess, with its one-sided bounds, is in nats over what the margin allows."""
    needed = "" if d.blocks_needed is None else f"; about {d.blocks_needed:,} would tell"
    return (
        f"{pair(d, quote)}: {d.ruling}; KL {plus_minus(d.kl_candidate)} against {plus_minus(d.kl_incumbent)}, "
        f"excess over {100 * d.margin:g} % more {number(d.excess.value)} {ends(d.excess)} ({count(d.blocks, 'block')}{needed})"
    )


def pair(d: Decision, quote: Callable[[str], str] = str) -> str:
    """Who was judged against whom; names are quoted."""
    return f"{quote(visible(d.candidate))} against {quote(visible(d.incumbent))}"


def comparison(drift: Drift) -> list[Line]:
    """Every configuration, in the order of the report."""
    return [Line(note=note(drift, row), cells=_cells(drift, row)) for row in drift.rows]


def note(drift: Drift, row: Row) -> str:
    """How a configuration stands to the floor, where it needs words."""
    if row.floor:
        return FLOOR
    return NOT_DISTINGUISHABLE if distinguishable(drift, row) is False else ""


def _cells(drift: Drift, row: Row) -> tuple[str, ...]:
    f = row.figures
    return (
        visible(row.configuration),
        plus_minus(f.kl),
        _beside_floor(drift, f.kl),
        number(f.kl_percentiles["99"].value),
        number(f.kl_max),
        percent(f.agree1.value),
        percent(f.agree5.value),
        signed(f.ln_ratio.value),
        percent(f.dp_rms.value),
        f"{f.not_finite:,}",
    )


def _beside_floor(drift: Drift, kl: Estimate) -> str:
    ratio = times_floor(drift, kl)
    return "no floor" if ratio is None else number(ratio)


def times_floor(drift: Drift, kl: Estimate) -> float | None:
    """A mean KL over the floor's; inf over a floor of exactly 0, None without a floor."""
    if drift.floor is None:
        return None
    floor = drift.floor.figures.kl.value
    return kl.value / floor if floor else math.inf


def distinguishable(drift: Drift, row: Row) -> bool | None:
    """Whether a configuration's KL is above the floor's, by the paired test over blocks; None of a floor, and without one."""
    if row.floor or drift.floor is None:
        return None
    return above_floor(row.divergence, drift.floor.divergence, drift.text)


def layers(drift: Drift, a: Attribution, most: int | None = None) -> list[LayerLine]:
    """The swapped layers, or the `most` with the largest KL, in the order of the report; the longest bar is the largest KL."""
    first = sorted(a.swaps, key=lambda swap: math.inf if math.isnan(swap.kl.value) else swap.kl.value, reverse=True)[:most]
    chosen = {swap.layer for swap in first}
    largest = max((swap.kl.value for swap in a.swaps if math.isfinite(swap.kl.value)), default=0.0)
    lines = []
    for swap in (swap for swap in a.swaps if swap.layer in chosen):
        share = swap.kl.value / largest if largest > 0 else 0.0
        about = visible(drift.layers[swap.layer]) if swap.layer < len(drift.layers) else swap.kind
        cells = (str(swap.layer), about, plus_minus(swap.kl), _beside_floor(drift, swap.kl), bar(share))
        lines.append(LayerLine(kept=swap.layer in a.kept, cells=cells))
    return lines


def attributed(drift: Drift, a: Attribution, quote: Callable[[str], str] = str) -> str:
    """What the swaps say together, and what follows."""
    kept = f"layer{'' if len(a.kept) == 1 else 's'} {', '.join(map(str, a.kept))}"
    if a.suggested and a.suggested_kl is not None:
        follows = f"with {kept} as in the reference, {quote(visible(a.suggested))} has KL {plus_minus(a.suggested_kl)}"
    else:
        follows = "no mixed configuration helps"
    return (
        f"All layers together {plus_minus(a.whole)}, {number(a.additivity)} times the sum of each alone; "
        f"none swapped {number(a.control)}; {follows}"
    )


def waypoint(w: Waypoint) -> tuple[str, ...]:
    """A waypoint as a row of the table with WAYPOINT_COLUMNS."""
    exact = "not asked" if w.exact is None else "yes" if w.exact else "NO"
    passed = "pass" if within_line(w) else "OVER"
    return (
        visible(w.name), visible(w.configuration), f"{w.tokens:,}", number(w.kl), percent(w.agree1), number(w.max_logit), passed,
        f"{w.apart:,}", exact,
    )  # fmt: skip


def within_line(w: Waypoint) -> bool:
    """Whether no logit differs by more than LINE; one that is not a number does."""
    return w.max_logit <= LINE


def spots(drift: Drift) -> list[Spot]:
    """MOST of the worst tokens of the configuration that is shown, and the worst one of every other but the floor."""
    at = shown(drift)
    return [spot for row in drift.rows if not row.floor for spot in worst(drift, row)[: MOST if row is at else 1]]


def worst(drift: Drift, row: Row) -> list[Spot]:
    """The worst tokens of one configuration, the worst first."""
    return [_spot(drift, row.configuration, one.index, one.kl) for one in row.figures.worst]


def _spot(drift: Drift, configuration: str, index: int, kl: float) -> Spot:
    text = drift.text
    block, position, token = (int(of[index]) for of in (text.block, text.position, text.token))
    before = text.blocks[block][max(0, position + 1 - BEFORE) : position + 1]
    return Spot(
        configuration=configuration,
        index=index,
        kl=kl,
        document=text.documents[int(text.document[index])],
        block=block,
        position=position,
        token=token,
        before=tuple(drift.pieces[t] for t in before),
        piece=drift.pieces[token],
    )


def figures(f: Figures) -> Iterator[tuple[str, str, str]]:
    """(what, value, 95 % interval or "") of every figure of one configuration."""
    yield "tokens", f"{f.tokens:,}", ""
    yield "blocks", f"{f.blocks:,}", ""
    yield "not finite", f"{f.not_finite:,}", ""
    yield "KL(reference || configuration), mean", number(f.kl.value), ends(f.kl)
    for name, e in f.kl_percentiles.items():
        yield f"KL, {name} % of tokens below", number(e.value), ends(e)
    yield "KL, largest", number(f.kl_max), ""
    yield "KL(configuration || reference), mean", number(f.kl_reverse.value), ends(f.kl_reverse)
    yield "Jensen-Shannon, mean", number(f.js.value), ends(f.js)
    yield "same best token", percent(f.agree1.value), ends(f.agree1, percent)
    yield "five best tokens, share in common", percent(f.agree5.value), ends(f.agree5, percent)
    yield "perplexity of the reference", number(f.perplexity_reference.value), ends(f.perplexity_reference)
    yield "perplexity", number(f.perplexity_candidate.value), ends(f.perplexity_candidate)
    yield "ln perplexity over the reference's", signed(f.ln_ratio.value), ends(f.ln_ratio, signed)
    yield "Δp of the true token, mean", _points(f.dp_mean.value), ends(f.dp_mean, _points)
    yield "Δp of the true token, RMS", percent(f.dp_rms.value), ends(f.dp_rms, percent)
    for name, value in f.dp_percentiles.items():
        yield f"Δp of the true token, {name} % of tokens below", _points(value), ""


def _points(share: float) -> str:
    return f"{signed(100 * share)} %"


def shown(drift: Drift) -> Row | None:
    """The configuration whose KL is shown token by token: the one decided on, or else the farthest from the reference."""
    if (one := leading(drift)) is not None:
        return next((row for row in drift.rows if row.configuration == one.candidate), None)
    rows = [row for row in drift.rows if not row.floor] or list(drift.rows)
    return max(rows, key=lambda row: math.inf if math.isnan(row.figures.kl.value) else row.figures.kl.value, default=None)


def identity(drift: Drift, characters: int | None = None) -> list[tuple[str, str]]:
    """What must be equal for another report to be comparable; hashes cut to so many characters."""
    return [(visible(key), _cut(visible(str(value)), characters)) for key, value in drift.identity.items()]


def _cut(value: str, characters: int | None) -> str:
    hexadecimal = len(value) == 64 and set(value) <= set("0123456789abcdef")
    return value[:characters] if hexadecimal else value


def again(drift: Drift) -> str:
    """The command that gives this report once more."""
    return visible(str(drift.environment["command"]))


def setting(drift: Drift) -> str:
    """Where and how it was measured."""
    shown = {k: number(v) if isinstance(v, float) else visible(str(v)) for k, v in drift.environment.items() if k != "command"}
    return ", ".join(f"{visible(key)} {value}" for key, value in shown.items())
