"""The constants that every verdict rests on, as a lock records them: what all kernels are held to."""

from __future__ import annotations

import torch

from oracle import doors
from oracle.cases import Case
from oracle.contract import Record
from oracle.families import FAMILIES
from oracle.references import bound, logits, roundoff
from oracle.suite import CONFIDENCE, ELEMENTS, SHARE
from oracle.trial import prepare

_PROBE = Case(
    name="probe",
    family=FAMILIES["gpt-oss-full"],
    dtype="bf16",
    q_lens=(3, 1),
    kv_lens=(70, 33),
    page_size=16,
    sinks="small",
    seed=1,
)


def constants() -> dict[str, float]:
    """By name: margins, floors of slopes, factors of the bound, sizes of the suite; and the mean bounds of one small call.

    The latter move with the bound's formulas, which have no names.
    """
    truth = prepare(_PROBE, Record()).truth
    return {
        "bias_beta": doors.BIAS_BETA,
        "elements": float(ELEMENTS),
        "exp_flushes": roundoff.EXP_FLUSHES,
        "fault_confidence": CONFIDENCE,
        "fault_share": SHARE,
        "lambda": bound.LAMBDA,
        "margin_emulator": doors.MARGIN_EMULATOR,
        "margin_named": doors.MARGIN_NAMED,
        "probe_b": _mean(truth.bound.b),
        "probe_b_det": _mean(truth.bound.b_det),
        "probe_b_lse": _mean(truth.bound.b_lse),
        "quantised": logits.QUANTISED,
        "slope_beta": doors.SLOPE_BETA,
        "slope_effect": doors.SLOPE_EFFECT,
        "slope_rows": doors.SLOPE_ROWS,
        "slope_z": doors.SLOPE_Z,
        "tight_cap": doors.TIGHT_CAP,
        "truncations": roundoff.TRUNCATIONS,
        "truncations_fp22": roundoff.TRUNCATIONS_FP22,
        "worst_chain": roundoff.WORST_CHAIN,
    }


def _mean(x: torch.Tensor) -> float:
    return float(f"{float(x.double().mean()):.6g}")
