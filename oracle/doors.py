"""The doors: from what a trial saw to a verdict.  Decisions only; nothing is measured here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
from scipy.stats import bootstrap

from oracle.contract import Precision, Record
from oracle.formats import FORMATS
from oracle.measure import DIRECTIONS, Slope, Sums, slope
from oracle.trial import Seen, contract_of, row_sum_findings
from oracle.verdict import PRIORITY, Coverage, Figures, Finding, Outcome, Ratio, Reason, Verdict

MARGIN_EMULATOR = 1.25  # correct kernels differ from the textbook: a lazily rescaled one costs up to 1.2 (numerics.md 4.3)
MARGIN_NAMED = 1.05
RESAMPLES = 2000
CLASS_LOGIT_SHARE, CLASS_ROWS = 0.1, 64  # an input class is compared by itself only under, and from, these (judging.md)
CLASS_CASES = 3  # so that one case, which may be hard for a reason of its own, speaks for no class
NEGLIGIBLE = 0.02  # RMS e under this is the rounding of the output: a ratio of two such numbers says nothing

# A slope is a fault when it is certain, not tiny, and visible beside the bound (numerics.md 4.2).
SLOPE_Z, SLOPE_BETA, SLOPE_EFFECT, SLOPE_ROWS = 5.0, 4e-4, 0.02, 20.0
BIAS_BETA = 0.05
TIGHT_CAP = 3.0  # a softcap under this leaves few values of P, and these share one rounding (numerics.md 4.2)
SLOPE_REASONS = {"gain": Reason.GAIN, "temperature": Reason.TEMPERATURE, "bias": Reason.BIAS}


def looser_than_default(precision: Precision) -> bool:
    """The arithmetic promised is looser than the default contract: 8-bit P, narrow accumulation, quantisation inside."""
    plain = Precision()
    return (
        precision.p_format in ("e4m3", "int8")
        or precision.p_scale < plain.p_scale  # what a smaller P loses to underflow widens the bound without limit
        or precision.u_acc > plain.u_acc
        or precision.eps_exp > plain.eps_exp
        or precision.eps_tanh > plain.eps_tanh
        or precision.qk_format is not None
        or precision.v_format is not None
    )


def slope_findings(seen: Sequence[Seen], record: Record) -> tuple[list[Finding], dict[str, dict[str, float]]]:
    """Systematic errors over all cases of an input class, and per direction the pool that comes nearest to one."""
    pools: dict[tuple[str, bool, _Cap], dict[str, Sums]] = {}
    longest: dict[tuple[str, bool, _Cap], int] = {}
    coarsest: dict[tuple[str, bool, _Cap], float] = {}
    for s in seen:
        if s.candidate is None:
            continue
        keys = max(s.case.kv_lens, default=0)
        pool = (s.case.inputs, keys > 4096, _cap(s.case.family.softcap))
        sums = pools.setdefault(pool, {name: Sums() for name in DIRECTIONS})
        longest[pool] = max(longest.get(pool, 0), keys)
        coarsest[pool] = max(coarsest.get(pool, 0.0), contract_of(record, s.case).u_p)
        for name in DIRECTIONS:
            sums[name] = sums[name] + s.candidate.sums[name]
    findings = []
    nearest: dict[str, tuple[float, Slope]] = {}
    for pool, all_sums in pools.items():
        inputs, _, cap = pool
        for name in DIRECTIONS:
            found = slope(all_sums[name])
            floor = _floor(name, all_sums, longest[pool], cap, coarsest[pool], record.precision)
            parts = (abs(found.z) / SLOPE_Z, abs(found.beta) / floor, found.effect / SLOPE_EFFECT, found.rows / SLOPE_ROWS)
            share = min(parts)
            if share > nearest.get(name, (-1.0, found))[0]:
                nearest[name] = (share, found)
            if not share <= 1.0:
                certainty = f"z = {found.z:.1f} over {found.rows:.0f} effective rows, floor {floor:.1e}"
                text = f"{name} {found.beta:+.2e} on {inputs} inputs: {certainty}"
                findings.append(Finding(reason=SLOPE_REASONS[name], case="", text=text, units=abs(found.beta) / floor))
    return findings, {
        name: {"beta": s.beta, "z": s.z, "effect": s.effect, "share_of_limit": share} for name, (share, s) in nearest.items()
    }


class _Cap(Enum):
    """What a softcap does to logits, as far as slopes care."""

    NONE = auto()
    WIDE = auto()
    TIGHT = auto()  # of what it has cut, several values of P count


def _cap(softcap: float) -> _Cap:
    return _Cap.NONE if softcap <= 0 else _Cap.TIGHT if softcap < TIGHT_CAP else _Cap.WIDE


def _floor(direction: str, sums: dict[str, Sums], keys: int, cap: _Cap, u_p: float, precision: Precision) -> float:
    """The smallest slope that counts: below it lies what a kernel that keeps its contract may show (numerics.md 4.2).

    `u_p` is the unit roundoff of the coarsest P in the pool.
    """
    if precision.qk_format or precision.v_format:
        return math.inf  # the error of quantised inputs is one and the same for all rows: z says nothing
    own, eps_tanh = sums[direction], 0.0 if cap is _Cap.NONE else precision.eps_tanh
    # an error of exp or tanh that follows the logits looks like another scale, the more the closer the logits lie; one of
    # one sign moves weight to or from a sink
    exp = own.narrow if direction == "temperature" else own.weight
    logits = eps_tanh * own.level + (precision.eps_exp + (u_p if cap is _Cap.TIGHT else 0.0)) * exp
    logits = logits / own.b if own.b > 0 else 0.0
    # accumulators without guard bits lose weight in proportion to the keys; and a coarse P, rounded to nearest, is biased to
    # second order, since there are more small weights than large ones
    coarse = FORMATS["e4m3"].u if precision.p_format == "e4m3" else 0.0
    lost = max(keys * precision.u_acc / 4, coarse**2 / 2)
    if direction == "bias":
        return max(BIAS_BETA, logits, lost * math.sqrt(sums["gain"].b / max(1, sums["gain"].elements)))
    # what is lost lies along o; as far as that and do / d ln(scale) are one direction, it is a temperature too
    along = 1.0 if direction == "gain" else math.sqrt(sums["gain"].b / own.b) if own.b > 0 else 0.0
    return max(SLOPE_BETA, 2 * eps_tanh, logits, lost * along)


def ratio(label: str, seen: Sequence[Seen], margin: float, seed: int) -> Ratio:
    """RMS e of candidate over incumbent, pooled; bounds by a bootstrap over (sequence, kv head) clusters.

    An incumbent without any error gives 1 where the candidate has none either, else infinity.
    """
    both = [(s.candidate, s.incumbent) for s in seen if s.candidate is not None and s.incumbent is not None]
    rows = sum(len(c.cluster_e2) for c, _ in both)
    mine = torch.cat([c.cluster_e2 for c, _ in both]).numpy()
    theirs = torch.cat([i.cluster_e2 for _, i in both]).numpy()
    if not theirs.sum() > 0:
        value = 1.0 if mine.sum() == 0 else float("inf")
        return Ratio(label=label, value=value, lower=value, upper=value, margin=margin, rows=rows)
    if rows < 2:  # nothing to draw from
        value = float((mine.sum() / theirs.sum()) ** 0.5)
        return Ratio(label=label, value=value, lower=0.0, upper=float("inf"), margin=margin, rows=rows, rows_to_decide=CLASS_ROWS)

    least = 1e-12 * theirs.sum()  # a sample may hold only clusters where the incumbent makes no error

    def statistic(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        result: np.ndarray = np.sqrt(a.sum(axis) / np.maximum(b.sum(axis), least))
        return result

    value = float(statistic(mine, theirs))
    interval = bootstrap(
        (mine, theirs),
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=100,
        confidence_level=0.9,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    lower, upper = float(interval.low), float(interval.high)
    decide = None
    if lower <= margin < upper:
        distance = max(abs(value - margin), 1e-4)
        decide = int(rows * max(1.0, ((upper - lower) / 2 / distance) ** 2)) + 1
    return Ratio(label=label, value=value, lower=lower, upper=upper, margin=margin, rows=rows, rows_to_decide=decide)


def ratios(seen: Sequence[Seen], margin: float, seed: int) -> list[Ratio]:
    """The pooled ratio first, then that of each input class which may be compared by itself."""
    compared = [s for s in seen if s.candidate is not None and s.incumbent is not None]
    if not compared:
        return []
    # fp32 results differ by the order of sums alone, which may legally cost more than any margin: e is their judge
    narrow = [s for s in compared if s.case.dtype != "fp32"]
    if not narrow:
        return [ratio("all cases (fp32: reported, not a condition)", compared, math.inf, seed)]
    result = [ratio("all 16-bit cases", narrow, margin, seed)]
    for inputs in dict.fromkeys(s.case.inputs for s in narrow):
        pool = [s for s in narrow if s.case.inputs == inputs and s.candidate and s.candidate.logit_share < CLASS_LOGIT_SHARE]
        rows = sum(len(s.candidate.cluster_e2) for s in pool if s.candidate)
        loudest = max((max(s.candidate.rms, s.incumbent.rms) for s in pool if s.candidate and s.incumbent), default=0.0)
        if len(pool) >= CLASS_CASES and rows >= CLASS_ROWS and loudest >= NEGLIGIBLE:
            result.append(ratio(inputs, pool, margin, seed))
    return result


def figures(seen: Sequence[Seen], slopes: dict[str, dict[str, float]], record: Record) -> Figures | None:
    """The figures over all cases that gave a result."""
    all_measured = [s.candidate for s in seen if s.candidate is not None]
    if not all_measured:
        return None
    lse = [m.worst_lse for m in all_measured if m.worst_lse is not None]
    counted = sum(float(m.cluster_elements.sum()) for m in all_measured)
    after = record.precision.row_sum == "after"
    undeclared = any(m.fits_after for m in all_measured)
    return Figures(
        max_e=max(m.worst.units for m in all_measured),
        max_e_det=max(m.worst_det for m in all_measured),
        max_e_own=max(m.worst_own for m in all_measured),
        max_e_lse=max(w.units for w in lse) if lse else None,
        rms_e=float(sum(float(m.cluster_e2.sum()) for m in all_measured) / max(1.0, counted)) ** 0.5,
        mean_abs=sum(m.mean_abs * m.elements for m in all_measured) / max(1, sum(m.elements for m in all_measured)),
        max_abs=max(m.max_abs for m in all_measured),
        slopes=slopes,
        row_sum="after" if after else "after, undeclared" if undeclared else "before",
        seconds=sum(s.seconds for s in seen),
        calls=sum(s.calls for s in seen),
    )


def decide(
    *,
    candidate: str,
    incumbent: str,
    named: bool,
    record: Record,
    seen: Sequence[Seen],
    extra: Sequence[Finding],
    coverage: Coverage,
    doors: Sequence[str],
    seed: int,
    within_fp32: float | None = None,
    incumbent_precision: Precision | None = None,
    notes: Sequence[str] = (),
    environment: dict[str, Any] | None = None,
) -> Verdict:
    """The verdict on everything that was seen.

    `named`: the incumbent was named by the user, so door 1 and the tighter margin apply.
    """
    findings = [f for s in seen for f in s.findings] + list(extra)
    slopes, nearest = slope_findings(seen, record)
    findings += slopes + row_sum_findings(seen, record)
    if within_fp32 is not None:
        findings += _fp32_findings(seen, within_fp32)
    notes = [*notes, *_notes(record, seen)]
    if silent := [s for s in seen if s.candidate is not None and s.incumbent is None]:
        notes.append(f"the incumbent gave no result on {len(silent)} cases (first on {silent[0].case.name}): not compared there")
    all_ratios: list[Ratio] = []
    door = ""
    outcome = Outcome.REJECT
    if not findings:
        margin = MARGIN_NAMED if named else MARGIN_EMULATOR
        all_ratios = ratios(seen, margin, seed)
        door, outcome, more = _through(all_ratios, record, seen, doors, named, incumbent_precision)
        findings += more
        if outcome is Outcome.ACCEPT and coverage.missing:
            outcome = Outcome.NOT_COVERED
    else:
        all_ratios = ratios(seen, MARGIN_NAMED if named else MARGIN_EMULATOR, seed)
    return Verdict(
        outcome=outcome,
        door=door,
        candidate=candidate,
        incumbent=incumbent,
        findings=tuple(ordered(findings)),
        ratios=tuple(all_ratios),
        figures=figures(seen, nearest, record),
        coverage=coverage,
        notes=tuple(notes),
        environment=environment or {},
    )


def _through(
    all_ratios: Sequence[Ratio],
    record: Record,
    seen: Sequence[Seen],
    doors: Sequence[str],
    named: bool,
    incumbent_precision: Precision | None,
) -> tuple[str, Outcome, list[Finding]]:
    """Which door a safe kernel goes through: (door, outcome, findings where none)."""
    if looser_than_default(record.precision) and not (named and record.precision == incumbent_precision):
        text = "its record promises looser arithmetic than the default: it needs --against a kernel of the same contract"
        return "", Outcome.REJECT, [Finding(reason=Reason.LOOSER_CONTRACT, case="", text=text)]
    compared = [s for s in seen if s.same_bits is not None]
    if (
        "bits" in doors
        and named
        and record.deterministic
        and len(compared) == len(seen)
        and all(s.same_bits for s in seen)
        and seen
    ):
        return "bits", Outcome.ACCEPT, []
    if "accuracy" not in doors or not all_ratios:
        other = next((s for s in compared if not s.same_bits), None)
        where = f" (first on {other.case.name})" if other else ""
        text = f"safe, but not bit-identical to the incumbent{where}; doors allowed: {', '.join(doors)}"
        if seen and not all_ratios:
            text = "safe, but the incumbent gave no result to compare with on any case"
        return "", Outcome.REJECT, [Finding(reason=Reason.NO_DOOR, case="", text=text)]
    worse = [r for r in all_ratios if not r.lower <= r.margin]
    if worse:
        return (
            "",
            Outcome.REJECT,
            [
                Finding(
                    reason=Reason.LESS_ACCURATE,
                    case="",
                    units=r.value,
                    text=f"RMS e is {r.value:.3f} times the incumbent's on {r.label}: at least {r.lower:.3f}, margin {r.margin}",
                )
                for r in worse
            ],
        )
    if not all_ratios[0].upper <= all_ratios[0].margin:
        return "", Outcome.INCONCLUSIVE, []
    return "accuracy", Outcome.ACCEPT, []


def _fp32_findings(seen: Sequence[Seen], limit: float) -> list[Finding]:
    return [
        Finding(
            reason=Reason.FP32_LINE,
            case=s.case.name,
            units=s.far_from_fp32 / limit,
            text=f"|out - fp32 reference| reaches {s.far_from_fp32:.3g}, limit {limit:g}",
        )
        for s in seen
        if s.candidate is not None and not s.far_from_fp32 <= limit
    ]


def _notes(record: Record, seen: Sequence[Seen]) -> list[str]:
    notes = []
    if record.writes_padding:
        notes.append("the record declares writes_padding: rows of `out` past the plan were not held to stay untouched")
    if not record.deterministic:
        notes.append("the record declares varying bits: door 1 is closed, and leaks were looked for by error, not by bits")
    if not record.page_invariant:
        notes.append("the record declares that page ids move bits: all calls of a case used the same ids")
    if any(s.candidate is not None and s.candidate.fits_after for s in seen) and record.precision.row_sum == "before":
        notes.append("the row sum is taken over rounded P (short rows show it), undeclared: the LSE was held to the wider bound")
    return notes


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """The most telling first: by reason, then the smallest case, then the largest excess."""
    return sorted(findings, key=lambda f: (PRIORITY[f.reason], f.size, -f.units))
