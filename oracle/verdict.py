"""Verdicts: what was decided, why, and on what evidence.  Records only; the deciding is in `doors`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """What the oracle says of a kernel."""

    ACCEPT = "accept"
    REJECT = "reject"
    INCONCLUSIVE = "inconclusive"  # door 2 cannot tell with these rows, or door 3 with this text
    NOT_COVERED = "not-covered"  # too little of what must be judged was judged


EXIT_CODES = {Outcome.ACCEPT: 0, Outcome.REJECT: 1, Outcome.INCONCLUSIVE: 3, Outcome.NOT_COVERED: 3}


class Reason(StrEnum):
    """Why a kernel is rejected.  Where several hold, the one that stands first here explains the others."""

    INVALID_ACCESS = "invalid-access"
    CRASH = "crash"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out-of-memory"
    EXCEPTION = "exception"
    WRONG_RESULT = "wrong-result"
    TAMPERED = "tampered"
    NOT_FINITE = "not-finite"
    OPTION_IGNORED = "option-ignored"
    ERROR = "error-exceeds-bound"
    LSE = "lse-exceeds-bound"
    EMPTY_ROW = "empty-row"
    RELATION = "relation-broken"
    LATER_CALL = "later-call"
    NONDETERMINISTIC = "nondeterministic"
    LEAK = "past-the-plan"
    PAGE_IDS = "page-ids"
    BATCH_VARIANT = "batch-variant"
    CANARY = "canary"
    INPUT_WRITTEN = "input-written"
    GAIN = "gain"
    TEMPERATURE = "temperature"
    BIAS = "bias"
    FP32_LINE = "fp32-line"
    NO_DOOR = "no-door"
    LESS_ACCURATE = "less-accurate"
    LOOSER_CONTRACT = "looser-contract"
    DRIFT = "drift"


MEANINGS: dict[Reason, str] = {
    Reason.INVALID_ACCESS: "compute-sanitizer saw it read or write outside what it was given",
    Reason.CRASH: "its process died: a signal, or it left by itself",
    Reason.TIMEOUT: "no answer in time",
    Reason.OUT_OF_MEMORY: "it asked for more memory than it may have",
    Reason.EXCEPTION: "it raised",
    Reason.WRONG_RESULT: "another shape, dtype or type than the contract says",
    Reason.TAMPERED: "it interfered with the measurement",
    Reason.NOT_FINITE: "NaN or inf where the exact answer is finite",
    Reason.OPTION_IGNORED: "a change that must alter the answer does not",
    Reason.ERROR: "e > 1",
    Reason.LSE: "e_lse > 1",
    Reason.EMPTY_ROW: "a row without keys is not 0, or its LSE not -inf (or the sink)",
    Reason.RELATION: "right in one call, wrong in another that the first one implies",
    Reason.LATER_CALL: "right at first, other bits when called again after other calls",
    Reason.NONDETERMINISTIC: "other bits for the same call, undeclared",
    Reason.LEAK: "what lies past the plan changes the result",
    Reason.PAGE_IDS: "other page ids for the same data change the result",
    Reason.BATCH_VARIANT: "declared batch-invariant, but the batch, the place in it or padding changes a sequence's bits",
    Reason.CANARY: "it wrote past the plan of `out`",
    Reason.INPUT_WRITTEN: "it changed q, k, v or the plan",
    Reason.GAIN: "an error proportional to the output: lost weight, truncation",
    Reason.TEMPERATURE: "an error as of another softmax scale",
    Reason.BIAS: "a mean error",
    Reason.FP32_LINE: "farther from fp32 than --within-fp32 allows",
    Reason.NO_DOOR: "safe, but through none of the doors allowed",
    Reason.LESS_ACCURATE: "door 2: its error is larger than the incumbent's by more than the margin",
    Reason.LOOSER_CONTRACT: "its declared arithmetic may pass only against a named incumbent, or by drift",
    Reason.DRIFT: "door 3: in the checkpoint it drifts more than the configuration already accepted, by more than the margin",
}

PRIORITY = {reason: i for i, reason in enumerate(Reason)}
DOORS = ("bits", "accuracy", "drift")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that counts against a kernel, with the smallest evidence for it."""

    reason: Reason
    case: str  # name of the case; "" for what is seen over all cases
    text: str  # one line a person reads: where, got, expected, limit
    size: int = 0  # query-key pairs of the case: the smallest one is shown
    units: float = 0.0  # how far over the limit, in units of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """RMS e of the candidate over the incumbent's, with its one-sided 95 % bounds."""

    label: str  # "all cases", or an input class
    value: float
    lower: float
    upper: float
    margin: float
    rows: int
    rows_to_decide: int | None = None  # where it is inconclusive: rows that would decide


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured over all cases."""

    max_e: float
    max_e_det: float
    max_e_own: float  # the output's own rounding taken off error and bound: what the kernel itself uses of its room
    max_e_lse: float | None  # None without LSE
    rms_e: float
    mean_abs: float
    max_abs: float
    slopes: dict[str, dict[str, float]]  # direction -> beta, z, effect of the pool nearest to firing
    row_sum: str  # "before", "after" or "after, undeclared"
    seconds: float
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftFigures:
    """What door 3 compared: mean KL of next-token distributions from the checkpoint as it loads, in nats, and the paired test."""

    checkpoint: str
    candidate: str  # configuration
    incumbent: str  # configuration already accepted
    kl_candidate: float
    kl_candidate_se: float  # standard error, by text block
    kl_incumbent: float
    kl_incumbent_se: float
    kl_floor: float | None  # of a second, equally correct kernel
    excess: float  # mean of KL(candidate) - (1 + margin) KL(incumbent), with its one-sided 95 % bounds
    excess_lower: float
    excess_upper: float
    margin: float
    blocks: int
    blocks_to_decide: int | None  # where it is inconclusive, and can be told
    ruling: str  # "accept", "reject", "inconclusive"
    reason: str  # one sentence
    identity: dict[str, str]  # hashes of weights, tokenizer and tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What was judged, and what was not."""

    cases: int
    elements: int
    rows: int
    counts: dict[str, int]  # what must be covered -> how often it was
    missing: tuple[str, ...]  # what must be covered and was not: exit 3
    left_out: tuple[str, ...]  # what the quick profile leaves out by design: listed, and no more
    skipped: dict[str, int]  # reason -> cases of the suite that the kernel has not declared
    unseen: tuple[str, ...]  # faults that go unseen, e.g. without an LSE


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer to: may this kernel ship?"""

    outcome: Outcome
    door: str  # "bits", "accuracy" or "drift", "" where it went through none
    candidate: str
    incumbent: str
    findings: tuple[Finding, ...]  # the most telling first
    ratios: tuple[Ratio, ...]
    figures: Figures | None
    coverage: Coverage
    notes: tuple[str, ...]
    inspect: tuple[Finding, ...] = ()
    drift: DriftFigures | None = None  # None where door 3 was not tried
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Distinct reasons, the most telling first."""
        return tuple(dict.fromkeys(f.reason for f in self.findings))

    @property
    def exit_code(self) -> int:
        """Exit status of the command that printed it."""
        return EXIT_CODES[self.outcome]
