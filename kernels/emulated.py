"""Correct kernels in emulated arithmetic: `oracle.kernels.emulated:textbook` and its variants, for calibration and as incumbents.

Each must be accepted under the precision that its record promises; how far they are from each other is how far correct
kernels are (docs/numerics.md, section 3.1).
"""

from __future__ import annotations

from oracle.contract import DeclaredKernel
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import as_kernel

VARIANTS: dict[str, Arithmetic] = {
    "textbook": Arithmetic(),  # tiles of 64, FFMA exponent, P in the format of q, sums rounded to nearest
    "tile_128": Arithmetic(tile=128),
    "tile_16": Arithmetic(tile=16),
    "reversed": Arithmetic(reverse=True),
    "splits_4": Arithmetic(splits=4),
    "lazy_8": Arithmetic(lazy=8.0),  # FlashAttention-4's lazy rescale
    "poly3": Arithmetic(exp2="poly3"),  # FlashAttention-4's exp2
    "sum_after": Arithmetic(row_sum="after"),
    "p_fp32": Arithmetic(p_format="fp32"),
    "tanh_approx": Arithmetic(tanh="approx"),
    "subtract_first": Arithmetic(subtract_first=True),
    "rz16": Arithmetic(qk_accumulator="rz16", pv_accumulator="rz16"),  # a tensor core
    "aligned": Arithmetic(qk_accumulator="aligned", pv_accumulator="aligned"),  # a tensor core without guard bits
    "wgmma": Arithmetic(qk_accumulator="aligned", pv_accumulator="aligned", aligned_width=16, aligned_guard=2),  # Hopper's
    "everything": Arithmetic(
        tile=128, splits=3, lazy=8.0, exp2="poly3", tanh="approx", qk_accumulator="rz16", pv_accumulator="rz16"
    ),  # as far from the textbook as a correct kernel gets
    # looser contracts: accepted against an incumbent of the same contract, or by drift
    "p_e4m3": Arithmetic(p_format="e4m3", p_scale=256.0),
    "int8_qk": Arithmetic(qk_format="int8", qk_block=64, smooth_k=True),  # SageAttention
    "e4m3": Arithmetic(
        qk_format="e4m3",
        qk_block=64,
        v_format="e4m3",
        p_format="e4m3",
        p_scale=256.0,
        qk_accumulator="fp22",
        pv_accumulator="fp22",
    ),  # FlashAttention-3's 8-bit path
}


def __getattr__(name: str) -> DeclaredKernel:
    if name not in VARIANTS:
        raise AttributeError(f"module {__name__!r} has no kernel {name!r}; it has {', '.join(VARIANTS)}")
    return as_kernel(VARIANTS[name], name)
