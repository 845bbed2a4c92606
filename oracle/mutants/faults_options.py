"""Mutants of options: softmax scale, softcap, sinks, groups of heads, head dims."""

from __future__ import annotations

import math

import torch

from oracle.contract import Precision, Record
from oracle.mutants.mutant import Mutant
from oracle.mutants.patches import dims_are, having, heads_read, scale_is, sinks_are, softcap_is, then, to_bf16
from oracle.mutants.results import constants, out_is, sink_twice
from oracle.mutants.selectors import (
    all_of,
    batch_over,
    capped,
    decode,
    dim,
    eight_bit,
    group,
    grouped,
    long_context,
    odd_group,
    scaled,
    sunk,
    uneven_dims,
    when,
    windowed,
)
from oracle.mutants.tails import masked_keys_weigh
from oracle.mutants.understood import EMPTY, NAN, SUBTLE, WRONG, WRONG_OR_NAN
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import record_of

LN2 = math.log(2.0)
WIDE = record_of(Arithmetic())
_E4M3 = Record(precision=Precision(p_format="e4m3", p_scale=256.0))
_LOSE_FIRST_DIMS = 32

FAULTS: dict[str, Mutant] = {
    # The softmax scale
    "scale_from_head_dim": Mutant(
        report="SCAL-04", models="always 1/sqrt(head_dim)", before=scale_is(lambda call: call.q.shape[2] ** -0.5)
    ),
    "scale_from_padded_dim": Mutant(
        report="SCAL-05",
        models="1/sqrt(d) is taken of the head dim padded to a power of two",
        before=scale_is(
            lambda call: (
                (1 << (call.q.shape[2] - 1).bit_length()) ** -0.5
                if call.softmax_scale == call.q.shape[2] ** -0.5
                else call.softmax_scale
            )
        ),
    ),
    "scale_from_value_dim": Mutant(
        report="SCAL-02",
        models="1/sqrt(d) is taken of V's head dim",
        record=WIDE,
        before=scale_is(
            lambda call: call.v_cache.shape[3] ** -0.5 if call.softmax_scale == call.q.shape[2] ** -0.5 else call.softmax_scale
        ),
    ),
    "scale_inverted": Mutant(
        report="SCAL-06", models="1 / scale", reasons=WRONG_OR_NAN, before=scale_is(lambda call: 1 / call.softmax_scale)
    ),
    "scale_one_is_default": Mutant(
        report="SCAL-04",
        models="a scale of 1 is taken for none given",
        before=scale_is(lambda call: call.q.shape[2] ** -0.5 if call.softmax_scale == 1.0 else call.softmax_scale),
    ),
    "scale_in_bf16": Mutant(
        report="SCAL-05",
        models="scale times log2 e in bf16",
        reasons=SUBTLE,
        before=scale_is(lambda call: to_bf16(call.softmax_scale / LN2) * LN2),
    ),
    "scale_in_decode_only": Mutant(
        report="SCAL-02", models="0.3 % in decode", before=scale_is(lambda call: call.softmax_scale * 1.003), where=decode
    ),
    # The softcap
    "softcap_dropped_in_decode": Mutant(
        report="SCAP-01", models="no softcap in decode", before=having(softcap=0.0), where=decode
    ),
    "softcap_dropped_under_window": Mutant(
        report="SCAP-02", models="no softcap under a window", before=having(softcap=0.0), where=windowed
    ),
    "softcap_dropped_long": Mutant(
        report="SCAP-02", models="no softcap beyond 4,096 keys", before=having(softcap=0.0), where=long_context(4096)
    ),
    "softcap_dropped_with_sinks": Mutant(
        report="SCAP-01", models="no softcap with sinks", before=having(softcap=0.0), where=sunk
    ),
    "softcap_in_log2": Mutant(
        report="SCAP-02", models="the cap is applied to log2 units", before=softcap_is(lambda call: call.softcap * LN2)
    ),
    "softcap_before_scale": Mutant(
        report="SCAP-02",
        models="the cap comes before the scale",
        before=softcap_is(lambda call: call.softcap * call.softmax_scale),
    ),
    "softcap_after_mask": Mutant(
        report="SCAP-05",
        reasons=(*WRONG, *EMPTY),
        models="masked keys get the score -cap",
        after=masked_keys_weigh(lambda call: -call.softcap),
        where=capped,
    ),
    "softcap_compiled_in": Mutant(report="SCAP-01", models="the cap is always 50", before=softcap_is(lambda call: 50.0)),
    "softcap_ignores_k_scale": Mutant(
        report="SCAP-02",
        models="k_scale is applied after the cap, for the first kv head's scale of every sequence",
        before=then(softcap_is(lambda call: call.softcap * float(torch.as_tensor(call.k_scale).flatten()[0]))),
        where=all_of(capped, scaled),
    ),
    # Sinks
    "sinks_dropped": Mutant(report="SINK-02", models="no sink", before=having(sinks=None)),
    "sinks_dropped_8_bit": Mutant(
        report="SINK-03", models="no sink on an 8-bit cache", before=having(sinks=None), where=eight_bit
    ),
    "sinks_dropped_in_decode": Mutant(report="SINK-03", models="no sink in decode", before=having(sinks=None), where=decode),
    "sinks_dropped_under_window": Mutant(
        report="SINK-02", models="no sink under a window", before=having(sinks=None), where=windowed
    ),
    "sinks_dropped_large_batch": Mutant(
        report="SINK-02", models="no sink in batches above 64", before=having(sinks=None), where=batch_over(64)
    ),
    "sinks_dropped_long": Mutant(
        report="SINK-03", models="no sink beyond 4,096 keys", before=having(sinks=None), where=long_context(4096)
    ),
    "sink_twice": Mutant(report="SINK-04", models="each of two splits adds the sink", after=sink_twice("both")),
    "sink_lost_in_lse": Mutant(report="SINK-02", models="the LSE is that of the keys alone", after=sink_twice("lse", 0)),
    "sink_twice_in_lse": Mutant(report="SINK-04", models="the sink enters the LSE twice", after=sink_twice("lse")),
    "sink_scaled": Mutant(
        report="SINK-02", models="sinks are multiplied by the scale", before=sinks_are(lambda s, call: s * call.softmax_scale)
    ),
    "sink_in_log2": Mutant(report="SINK-02", models="sinks are taken for log2 units", before=sinks_are(lambda s, call: s * LN2)),
    "sink_of_first_head": Mutant(
        report="SINK-03", models="all heads have the first one's sink", before=sinks_are(lambda s, call: s[:1].expand_as(s))
    ),
    "sink_by_kv_head": Mutant(
        report="SINK-03",
        models="sinks are indexed by kv head",
        before=sinks_are(lambda s, call: s[torch.arange(len(s)) // (len(s) // call.k_cache.shape[2])]),
    ),
    "sink_in_bf16": Mutant(
        report="SINK-02", models="sinks in bf16", reasons=SUBTLE, before=sinks_are(lambda s, call: s.bfloat16().float())
    ),
    "sink_capped": Mutant(
        report="SINK-02",
        models="the softcap is applied to the sink too",
        before=sinks_are(lambda s, call: call.softcap * torch.tanh(s / call.softcap)),
        where=capped,
    ),
    # Groups of heads
    "group_padded_to_power_of_two": Mutant(
        report="GQAM-01",
        models="a group is padded to a power of two: later heads read a kv head too early",
        before=heads_read(lambda h, group, count: h // (1 << (group - 1).bit_length())),
        where=odd_group,
    ),
    "head_tiles_of_16": Mutant(
        report="GQAM-02",
        models="tiles of 16 heads read the first one's kv head",
        before=heads_read(lambda h, group, count: h // 16 * 16 // group),
    ),
    "head_modulo": Mutant(
        report="GQAM-03", models="h % kv_heads in place of h // group", before=heads_read(lambda h, group, count: h % count)
    ),
    "group_is_modulus": Mutant(
        report="GQAM-03", models="(h // group) % group", before=heads_read(lambda h, group, count: h // group % max(group, 1))
    ),
    "grouped_256_nan": Mutant(
        report="GQAM-07",
        models="NaN for groups where the keys are a multiple of 256",
        reasons=NAN,
        after=constants(math.nan, math.nan),
        where=all_of(grouped, lambda run: ((run.kv_len % 256 == 0) & (run.kv_len > 0))[:, None]),
    ),
    "grouped_batches_of_decode": Mutant(
        report="GQAM-08",
        models="the last group of heads is the first's, in decode batches",
        before=heads_read(lambda h, group, count: (h // group) % max(count - 1, 1)),
        where=all_of(decode, batch_over(8)),
    ),
    "wide_group_last_head": Mutant(
        report="GQAM-09",
        models="groups of 16: the last head of a group reads the next kv head",
        before=heads_read(lambda h, group, count: (h + 1) // group % count),
        where=group(16),
    ),
    # Head dims
    "query_reads_128_dims": Mutant(
        report="HDIM-02",
        models="at head dims under 128, the last two dims are lost",
        before=dims_are(lambda d: d - 2),
        where=when(lambda call: call.q.shape[2] < 128),
    ),
    "dims_in_32s": Mutant(
        report="HDIM-03", models="dims past a multiple of 32 are lost", before=dims_are(lambda d: d // 32 * 32)
    ),
    "dims_to_256": Mutant(report="HDIM-04", models="dims past 256 are lost", before=dims_are(lambda d: min(d, 256))),
    "value_dims_of_k": Mutant(
        report="HDIM-04",
        models="columns of V past K's head dim are 0",
        record=WIDE,
        after=lambda run, plan, out, lse: (out * (torch.arange(out.shape[-1]) < run.call.q.shape[2]), lse),
        where=uneven_dims,
    ),
    "odd_dims_last_column": Mutant(
        report="HDIM-03",
        models="at head dim 80 the last column is the one before",
        after=out_is(lambda out: torch.cat([out[..., :-1], out[..., -2:-1]], -1)),
        where=dim(80),
    ),
}
