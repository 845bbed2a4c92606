"""Planted faults of the arithmetic: each row is a wrong kernel, `oracle.mutants.planted:NAME` (docs/numerics.md, section 3.2).

A fault claims to be a correct kernel and has that kernel's record: the default one unless said.  They are part of
`oracle.mutants.table`.
"""

from __future__ import annotations

from oracle.contract import DeclaredKernel, Precision, Record
from oracle.mutants.mutant import Mutant, table_kernel
from oracle.mutants.understood import SUBTLE, WRONG, WRONG_OR_NAN
from oracle.references.arithmetic import Arithmetic, Planted
from oracle.verdict import Reason

_E4M3 = Record(precision=Precision(p_format="e4m3", p_scale=256.0))
_SUBTRACT_FIRST = Record(precision=Precision(subtract_first=True))


def _planted(report: str, models: str, planted: Planted) -> Mutant:
    return Mutant(report=report, models=models, reasons=(*WRONG_OR_NAN, *SUBTLE), arithmetic=Arithmetic(planted=planted))


def _rounded(report: str, models: str, arithmetic: Arithmetic) -> Mutant:
    return Mutant(report=report, models=models, reasons=(*SUBTLE, Reason.LESS_ACCURATE), arithmetic=arithmetic)


FAULTS: dict[str, Mutant] = {
    "window_plus_1": _planted("WIND-05", "a window of one key too many", Planted(window_shift=1)),
    "window_minus_1": _planted("WIND-09", "a window of one key too few", Planted(window_shift=-1)),
    "diagonal_minus_1": _planted("ROPE-03", "a query misses its own key", Planted(diagonal_shift=-1)),
    "diagonal_plus_1": _planted("CAUS-09", "a query sees the next key", Planted(diagonal_shift=1)),
    "last_key_dropped": _planted("PAGE-13", "the last key of every row is lost", Planted(drop_last_key=True)),
    "scale_half_percent": _planted("SCAL-05", "the softmax scale is 0.5 % too large", Planted(scale_factor=1.005)),
    "scale_tenth_percent": _planted("SCAL-05", "the softmax scale is 0.1 % too large", Planted(scale_factor=1.001)),
    "softcap_omitted": _planted("SCAP-02", "logits are not capped", Planted(omit_softcap=True)),
    "pv_bf16": _rounded("ACCU-07", "O is kept in bf16", Arithmetic(pv_accumulator="bf16")),
    "row_sum_bf16": _rounded("ACCU-06", "the row sum is kept in bf16", Arithmetic(row_sum_format="bf16")),
    "tile_3_unscaled": _planted("XLOG-06", "O is not rescaled when the maximum changes in tile 3", Planted(unscaled_tile=3)),
    "k_rows_swapped": _planted(
        "PAGE-09", "two K rows of one page change places, V's do not", Planted(page_fault="k-rows-swapped")
    ),
    "v_page_rolled": _planted("PAGE-03", "V of one page is off by one row", Planted(page_fault="v-rolled")),
    "page_stale": _planted("KVWR-06", "one page holds its neighbour's K and V", Planted(page_fault="stale")),
    "v_page_zero": _planted("KVWR-02", "V of one page was never written", Planted(page_fault="v-zero")),
    "head_mapped_wrong": _planted("GQAM-02", "the last query head reads the first kv head", Planted(wrong_head=True)),
    "p_e4m3_unscaled": _rounded("QUAN-02", "P in 8 bits where 16 are promised, unscaled", Arithmetic(p_format="e4m3")),
    "p_e4m3_scaled": _rounded(
        "QUAN-01", "P in 8 bits where 16 are promised, scaled by 256", Arithmetic(p_format="e4m3", p_scale=256.0)
    ),
    "p_fp16_flushed": _rounded("XLOG-06", "P in fp16, subnormals flushed to 0", Arithmetic(p_format="fp16-flushed")),
    "p_bf16_truncated": _rounded("ACCU-02", "P is truncated and not rounded", Arithmetic(p_format="bf16-truncated")),
    "exp2_error": _rounded("ARCH-05", "exp2 is off by up to 0.1 %", Arithmetic(exp2="error-1e-3")),
    "nan_in_masked_lane": _planted("TAIL-02", "a masked key's V is NaN and is multiplied by 0", Planted(nan_lane=True)),
    "splits_averaged": Mutant(
        report="SPLT-02",
        models="four splits are merged by their plain mean",
        reasons=WRONG,
        arithmetic=Arithmetic(splits=4, planted=Planted(mean_merge=True)),
    ),
    "pv_fp22": _rounded("ACCU-07", "O is accumulated in 22 bits, truncated", Arithmetic(pv_accumulator="fp22")),
    "ffma_overflow": Mutant(
        report="XLOG-11",
        models="exp2(s c - fl(m c)) overflows where |s| is above 1e9",
        reasons=(*WRONG_OR_NAN, *SUBTLE),
        claims=Arithmetic(subtract_first=True),
        record=_SUBTRACT_FIRST,
    ),
    "tile_1_skipped": _planted("ARCH-10", "tile 1 is left out of P.V", Planted(skipped_tile=1)),
    "zeros": _planted("MASK-04", "the output is 0", Planted(zero_output=True)),
    "p_e4m3_saturated": Mutant(
        report="QUAN-01",
        models="P reaches 4096 behind a stale maximum and saturates at 448, the row sum does not",
        reasons=SUBTLE,
        arithmetic=Arithmetic(p_format="e4m3", p_scale=256.0, lazy=4.0),
        claims=Arithmetic(p_format="e4m3", p_scale=256.0),
        record=_E4M3,
        against="oracle.kernels.emulated:p_e4m3",
    ),
}


def __getattr__(name: str) -> DeclaredKernel:
    return table_kernel(FAULTS, __name__, name)
