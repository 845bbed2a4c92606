"""Mutants of calls: splits and their merge, LSE bases, what is kept between calls, races."""

from __future__ import annotations

import math

import torch

from oracle.mutants.addressing import as_seen_first
from oracle.mutants.masks import first_keys
from oracle.mutants.merging import (
    Splits,
    base_mixed,
    correct,
    equal_weights,
    gap,
    last_part_lost,
    merged_by,
    other_rows_weights,
    rounded_lse,
    rounded_parts,
    sink_in_each,
)
from oracle.mutants.mutant import Mutant
from oracle.mutants.results import constants, first_result, lse_is, out_is
from oracle.mutants.selectors import (
    all_of,
    batch_over,
    decode,
    every_call,
    head,
    last_head,
    long_context,
    long_row,
    not_first_sequence,
    one_in,
    out_given,
    padded,
    q_len_from,
    second_call,
    shape_seen_before,
)
from oracle.mutants.understood import CANARY, FLAKY, LATER, LSE, NAN, SUBTLE, WRONG_OR_NAN
from oracle.mutants.writing import unpadded

LN2 = math.log(2.0)

FAULTS: dict[str, Mutant] = {
    # Splits and their merge
    "splits_equal_weights": Mutant(report="SPLT-02", models="splits are averaged", body=merged_by(equal_weights)),
    "split_key_lost": Mutant(report="SPLT-09", models="a key between two splits is lost", body=merged_by(correct, ranges=gap(1))),
    "split_key_twice": Mutant(
        report="SPLT-09", models="a key between two splits counts twice", body=merged_by(correct, ranges=gap(-1))
    ),
    "split_key_lost_long": Mutant(
        report="SPLT-02",
        models="a key between two splits is lost beyond 4,096 keys",
        body=merged_by(correct, ranges=gap(1)),
        where=long_context(4096),
    ),
    "last_split_lost": Mutant(
        report="SPLT-07", models="the last split is not merged", body=merged_by(last_part_lost), where=decode
    ),
    "last_split_lost_short": Mutant(
        report="SPLT-07",
        models="short sequences have one split too few",
        body=merged_by(last_part_lost, Splits(parts=2)),
        where=lambda run: (run.kv_len <= 64)[:, None],
    ),
    "merge_index_padded": Mutant(
        report="SPLT-04",
        models="the merge of five new tokens or more takes another row's weights",
        reasons=WRONG_OR_NAN,
        body=merged_by(other_rows_weights),
        where=all_of(q_len_from(5), not_first_sequence),
    ),
    "packed_rows_misplaced": Mutant(
        report="SPLT-05",
        models="rows of draft tokens are stored one place on",
        after=lambda run, plan, out, lse: (out.roll(1, 0), lse.roll(1, 0)),
        where=lambda run: ((run.q_len > 1) & (run.q_len <= 8))[:, None],
    ),
    "split_scratch_stale": Mutant(
        report="SPLT-10",
        models="a later call of the same shapes merges the partial results of the first",
        reasons=LATER,
        after=first_result,
        where=all_of(shape_seen_before, head(2)),
    ),
    "split_batch_over_one": Mutant(
        report="SPLT-11",
        models="with more than 64 sequences the last split is lost",
        body=merged_by(last_part_lost),
        where=batch_over(64),
    ),
    "sink_in_each_split": Mutant(report="SINK-04", models="every split adds the sink", body=merged_by(sink_in_each)),
    "partials_in_bf16": Mutant(
        report="ACCU-02",
        models="splits keep their results in bf16",
        reasons=SUBTLE,
        body=merged_by(rounded_parts(torch.bfloat16)),
    ),
    "partial_lse_in_bf16": Mutant(
        report="SPLT-02", models="splits keep their LSE in bf16", reasons=SUBTLE, body=merged_by(rounded_lse(torch.bfloat16))
    ),
    # LSE bases
    "lse_in_log2": Mutant(report="LSEB-05", models="the LSE is a log2", reasons=LSE, after=lse_is(lambda lse: lse / LN2)),
    "lse_times_ln2": Mutant(
        report="LSEB-03", models="a natural LSE is multiplied by ln 2 once more", reasons=LSE, after=lse_is(lambda lse: lse * LN2)
    ),
    "lse_in_log2_decode": Mutant(
        report="LSEB-05", models="the LSE is a log2 in decode", reasons=LSE, after=lse_is(lambda lse: lse / LN2), where=decode
    ),
    "merge_takes_log2_for_ln": Mutant(
        report="LSEB-01", models="log2 LSEs are merged as natural ones", body=merged_by(base_mixed(1 / LN2))
    ),
    "merge_takes_ln_for_log2": Mutant(
        report="LSEB-03", models="natural LSEs are merged as log2", body=merged_by(base_mixed(LN2))
    ),
    "lse_maximum_only": Mutant(
        report="LSEB-06",
        models="the LSE lacks the log of the sum where a row sees more than 64 keys",
        reasons=LSE,
        after=lse_is(lambda lse: lse - 0.5),
        where=long_row(64),
    ),
    "lse_small_offset": Mutant(
        report="LSEB-06", models="the LSE is 2^-10 too large", reasons=LSE, after=lse_is(lambda lse: lse + 2.0**-10)
    ),
    # What is kept between calls
    "stale_page_table": Mutant(
        report="PLAN-02", models="a replayed plan keeps the first page table", reasons=LATER, before=as_seen_first("page_table")
    ),
    "stale_lengths": Mutant(
        report="PLAN-02", models="a replayed plan keeps the first lengths", reasons=LATER, before=as_seen_first("seqused_k")
    ),
    "stale_offsets": Mutant(
        report="PLAN-02",
        models="a replayed plan keeps the first offsets of q",
        reasons=LATER,
        before=as_seen_first("cu_seqlens_q"),
    ),
    "stale_scales": Mutant(
        report="PLAN-03",
        models="a replayed graph keeps the first dequantisation scales",
        reasons=LATER,
        before=as_seen_first("k_scale", "v_scale"),
    ),
    "stale_sinks": Mutant(
        report="PLAN-03", models="a replayed graph keeps the first sinks", reasons=LATER, before=as_seen_first("sinks")
    ),
    "stale_mask": Mutant(
        report="PLAN-06",
        models="window and causal rule are those of the first call of these shapes",
        reasons=LATER,
        before=as_seen_first("causal", "window_size"),
    ),
    "stale_softcap": Mutant(
        report="SCAP-01",
        models="the softcap is that of the first call of these shapes",
        reasons=LATER,
        before=as_seen_first("softcap"),
    ),
    "stale_scale": Mutant(
        report="SCAP-01",
        models="the softmax scale is that of the first call of these shapes",
        reasons=LATER,
        before=as_seen_first("softmax_scale"),
    ),
    "stale_output": Mutant(
        report="ARCH-11", models="an equal call gives the first result of its shapes", reasons=LATER, after=first_result
    ),
    "padding_rows_of_replay": Mutant(
        report="PLAN-04",
        models="sequences past num_seqs write their rows",
        reasons=CANARY,
        where=all_of(padded, out_given),
        write=unpadded,
    ),
    # Races
    "second_call_last_head": Mutant(
        report="RACE-01",
        models="from the second call on the last head is off by 1 %",
        reasons=LATER,
        after=out_is(lambda out: out * 1.01),
        where=all_of(second_call, last_head),
    ),
    "one_call_in_five": Mutant(
        report="RACE-02",
        models="every fifth call reads statistics too early",
        reasons=(*FLAKY, *LATER),
        body=merged_by(equal_weights),
        where=every_call(5),
    ),
    "last_bit_one_call_in_three": Mutant(
        report="SPLT-03",
        models="every third call moves the last bit of one row in 50",
        reasons=FLAKY,
        after=out_is(lambda out: out * (1 + torch.finfo(out.dtype).eps)),
        where=all_of(every_call(3), one_in(50)),
    ),
    "one_nan_in_40_calls": Mutant(
        report="RACE-05",
        models="every 40th call gives one NaN in ten",
        reasons=(*NAN, *FLAKY),
        after=constants(math.nan, math.nan),
        where=all_of(every_call(40), one_in(10)),
    ),
    "reduction_reused": Mutant(
        report="RACE-04",
        models="every second call of a decode batch mixes two rows' sums",
        reasons=(*FLAKY, *LATER),
        after=lambda run, plan, out, lse: (out.roll(1, 0), lse),
        where=all_of(every_call(2), decode, batch_over(1)),
    ),
    "reflects_one_key": Mutant(
        report="RACE-06", models="a decode row reflects its last key only", mask=first_keys(lambda r: r.plan.hi - 1), where=decode
    ),
}
