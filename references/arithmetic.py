"""The arithmetic of a kernel: what it rounds, where, and to what.  The emulator's knobs, and the promise they amount to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from oracle.contract import Call, Precision
from oracle.references.plan import RowPlan

Accumulator = Literal["rn", "rz16", "aligned", "bf16", "fp22"]
PFormat = Literal["input", "fp32", "bf16", "fp16", "e4m3", "bf16-truncated", "fp16-flushed"]
PageFault = Literal["k-rows-swapped", "v-rolled", "stale", "v-zero"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """Switches of the planted faults (docs/numerics.md, section 3.2); all off by default.

    Tiles are counted for each row from the first one that it sees.  The faulty page is one that the first query rows of a
    sequence see, wherever the sequence is long enough: the fifth from the end of the prefix at a page size of 16.
    """

    window_shift: int = 0  # keys added to the left side of a window
    diagonal_shift: int = 0  # keys added past the causal diagonal; -1 = a row misses its own key
    drop_last_key: bool = False  # every row with two keys or more loses its last one
    scale_factor: float = 1.0  # multiplies the softmax scale
    omit_softcap: bool = False
    unscaled_tile: int | None = None  # O is not rescaled at this tile, the row sum is
    skipped_tile: int | None = None  # P.V leaves this tile out, the row sum does not
    mean_merge: bool = False  # splits are merged by their plain mean
    nan_lane: bool = False  # 0 x NaN: V of a masked key in a row's last tile is NaN, in column 0 of kv head 0
    zero_output: bool = False
    page_fault: PageFault | None = None  # what is wrong with one page of every sequence
    wrong_head: bool = False  # the last query head reads kv head 0
    mask: Callable[[Call, RowPlan], RowPlan] | None = None  # the keys that rows see instead of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """One way to compute attention by tiles.  The defaults are the textbook's; what is not a knob is float32, to nearest.

    Accumulators, each starting from a float32 value (docs/numerics.md, sections 1 and 2.2):

    - "rn": the whole contraction (head_dim, or the keys of a tile) exact, rounded once to nearest.
    - "rz16": 16 products at a time, each sum exact and truncated: a tensor core.
    - "aligned": `aligned_width` products at a time; these and the accumulator are aligned to the largest and truncated, with
      `aligned_guard` bits beyond float32's: a tensor core without the benefit of the doubt.
    - "bf16": as "rn", then rounded to bf16.
    - "fp22": 32 products at a time, truncated to e8m13: Hopper's 8-bit tensor core.
    """

    tile: int = 64  # keys of one step of the online softmax, a power of two
    reverse: bool = False  # tiles from the last key to the first
    splits: int = 1  # ranges of a sequence's keys that are computed apart and merged by their LSE
    qk_accumulator: Accumulator = "rn"
    pv_accumulator: Accumulator = "rn"
    aligned_width: int = 8
    aligned_guard: int = 0
    p_format: PFormat = "input"  # "input" is the output's dtype: the format of q, bf16 where q is 8-bit
    p_scale: float = 1.0  # multiplies P before it is rounded, a power of two
    exp2: Literal["exact", "poly3", "error-1e-3"] = "exact"  # "poly3" is FlashAttention-4's polynomial
    row_sum: Literal["before", "after"] = "before"  # the row sum takes P before or after it is rounded
    row_sum_format: Literal["fp32", "bf16"] = "fp32"
    lazy: float = 0.0  # the running maximum is kept until it is exceeded by more than this, in log2 units
    subtract_first: bool = False  # exp2((s - m) c); else exp2(fma(s, c, -fl(m c)))
    tanh: Literal["exact", "approx"] = "exact"  # "approx": 2^-11 relative, as tanh.approx
    qk_format: Literal["int8", "e4m3"] | None = None  # q and k are quantised inside, with one scale a block and head
    qk_block: int = 1  # tokens of k, and rows of q, in a quantisation block; divides the tile
    smooth_k: bool = False  # a sequence's mean key is taken off k, and its logits are put back
    v_format: Literal["e4m3"] | None = None  # v is quantised inside, with one scale a tile and kv head
    planted: Planted = Planted()

    def __post_init__(self) -> None:
        if self.tile & (self.tile - 1) or self.tile < 1:
            raise ValueError(f"tile must be a power of two, got {self.tile}")
        if self.qk_block < 1 or self.tile % self.qk_block:
            raise ValueError(f"qk_block must divide the tile of {self.tile} keys, got {self.qk_block}")
        if self.aligned_width < 1 or self.aligned_width * 2.0 ** (24 + self.aligned_guard) > 2**31:
            got = f"{self.aligned_width} and {self.aligned_guard}"
            raise ValueError(f"aligned_width times 2^(24 + aligned_guard) must fit int32, got {got}")


# of one truncation or rounding of the sum; how many there are is the bound's to count (docs/numerics.md 2.2)
_U_ACC: dict[Accumulator, float] = {"rn": 2.0**-24, "rz16": 2.0**-23, "aligned": 2.0**-23, "bf16": 2.0**-8, "fp22": 2.0**-13}
_EPS_EXP = {"exact": 2.0**-21, "poly3": 2.0**-13, "error-1e-3": 2.0**-9}
_EPS_TANH = {"exact": 2.0**-21, "approx": 2.0**-11}


def precision_of(arithmetic: Arithmetic) -> Precision:
    """The tightest precision contract that the knobs keep, the planted faults left aside.

    No contract covers a truncated P or a bf16 row sum: those are promised as if they rounded to nearest and in float32.
    """
    return Precision(
        p_format=arithmetic.p_format.split("-")[0],
        p_scale=arithmetic.p_scale,
        u_acc=max(_U_ACC[arithmetic.qk_accumulator], _U_ACC[arithmetic.pv_accumulator]),
        eps_exp=_EPS_EXP[arithmetic.exp2],
        eps_tanh=_EPS_TANH[arithmetic.tanh],
        row_sum=arithmetic.row_sum,
        subtract_first=arithmetic.subtract_first,
        flush_to_zero=arithmetic.p_format == "fp16-flushed",
        qk_format=arithmetic.qk_format,
        qk_block=arithmetic.qk_block,
        smooth_k=arithmetic.smooth_k,
        v_format=arithmetic.v_format,
    )
