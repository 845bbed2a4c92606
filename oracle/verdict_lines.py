"""A verdict in a few lines, and as single figures: what a failing test, JUnit XML and pytest's summary say of it."""

from __future__ import annotations

from collections.abc import Mapping

from oracle.verdict import Outcome, Verdict

Value = str | int | float


def properties(verdict: Verdict) -> dict[str, Value]:
    """A verdict as named figures, the kernel first; what it has not, such as an LSE's error without LSE, is absent."""
    f, c = verdict.figures, verdict.coverage
    whole: dict[str, Value | None] = {
        "kernel": verdict.candidate,
        "verdict": str(verdict.outcome),
        "door": verdict.door,
        "reasons": ", ".join(verdict.reasons),
        "max_e": f.max_e if f else None,
        "rms_e": f.rms_e if f else None,
        "max_e_lse": f.max_e_lse if f else None,
        "ratio": verdict.ratios[0].value if verdict.ratios else None,
        "cases": c.cases,
        "seed": verdict.environment["seed"],
        "not_declared": ", ".join(f"{count} x {reason}" for reason, count in c.skipped.items()),
        "not_covered": ", ".join((*c.missing, *c.left_out)),
        "unseen": ", ".join(c.unseen),
    }
    return {name: value for name, value in whole.items() if value is not None and value != ""}


def failure_text(verdict: Verdict) -> str:
    """Why a verdict is not the one wanted, in three lines: headline, most telling evidence, the command that gives it again."""
    return f"{verdict.outcome.upper()}  {verdict.candidate}  {_evidence(verdict)}\nagain: {verdict.environment['command']}"


def _evidence(verdict: Verdict) -> str:
    if verdict.findings:
        first = verdict.findings[0]
        where = f"{first.case}: " if first.case else ""
        return f"{', '.join(verdict.reasons[:3])}\n{first.reason}  {where}{first.text}"
    if not verdict.coverage.cases:
        return "no case was judged"
    if verdict.outcome is Outcome.NOT_COVERED:
        return f"nothing found against it, but too little was judged\nnot covered: {', '.join(verdict.coverage.missing)}"
    if verdict.outcome is Outcome.INCONCLUSIVE:
        r = verdict.ratios[0]
        more = f"; about {r.rows_to_decide:,} would decide" if r.rows_to_decide else ""
        return (
            f"as accurate as {verdict.incumbent}? these rows cannot tell\n"
            f"RMS e ratio {r.value:.3f} [{r.lower:.3f}, {r.upper:.3f}], margin {r.margin}, {r.rows:,} clusters{more}"
        )
    return f"through door {verdict.door}, against {verdict.incumbent}"


def summary(told: Mapping[str, Value]) -> str:
    """One verdict from its properties: a line with outcome and kernel, and one for each kind of thing that was not judged."""
    how = f"through door {told['door']}" if "door" in told else told.get("reasons", "")
    first = f"{told['verdict']}  {told['kernel']}  {how}".rstrip() + f"; {told['cases']} cases, seed {told['seed']}"
    more = ("not_declared", "not_covered", "unseen")
    return "\n".join([first, *(f"    {name.replace('_', ' ')}: {told[name]}" for name in more if name in told)])
