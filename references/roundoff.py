"""The constants of the error bound: what a promised precision rounds, on given formats (docs/numerics.md, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass

from oracle.contract import Precision
from oracle.formats import FORMATS, U32

MMA = 16  # products that one tensor-core instruction adds at once
TRUNCATIONS = 3.25  # places of a float32 accumulator that 16 products cost where one addend outweighs them (numerics.md 2.2)
TRUNCATIONS_FP22 = 8.5  # the same of an FP22 accumulator, which has no guard bits
U_FP22 = 2.0**-13
EXP_FLUSHES = FORMATS["fp32"].smallest_normal  # weights below this may be 0, largest weight = 1 (numerics.md 2.2)
WORST_CHAIN = 1.13  # truncations per product where every addend is aligned and truncated (numerics.md 2.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roundoff:
    """The constants of the bound: a promised `Precision` on given formats of q, of the output and of P."""

    u_out: float  # rounding of the output
    a_out: float  # absolute error of an output under the smallest normal
    u_p: float  # rounding of P before P.V
    a_p: float  # absolute error of a P that underflows in its format or in exp2, largest P = 1
    p_step: float  # step of an integer P, largest P = 1; 0 where P is floating point
    u_product: float  # rounding of one product: 0 where both factors have 16 bits or fewer
    u_acc: float
    truncations: float  # places of a sum that adding 16 products to it costs
    eps_exp: float
    eps_tanh: float
    u_qk: float  # relative error of q and k quantised to a floating-point format inside the kernel, else 0
    qk_step: float  # largest step of q and k quantised inside, in units of the magnitude that sets their scale, else 0
    qk_block: int  # tokens of k (and rows of q) that share that scale
    u_v: float  # relative error of v quantised inside the kernel, else 0
    a_v: float  # its absolute error under the smallest normal, in units of the magnitude that sets the scale
    scales: int  # roundings that folding dequantisation scales into the logits adds
    sum_after: bool  # the row sum is taken over rounded P
    smooth_k: bool


def roundoff(precision: Precision, *, dtype: str, out_dtype: str, scaled: bool) -> Roundoff:
    """The constants for a kernel that promises `precision` on q of format `dtype`, giving `out_dtype`.

    `scaled` says that dequantisation scales are folded in.
    """
    out = FORMATS[out_dtype]
    p_name = dtype if precision.p_format == "input" else precision.p_format
    integer_p = p_name == "int8"
    p = FORMATS["fp32" if integer_p else p_name]
    a_p = p.smallest_normal if precision.flush_to_zero else p.smallest_subnormal / 2
    qk, v = precision.qk_format, precision.v_format
    return Roundoff(
        u_out=out.u,
        a_out=out.smallest_normal if precision.flush_to_zero else out.smallest_subnormal / 2,
        u_p=0.0 if integer_p else p.u,
        a_p=max(a_p / precision.p_scale, EXP_FLUSHES),
        p_step=1 / 127 if integer_p else 0.0,
        u_product=U32 if dtype == "fp32" else 0.0,
        u_acc=precision.u_acc,
        truncations=TRUNCATIONS_FP22 if precision.u_acc >= U_FP22 else TRUNCATIONS,
        eps_exp=precision.eps_exp,
        eps_tanh=precision.eps_tanh,
        u_qk=FORMATS[qk].u if qk not in (None, "int8") else 0.0,
        qk_step=_subnormal_step(qk) if qk not in (None, "int8") else 1 / 127 if qk else 0.0,
        qk_block=precision.qk_block,
        u_v=FORMATS[v].u if v else 0.0,
        a_v=_subnormal_step(v) / 2 if v else 0.0,
        scales=2 if scaled else 0,
        sum_after=precision.row_sum == "after",
        smooth_k=precision.smooth_k,
    )


def _subnormal_step(format_name: str) -> float:
    """The step of a floating-point format's subnormals, its largest number being 1."""
    return FORMATS[format_name].smallest_subnormal / FORMATS[format_name].largest


def tie_width(r: Roundoff) -> float:
    """The unit roundoff by which equal weights are told apart."""
    return max(r.u_p, r.u_v, FORMATS["e4m3"].u if r.p_step else 0.0)
