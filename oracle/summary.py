"""A verdict in plain words, piece by piece, for every report that is a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oracle.verdict import MEANINGS, Finding, Outcome, Reason, Verdict

RATIO = "RMS e over the incumbent's"
NEVER = (
    "rows that were not drawn: of a long call only the edges and a random share are judged",
    "speed, and malice: a kernel's process is no sandbox",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One reason, with the smallest evidence for it."""

    reason: Reason
    meaning: str
    smallest: Finding
    more: int  # findings of the same reason besides


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """One way in which a verdict does not cover everything."""

    why: str
    items: tuple[str, ...]  # what is not covered, the order meaning nothing


def headline(verdict: Verdict, quote: Callable[[str], str] = str) -> str:
    """What was decided, in half a sentence that follows the outcome and the kernel's name; the incumbent's is quoted."""
    if verdict.door:
        return f"through door {verdict.door}, against {quote(verdict.incumbent)}"
    if verdict.findings:
        return ", ".join(verdict.reasons[:3])
    if verdict.outcome is Outcome.INCONCLUSIVE and (d := verdict.drift) and d.ruling == verdict.outcome:
        return f"does it drift more than {quote(d.incumbent)}? this text cannot tell"
    if verdict.outcome is Outcome.INCONCLUSIVE:
        return f"as accurate as {quote(verdict.incumbent)}? these rows cannot tell"
    return "nothing found against it, but too little was judged"


def judged(verdict: Verdict) -> str:
    """How much was judged."""
    c = verdict.coverage
    return f"{c.cases:,} cases, {c.rows:,} query rows, {c.elements:,} output elements"


def reasons(verdict: Verdict) -> list[Told]:
    """Every reason once, the most telling first."""
    by_reason: dict[Reason, list[Finding]] = {}
    for found in verdict.findings:
        by_reason.setdefault(found.reason, []).append(found)
    return [
        Told(reason=reason, meaning=MEANINGS[reason], smallest=those[0], more=len(those) - 1)
        for reason, those in by_reason.items()
    ]


def figures(verdict: Verdict) -> list[tuple[str, str, str]]:
    """(what, value, what to hold it against) of everything that was measured; [] where the kernel gave no result."""
    f = verdict.figures
    if f is None:
        return []
    lse = "not given" if f.max_e_lse is None else f"{f.max_e_lse:.3g}"
    rows = [
        ("max e", f"{f.max_e:.3g}", "limit 1"),
        ("max e beside the output's rounding", f"{f.max_e_own:.3g}", ""),
        ("max e of the worst-case bound", f"{f.max_e_det:.3g}", "limit 1"),
        ("max e of the LSE", lse, "limit 1" if f.row_sum == "before" else f"limit 1; row sum taken {f.row_sum} rounding P"),
        ("RMS e", f"{f.rms_e:.4f}", ""),
        ("absolute error", f"mean {f.mean_abs:.3g}, max {f.max_abs:.3g}", ""),
    ]
    for r in verdict.ratios:
        decide = "" if r.rows_to_decide is None else f"; about {r.rows_to_decide:,} would decide"
        interval = f"{r.value:.3f} [{r.lower:.3f}, {r.upper:.3f}]"
        rows.append((f"{RATIO}, {r.label}", interval, f"margin {r.margin}; {r.rows:,} clusters{decide}"))
    if d := verdict.drift:
        floor = "" if d.kl_floor is None else f"; floor {d.kl_floor:.3g}"
        beside = f"{d.incumbent} {d.kl_incumbent:.3g} ± {d.kl_incumbent_se:.1g}, margin {d.margin:.0%}; {d.blocks} blocks{floor}"
        rows.append((f"mean KL of {d.candidate}, nats", f"{d.kl_candidate:.3g} ± {d.kl_candidate_se:.1g}", beside))
    for name, s in f.slopes.items():
        rows.append((f"slope: {name}", f"{s['beta']:+.1e}", f"{s['share_of_limit']:.0%} of its limit"))
    return rows


def in_short(verdict: Verdict) -> str:
    """The figures that most hangs on, in one line; "" where the kernel gave no result."""
    f = verdict.figures
    if f is None:
        return ""
    ratio = [f"{RATIO} {r.value:.3f} [{r.lower:.3f}, {r.upper:.3f}] (margin {r.margin})" for r in verdict.ratios[:1]]
    drift = [f"KL {d.kl_candidate:.3g} against {d.kl_incumbent:.3g}"] if (d := verdict.drift) else []
    return "; ".join([f"max e {f.max_e:.3g} (limit 1)", *ratio, *drift])


def not_covered(verdict: Verdict) -> list[Gap]:
    """Everything that the verdict does not cover; never empty, since no verdict covers everything."""
    c = verdict.coverage
    undeclared = tuple(f"{reason} ({count} {'case' if count == 1 else 'cases'})" for reason, count in c.skipped.items())
    gaps = (
        ("must be covered, and was not", c.missing),
        ("left out by the profile", c.left_out),
        ("not declared by the kernel, so not asked of it", undeclared),
        ("faults that go unseen", c.unseen),
        ("never judged", NEVER),
    )
    return [Gap(why=why, items=items) for why, items in gaps if items]


def again(verdict: Verdict) -> str:
    """The command that gives this verdict once more."""
    e = verdict.environment
    return f"{e['command']}{'' if '--seed' in str(e['command']) else ' --seed ' + str(e['seed'])}"


def setting(verdict: Verdict) -> str:
    """Where and how it was judged."""
    e = verdict.environment
    return f"seed {e['seed']}, {e['profile']} profile, {e['device']}, torch {e['torch']}, {e['threads']} threads"
