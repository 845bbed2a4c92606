"""Door 3: a kernel that changes the numerics on purpose, judged by what it does to a checkpoint's distributions.

`W+KERNEL` is held against W in the same checkpoint, both measured from the checkpoint as it loads, W being the configuration
that is already accepted: the mean KL no worse, by a paired one-sided test over text blocks (`checkpoints.decision`).  The kernel
before the door is one that `checkpoints.isolated` made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from oracle.checkpoints import shipped
from oracle.checkpoints.configurations import Plugged, configuration
from oracle.checkpoints.decision import Decision, Ruling
from oracle.checkpoints.drift import Asked, measure
from oracle.checkpoints.drifted import Drift
from oracle.checkpoints.isolated import KernelFailed
from oracle.checkpoints.ranks import ranks
from oracle.trial import FAILURE_REASONS
from oracle.verdict import DriftFigures, Finding, Outcome, Reason, Verdict

FIRST = "1x64"  # blocks that show, before anything is judged, whether the kernel fits the checkpoint's layers
OTHER_DOORS = {Reason.NO_DOOR, Reason.LESS_ACCURATE, Reason.LOOSER_CONTRACT}  # a safe kernel that no other door let through

Progress = Callable[[int, int, str], None]  # done, in all, what


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftAsked:
    """What door 3 compares, and on which text."""

    checkpoint: Path
    accepted: str = "fp8"  # the configuration that is already accepted
    layers: str = ""  # those that call the kernel, as after the @ of a configuration; "" = all
    texts: tuple[Path, ...] = ()  # () = the text of the checkpoint that comes with the oracle
    blocks: str = shipped.BLOCKS


def check(asked: DriftAsked, kernel: Plugged) -> None:
    """Returns when the kernel can be called by the layers that are to call it.  Raises InputError otherwise, before it is judged.

    A kernel that fails there is left to the judging, which finds it again.
    """
    try:
        _measured(replace(asked, blocks=FIRST), kernel, lambda done, total, what: None)
    except KernelFailed:
        return


def waits(verdict: Verdict) -> bool:
    """Whether the kernel is safe, and no other door has let it through."""
    return verdict.outcome is Outcome.INCONCLUSIVE or (bool(verdict.findings) and {*verdict.reasons} <= OTHER_DOORS)


def through(verdict: Verdict, asked: DriftAsked, kernel: Plugged, progress: Progress) -> Verdict:
    """The verdict on a kernel that `waits`, after door 3.

    Accept: through it, unless too little was covered.  Reject: its finding beside those of the other doors; where one of them
    cannot tell, neither can the verdict.
    """
    try:
        drift = _measured(asked, kernel, progress)
    except KernelFailed as problem:
        text = f"in {asked.checkpoint.name}: {problem.failure.text}"
        found = Finding(reason=FAILURE_REASONS[problem.failure.kind], case="", text=text)
        return replace(verdict, outcome=Outcome.REJECT, door="", findings=(found, *verdict.findings))
    decision = drift.decisions[0]
    after = replace(verdict, drift=_figures(drift, asked))
    if decision.ruling is Ruling.ACCEPT:
        outcome = Outcome.NOT_COVERED if verdict.coverage.missing else Outcome.ACCEPT
        return replace(after, outcome=outcome, door="drift", findings=(), incumbent=decision.incumbent)
    if decision.ruling is Ruling.REJECT and verdict.outcome is Outcome.REJECT:
        return replace(after, findings=(*verdict.findings, _finding(decision)))
    return replace(after, outcome=Outcome.INCONCLUSIVE, findings=())


def _measured(asked: DriftAsked, kernel: Plugged, progress: Progress) -> Drift:
    """The drift of both configurations, and the floor's."""
    name = f"{configuration(asked.accepted).weights}+{kernel.name}{f'@{asked.layers}' if asked.layers else ''}"
    wanted = Asked(
        checkpoint=asked.checkpoint,
        configurations=(asked.accepted, name),
        texts=asked.texts or (shipped.text(),),
        blocks=asked.blocks,
        decisions=((name, asked.accepted),),
    )
    with ranks() as processes:
        return measure(wanted, processes, lambda what, done, total: progress(done, total, what), {kernel.name: kernel})


def _finding(decision: Decision) -> Finding:
    ratio = decision.kl_candidate.value / ((1 + decision.margin) * decision.kl_incumbent.value)
    return Finding(reason=Reason.DRIFT, case="", text=decision.reason, units=ratio)


def _figures(drift: Drift, asked: DriftAsked) -> DriftFigures:
    decision, floor = drift.decisions[0], drift.floor
    return DriftFigures(
        checkpoint=str(asked.checkpoint),
        candidate=decision.candidate,
        incumbent=decision.incumbent,
        kl_candidate=decision.kl_candidate.value,
        kl_candidate_se=decision.kl_candidate.se,
        kl_incumbent=decision.kl_incumbent.value,
        kl_incumbent_se=decision.kl_incumbent.se,
        kl_floor=None if floor is None else floor.figures.kl.value,
        excess=decision.excess.value,
        excess_lower=decision.excess.low,
        excess_upper=decision.excess.high,
        margin=decision.margin,
        blocks=decision.blocks,
        blocks_to_decide=decision.blocks_needed,
        ruling=str(decision.ruling),
        reason=decision.reason,
        identity={key: str(value) for key, value in drift.identity.items()},
    )
