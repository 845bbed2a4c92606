"""Planted faults: each row is a wrong kernel, `oracle.mutants.planted:NAME` (docs/numerics.md, section 3.2).

A fault claims to be a correct kernel and has that kernel's record: the default one unless said.
"""

from __future__ import annotations

from dataclasses import dataclass

from oracle.contract import Kernel, Precision, Record
from oracle.references.arithmetic import Arithmetic, Planted
from oracle.references.emulator import as_kernel

_TEXTBOOK = Arithmetic()
_NO_RECORD = Record()
_E4M3 = Record(precision=Precision(p_format="e4m3", p_scale=256.0))
_SUBTRACT_FIRST = Record(precision=Precision(subtract_first=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A wrong kernel."""

    arithmetic: Arithmetic  # what it computes
    models: str  # the mistake, in a few words
    claims: Arithmetic = _TEXTBOOK  # the correct kernel that it claims to be
    record: Record = _NO_RECORD  # of that kernel


def _planted(models: str, planted: Planted) -> Fault:
    return Fault(arithmetic=Arithmetic(planted=planted), models=models)


FAULTS: dict[str, Fault] = {
    "window_plus_1": _planted("a window of one key too many", Planted(window_shift=1)),
    "window_minus_1": _planted("a window of one key too few", Planted(window_shift=-1)),
    "diagonal_minus_1": _planted("a query misses its own key", Planted(diagonal_shift=-1)),
    "diagonal_plus_1": _planted("a query sees the next key", Planted(diagonal_shift=1)),
    "last_key_dropped": _planted("the last key of every row is lost", Planted(drop_last_key=True)),
    "scale_half_percent": _planted("the softmax scale is 0.5 % too large", Planted(scale_factor=1.005)),
    "scale_tenth_percent": _planted("the softmax scale is 0.1 % too large", Planted(scale_factor=1.001)),
    "softcap_omitted": _planted("logits are not capped", Planted(omit_softcap=True)),
    "pv_bf16": Fault(arithmetic=Arithmetic(pv_accumulator="bf16"), models="O is kept in bf16"),
    "row_sum_bf16": Fault(arithmetic=Arithmetic(row_sum_format="bf16"), models="the row sum is kept in bf16"),
    "tile_3_unscaled": _planted("O is not rescaled when the maximum changes in tile 3", Planted(unscaled_tile=3)),
    "k_rows_swapped": _planted("two K rows of one page change places, V's do not", Planted(page_fault="k-rows-swapped")),
    "v_page_rolled": _planted("V of one page is off by one row", Planted(page_fault="v-rolled")),
    "page_stale": _planted("one page holds its neighbour's K and V", Planted(page_fault="stale")),
    "v_page_zero": _planted("V of one page was never written", Planted(page_fault="v-zero")),
    "head_mapped_wrong": _planted("the last query head reads the first kv head", Planted(wrong_head=True)),
    "p_e4m3_unscaled": Fault(arithmetic=Arithmetic(p_format="e4m3"), models="P in 8 bits where 16 are promised, unscaled"),
    "p_e4m3_scaled": Fault(
        arithmetic=Arithmetic(p_format="e4m3", p_scale=256.0), models="P in 8 bits where 16 are promised, scaled by 256"
    ),
    "p_fp16_flushed": Fault(arithmetic=Arithmetic(p_format="fp16-flushed"), models="P in fp16, subnormals flushed to 0"),
    "p_bf16_truncated": Fault(arithmetic=Arithmetic(p_format="bf16-truncated"), models="P is truncated and not rounded"),
    "exp2_error": Fault(arithmetic=Arithmetic(exp2="error-1e-3"), models="exp2 is off by up to 0.1 %"),
    "nan_in_masked_lane": _planted("a masked key's V is NaN and is multiplied by 0", Planted(nan_lane=True)),
    "splits_averaged": Fault(
        arithmetic=Arithmetic(splits=4, planted=Planted(mean_merge=True)), models="four splits are merged by their plain mean"
    ),
    "pv_fp22": Fault(arithmetic=Arithmetic(pv_accumulator="fp22"), models="O is accumulated in 22 bits, truncated"),
    "ffma_overflow": Fault(
        arithmetic=Arithmetic(),
        models="exp2(s c - fl(m c)) overflows where |s| is above 1e9",
        claims=Arithmetic(subtract_first=True),
        record=_SUBTRACT_FIRST,
    ),
    "tile_1_skipped": _planted("tile 1 is left out of P.V", Planted(skipped_tile=1)),
    "zeros": _planted("the output is 0", Planted(zero_output=True)),
    "p_e4m3_saturated": Fault(
        arithmetic=Arithmetic(p_format="e4m3", p_scale=256.0, lazy=4.0),
        models="P reaches 4096 behind a stale maximum and saturates at 448, the row sum does not (FlashAttention-4, issue 2577)",
        claims=Arithmetic(p_format="e4m3", p_scale=256.0),
        record=_E4M3,
    ),
}


def __getattr__(name: str) -> Kernel:
    if name not in FAULTS:
        raise AttributeError(f"module {__name__!r} has no fault {name!r}; it has {', '.join(FAULTS)}")
    return as_kernel(FAULTS[name].arithmetic, name, FAULTS[name].record)
