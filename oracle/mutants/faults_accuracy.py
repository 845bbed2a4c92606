"""Mutants of numbers: extreme logits, accumulation, quantisation."""

from __future__ import annotations

import math

import torch

from oracle.contract import Precision, Record
from oracle.mutants.masks import last_keys
from oracle.mutants.mutant import Mutant
from oracle.mutants.patches import having, k_and_v_scales_swapped, reread, saturated, scales_are, values_are
from oracle.mutants.results import mass_saturates, out_is, sums_overflow, where_lse
from oracle.mutants.selectors import (
    all_of,
    decode,
    dim,
    dtype,
    eight_bit,
    long_context,
    long_row,
    not_first_kv_head,
    one_in,
    one_key,
    q_len_from,
    scaled,
    several_kv_heads,
    several_tokens,
    unless,
)
from oracle.mutants.tails import constant_values, masked_keys_weigh
from oracle.mutants.understood import EMPTY, NAN, OUT, SUBTLE, WRONG, WRONG_OR_NAN
from oracle.references.arithmetic import Arithmetic, Planted
from oracle.references.emulator import record_of

LN2 = math.log(2.0)
WIDE = record_of(Arithmetic())
_E4M3 = Record(precision=Precision(p_format="e4m3", p_scale=256.0))
_LOSE_FIRST_DIMS = 32

FAULTS: dict[str, Mutant] = {
    # Extreme logits
    "sentinel_maximum": Mutant(
        report="XLOG-01",
        models="the running maximum starts at a raw -5e4",
        after=where_lse(lambda lse, run: lse < -5e4 * run.call.softmax_scale - 20, 0.0),
    ),
    "sentinel_one_key": Mutant(
        report="XLOG-02",
        models="rows of one key start from a maximum of -1,000",
        after=where_lse(lambda lse, run: lse < -1000, 0.0, lambda lse, run: torch.full_like(lse, -1000.0)),
        where=one_key,
    ),
    "mask_value_finite": Mutant(
        report="XLOG-03",
        reasons=(*WRONG, *EMPTY),
        models="masked scores are -10,000",
        after=masked_keys_weigh(lambda call: -10_000.0),
        where=several_tokens,
    ),
    "maximum_fixed_at_10": Mutant(
        report="XLOG-04",
        models="10 is subtracted in place of the maximum",
        reasons=WRONG_OR_NAN,
        after=where_lse(lambda lse, run: lse.isfinite() & ((lse > 98) | (lse < -90)), math.nan),
    ),
    "lse_not_shifted": Mutant(
        report="XLOG-04",
        models="the LSE is the log of a sum that is not shifted: -inf below -88",
        reasons=WRONG,
        after=where_lse(lambda lse, run: lse.isfinite() & (lse < -88.7), None, lambda lse, run: torch.full_like(lse, -104.0)),
    ),
    "pv_overflows_fp16": Mutant(
        report="XLOG-05",
        models="P.V is summed in fp16, P times 2^8",
        reasons=NAN,
        after=sums_overflow(65504.0 / 256),
        where=long_context(4096),
    ),
    "rescale_flushed": Mutant(
        report="XLOG-06",
        models="beyond 4,096 keys the accumulator is not rescaled at the third tile",
        arithmetic=Arithmetic(planted=Planted(unscaled_tile=3)),
        where=long_context(4096),
    ),
    "pv_in_fp16_range": Mutant(
        report="XLOG-07",
        models="outputs saturate at 16",
        reasons=OUT,
        after=out_is(lambda out: out.clamp(-16.0, 16.0)),
    ),
    "scores_in_fp16": Mutant(
        report="XLOG-09",
        models="q.k above 65,504 is inf, before the scale",
        reasons=NAN,
        after=where_lse(lambda lse, run: lse.isfinite() & (lse.abs() > 65_504 * run.call.softmax_scale), math.nan),
        where=dtype(torch.float16),
    ),
    "phi_fp16_range": Mutant(
        report="XLOG-08",
        models="in fp16 logits are clamped at 1,000",
        after=where_lse(lambda lse, run: lse > 1000, None, lambda lse, run: lse.clamp(max=1000)),
        where=dtype(torch.float16),
        reasons=WRONG,
    ),
    "maximum_rounded": Mutant(
        report="XLOG-11",
        models="rows of logits above 10,000: the maximum rounds up and everything underflows",
        reasons=WRONG_OR_NAN,
        after=where_lse(lambda lse, run: lse > 10_000, math.nan),
    ),
    # Accumulation
    "row_sum_stops_at_2048": Mutant(
        report="ACCU-03", models="a row sum in fp16 stops growing at 2,048", after=mass_saturates(2048.0), where=long_row(2048)
    ),
    "row_sum_bf16_long": Mutant(
        report="ACCU-04",
        models="the row sum in bf16, beyond 4,096 keys",
        reasons=SUBTLE,
        arithmetic=Arithmetic(row_sum_format="bf16"),
        where=long_row(4096),
    ),
    "row_sum_bf16_wide": Mutant(
        report="ACCU-06",
        models="the row sum in bf16, at head dim 512",
        reasons=SUBTLE,
        arithmetic=Arithmetic(row_sum_format="bf16"),
        where=dim(512),
    ),
    "pv_fp22_8_bit_long": Mutant(
        report="ACCU-07",
        models="P.V in 22 bits on an 8-bit cache beyond 4,096 keys",
        reasons=SUBTLE,
        arithmetic=Arithmetic(pv_accumulator="fp22"),
        where=all_of(eight_bit, long_context(4096)),
    ),
    "pv_bf16_in_decode": Mutant(
        report="ACCU-07",
        models="P.V in bf16 in decode",
        reasons=SUBTLE,
        arithmetic=Arithmetic(pv_accumulator="bf16"),
        where=decode,
    ),
    "qk_bf16": Mutant(
        report="ACCU-06", models="q.k is rounded to bf16", reasons=SUBTLE, arithmetic=Arithmetic(qk_accumulator="bf16")
    ),
    "q_scale_missing_one_kv_head": Mutant(
        report="ACCU-08", models="q_scale is lost with one kv head", before=having(q_scale=None), where=unless(several_kv_heads)
    ),
    # Quantisation
    "p_saturates_lazily_long": Mutant(
        report="QUAN-01",
        models="beyond 4,096 keys P reaches 4,096 behind a stale maximum and saturates at 448",
        arithmetic=Arithmetic(p_format="e4m3", p_scale=256.0, lazy=4.0),
        claims=Arithmetic(p_format="e4m3", p_scale=256.0),
        record=_E4M3,
        against="oracle.kernels.emulated:p_e4m3",
        where=long_context(4096),
    ),
    "p_e4m3_in_decode": Mutant(
        report="QUAN-02",
        models="P in e4m3, unscaled, in decode",
        reasons=SUBTLE,
        arithmetic=Arithmetic(p_format="e4m3"),
        where=decode,
    ),
    "k_scale_ignored": Mutant(report="QUAN-03", models="no k_scale", reasons=WRONG_OR_NAN, before=having(k_scale=None)),
    "v_scale_ignored": Mutant(report="QUAN-04", models="no v_scale", before=having(v_scale=None)),
    "q_scale_ignored": Mutant(report="QUAN-03", models="no q_scale", before=having(q_scale=None)),
    "scales_ignored_16_bit": Mutant(
        report="QUAN-03",
        models="scales are ignored for a 16-bit cache",
        before=having(k_scale=None, v_scale=None),
        where=unless(eight_bit),
    ),
    "k_scale_ignored_in_decode": Mutant(
        report="QUAN-03", models="no k_scale in decode", before=having(k_scale=None), where=decode
    ),
    "v_scale_ignored_first_head_kept": Mutant(
        report="QUAN-04", models="no v_scale but for the first kv head", before=having(v_scale=None), where=not_first_kv_head
    ),
    "k_and_v_scales_swapped": Mutant(report="QUAN-04", models="k_scale and v_scale are swapped", before=k_and_v_scales_swapped),
    "scale_of_first_sequence": Mutant(
        report="QUAN-03",
        models="all sequences have the first one's scales",
        before=scales_are(lambda t: t[:1].expand_as(t), "k_scale", "v_scale"),
    ),
    "v_scale_of_first_head": Mutant(
        report="QUAN-03",
        models="all kv heads have the first one's v_scale",
        before=scales_are(lambda t: t[:, :1].expand_as(t), "v_scale"),
    ),
    "scales_swizzled": Mutant(
        report="QUAN-10",
        models="V's scales are written in another order of sequences and heads",
        before=scales_are(lambda t: t.T.contiguous().reshape(t.shape), "v_scale"),
    ),
    "scale_heads_reversed": Mutant(
        report="QUAN-11", models="k_scale's heads in reverse", before=scales_are(lambda t: t.flip(1), "k_scale")
    ),
    "scales_in_e4m3": Mutant(
        report="QUAN-11",
        models="scales rounded to e4m3",
        before=scales_are(lambda t: t.float().to(torch.float8_e4m3fn).double(), "k_scale", "v_scale"),
    ),
    "k_scale_squared": Mutant(
        report="QUAN-04", models="k_scale applied twice", before=scales_are(lambda t: t * t, "k_scale"), reasons=WRONG_OR_NAN
    ),
    "cache_read_as_fnuz": Mutant(
        report="QUAN-08",
        models="e4m3 is read as e4m3fnuz",
        reasons=WRONG_OR_NAN,
        before=values_are(reread(torch.float8_e4m3fnuz), "k_cache", "v_cache"),
    ),
    "cache_read_as_e5m2": Mutant(
        report="QUAN-17",
        models="K in e4m3 is read as e5m2",
        reasons=WRONG_OR_NAN,
        before=values_are(reread(torch.float8_e5m2), "k_cache"),
    ),
    "constant_value_nan": Mutant(report="QUAN-06", models="a row of equal values gives NaN", reasons=NAN, after=constant_values),
    "short_query_long_keys": Mutant(
        report="QUAN-13",
        models="an 8-bit cache split for a short query on 4,096 keys loses the last key",
        mask=last_keys(lambda r: r.plan.hi - 1),
        where=all_of(eight_bit, long_context(4096), unless(q_len_from(17))),
    ),
    "int8_above_16k": Mutant(
        report="QUAN-18",
        models="P in 8 bits above 16,384 keys",
        reasons=SUBTLE,
        arithmetic=Arithmetic(p_format="e4m3", p_scale=256.0),
        where=long_context(16_384),
    ),
    "wrong_above_2048_8_bit": Mutant(
        report="QUAN-19",
        models="an 8-bit cache above 2,048 keys: the scale is lost",
        before=having(k_scale=None),
        where=all_of(eight_bit, long_context(2048)),
    ),
    "cache_saturates": Mutant(
        report="QUAN-24",
        models="K and V saturate at 4 where there are scales",
        before=values_are(saturated(4.0), "k_cache", "v_cache"),
        where=scaled,
    ),
    "v_scale_one_in_1000": Mutant(
        report="QUAN-21",
        models="no v_scale for one (row, head) in a thousand",
        before=having(v_scale=None),
        where=all_of(scaled, one_in(1000)),
    ),
}
