"""The exam as tables: fault by check, kind by kind, and beside other projects' rules."""

from __future__ import annotations

from collections.abc import Sequence

from oracle.exam import Judged, only_by
from oracle.mutants.peers import RULES
from oracle.mutants.table import MUTANTS
from oracle.sheet import Sheet
from oracle.verdict import Outcome, Reason


def kinds(judged: Sequence[Judged]) -> Sheet:
    """Killed and total, kind by kind."""
    rows = []
    for kind in dict.fromkeys(MUTANTS[j.name].kind for j in judged):
        those = [j for j in judged if MUTANTS[j.name].kind == kind]
        rejected = [j for j in those if j.outcome == Outcome.REJECT]
        understood = [j for j in those if j.understood]
        left = ", ".join(f"`{j.name}`" for j in those if not j.understood) or "-"
        rows.append((kind, str(len(those)), str(len(rejected)), str(len(understood)), left))
    whole = [str(sum(int(row[i]) for row in rows)) for i in (1, 2, 3)]
    return Sheet(
        title="Mutants by kind",
        columns=("kind", "mutants", "rejected", "for an allowed reason", "left"),
        rows=(*rows, ("all", *whole, "")),
    )


def faults(judged: Sequence[Judged]) -> Sheet:
    """Fault by check: which reasons each mutant was rejected for."""
    used = [reason for reason in Reason if any(str(reason) in j.reasons for j in judged)]
    rows = []
    for j in judged:
        marks = ["x" if str(reason) in j.reasons else "" for reason in used]
        rows.append((f"`{j.name}`", MUTANTS[j.name].kind, MUTANTS[j.name].reference, j.profile, *marks, f"{j.seconds:.0f}"))
    return Sheet(
        title="Fault by check",
        columns=("mutant", "kind", "modelled on", "profile", *map(str, used), "s"),
        rows=tuple(sorted(rows, key=lambda row: (row[1], row[0]))),
    )


def checks(judged: Sequence[Judged]) -> Sheet:
    """What each check is worth: mutants that it rejects, and those that nothing else does."""
    alone = only_by(judged)
    rows = []
    for reason in Reason:
        found = [j for j in judged if str(reason) in j.reasons]
        if found:
            mine = alone.get(str(reason), [])
            shown = ", ".join(f"`{name}`" for name in mine[:6]) + (f" and {len(mine) - 6} more" if len(mine) > 6 else "")
            rows.append((str(reason), str(len(found)), str(len(mine)), shown or "-"))
    return Sheet(title="What each check is worth", columns=("check", "rejects", "rejects alone", "alone"), rows=tuple(rows))


def peers(judged: Sequence[Judged]) -> Sheet:
    """How many mutants other projects' rules reject on the same outputs."""
    asked = [j for j in judged if j.peers]
    rows = []
    for name, rule in RULES.items():
        on_randn, on_all = (sum(j.peers[name][i] for j in asked) for i in (0, 1))
        rows.append((name, rule.says, rule.source, f"{on_randn} of {len(asked)}", f"{on_all} of {len(asked)}"))
    rejected = sum(j.outcome == Outcome.REJECT for j in asked)
    rows.append(("this oracle", "", "", "", f"{rejected} of {len(asked)}"))
    return Sheet(
        title="Other projects' rules on the same outputs",
        columns=("rule", "says", "from", "rejects, on randn inputs", "rejects, on all inputs"),
        rows=tuple(rows),
    )
