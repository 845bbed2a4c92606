"""Mutants of memory: what lies past the plan, rows never written, writes where there should be none."""

from __future__ import annotations

import math

from oracle.mutants.addressing import kv_lens_are, one_page_more, whole_last_page
from oracle.mutants.mutant import Mutant
from oracle.mutants.results import constants
from oracle.mutants.selectors import (
    all_of,
    batch_over,
    decode,
    dim,
    dim_from,
    grouped,
    last_head,
    last_row,
    long_context,
    more_queries_than_keys,
    no_keys_in_sequence,
    not_causal,
    odd_group,
    one_in,
    out_given,
    padded,
    rows_over,
    when,
    windowed,
    without_keys,
)
from oracle.mutants.tails import q_tail_times_zero, slot_zero_times_zero, tail_leaks, tail_raises_maximum, tail_times_zero
from oracle.mutants.understood import ATTENDED, CANARY, EMPTY, INPUTS, LSE, NAN, OUT, TAIL, WRONG, WRONG_OR_NAN
from oracle.mutants.writing import (
    added,
    advance,
    append_key,
    as_if_packed,
    clamp_ids,
    clear_page_zero,
    columns_left_out,
    inputs_change,
    left_out,
    lse_left_out,
    lse_transposed,
    neighbours_zeroed,
    out_left_out,
    padding_zeroed,
    row_before,
    scale_in_place,
)

_NAN = constants(math.nan, math.nan)

FAULTS: dict[str, Mutant] = {
    # What lies past the plan is read
    "v_tail_times_zero": Mutant(
        report="TAIL-02", models="0 x V past the last key", reasons=TAIL, after=tail_times_zero("v_cache")
    ),
    "v_tail_of_eight": Mutant(
        report="TAIL-04", models="V is loaded by eight tokens", reasons=TAIL, after=tail_times_zero("v_cache", 8)
    ),
    "v_tail_of_two": Mutant(
        report="TAIL-04", models="V is loaded by two tokens", reasons=TAIL, after=tail_times_zero("v_cache", 2)
    ),
    "k_tail_masked_by_adding": Mutant(
        report="TAIL-15", models="-inf is added to a score of NaN", reasons=TAIL, after=tail_times_zero("k_cache")
    ),
    "v_tail_long_only": Mutant(
        report="TAIL-21",
        models="the last tile is checked, but not beyond 4,096 keys",
        reasons=TAIL,
        after=tail_times_zero("v_cache"),
        where=long_context(4096),
    ),
    "v_tail_wide_heads_grouped": Mutant(
        report="TAIL-21",
        models="the bounds check is compiled out for groups at head dim 256",
        reasons=TAIL,
        after=tail_times_zero("v_cache"),
        where=all_of(dim(256), grouped),
    ),
    "v_tail_windowed_only": Mutant(
        report="TAIL-05",
        models="0 x V past the last key, under a window",
        reasons=TAIL,
        after=tail_times_zero("v_cache"),
        where=windowed,
    ),
    "v_tail_fp8_only": Mutant(
        report="TAIL-08",
        models="slots of the last page are cleared, but not in an 8-bit cache",
        reasons=TAIL,
        after=tail_times_zero("v_cache"),
        where=when(lambda call: call.v_cache.dtype.itemsize == 1),
    ),
    "tail_raises_maximum": Mutant(
        report="TAIL-17", models="a stale key joins the running maximum", reasons=ATTENDED, after=tail_raises_maximum
    ),
    "tail_leaks_a_little": Mutant(
        report="TAIL-17", models="a stale value enters with a weight of 2^-13", reasons=ATTENDED, after=tail_leaks(2.0**-13)
    ),
    "tail_attended_not_causal": Mutant(
        report="TAIL-03",
        models="without a causal mask the loop runs to the end of the page",
        reasons=ATTENDED,
        before=kv_lens_are(whole_last_page),
        where=not_causal,
    ),
    "one_page_more": Mutant(
        report="TAIL-12",
        models="a page too many in decode where the length fills its pages",
        reasons=ATTENDED,
        before=kv_lens_are(one_page_more),
        where=decode,
    ),
    "q_tail_times_zero": Mutant(
        report="TAIL-07", models="q rows past the plan share a tile", reasons=TAIL, after=q_tail_times_zero(128)
    ),
    "q_tail_of_sixteen": Mutant(
        report="TAIL-18", models="q rows past the plan share a tile of 16", reasons=TAIL, after=q_tail_times_zero(16)
    ),
    "q_tail_small_batch": Mutant(
        report="TAIL-13",
        models="padding rows spoil the tile of decode rows",
        reasons=TAIL,
        after=q_tail_times_zero(32),
        where=all_of(decode, batch_over(16)),
    ),
    "scratch_slot_zero": Mutant(
        report="TAIL-09",
        models="above 64 rows masked lanes gather a slot nobody wrote",
        reasons=TAIL,
        after=slot_zero_times_zero,
        where=rows_over(64),
    ),
    "padding_row_spreads": Mutant(
        report="TAIL-14",
        models="a sequence without keys turns the next one into NaN",
        reasons=WRONG_OR_NAN,
        after=_NAN,
        where=lambda run: ((run.call.seqused_k.long().roll(1)[run.plan.seq] == 0) & (run.plan.seq > 0))[:, None],
    ),
    # Rows never written, and others written instead
    "not_written_one_in_1000": Mutant(
        report="UNWR-09", models="one (row, head) in a thousand is not written", reasons=OUT, where=one_in(1000), write=left_out
    ),
    "not_written_not_causal": Mutant(
        report="UNWR-02",
        models="without a causal mask the output is added to the buffer",
        reasons=WRONG_OR_NAN,
        where=not_causal,
        write=added,
    ),
    "empty_rows_not_written": Mutant(
        report="UNWR-03", models="rows that see nothing are skipped", reasons=EMPTY, where=without_keys, write=left_out
    ),
    "empty_rows_lse_not_written": Mutant(
        report="UNWR-03",
        models="the LSE of rows that see nothing is skipped",
        reasons=EMPTY,
        where=without_keys,
        write=lse_left_out,
    ),
    "empty_sequence_writes_on": Mutant(
        report="UNWR-05",
        models="a sequence without keys zeroes a row of the next",
        reasons=(*WRONG, *CANARY),
        where=no_keys_in_sequence,
        write=neighbours_zeroed,
    ),
    "more_queries_than_keys_nan": Mutant(
        report="UNWR-06",
        models="NaN where new tokens outnumber keys",
        reasons=(*NAN, *EMPTY),
        after=_NAN,
        where=more_queries_than_keys,
    ),
    "last_head_of_odd_group": Mutant(
        report="UNWR-08",
        models="heads beyond the largest power of two are not written",
        reasons=OUT,
        where=all_of(odd_group, last_head),
        write=left_out,
    ),
    "out_stride_ignored": Mutant(
        report="UNWR-09", models="the output is written as if packed", reasons=(*CANARY, *WRONG), write=as_if_packed
    ),
    "window_decode_not_copied": Mutant(
        report="UNWR-10",
        models="in decode a window's result stays in a temporary",
        reasons=OUT,
        where=all_of(windowed, decode),
        write=out_left_out,
    ),
    "no_keys_nan": Mutant(
        report="UNWR-11", models="NaN for a sequence without keys", reasons=EMPTY, after=_NAN, where=no_keys_in_sequence
    ),
    "columns_from_128_not_written": Mutant(
        report="UNWR-12", models="only 128 columns are written", reasons=OUT, where=dim_from(256), write=columns_left_out(128)
    ),
    "no_keys_wide_heads": Mutant(
        report="UNWR-13",
        models="a sequence without keys at head dim 256 gives NaN",
        reasons=EMPTY,
        after=_NAN,
        where=all_of(no_keys_in_sequence, dim(256)),
    ),
    "last_lse_not_written": Mutant(
        report="UNWR-12",
        models="the LSE of a sequence's last row is not written",
        reasons=LSE,
        where=last_row,
        write=lse_left_out,
    ),
    "padding_zeroed": Mutant(
        report="PLAN-04", models="a whole tile of 16 rows is written", reasons=CANARY, write=padding_zeroed(16)
    ),
    "padding_zeroed_in_decode_batches": Mutant(
        report="PLAN-04",
        models="padded batches write their padding rows",
        reasons=CANARY,
        where=all_of(padded, out_given),
        write=padding_zeroed(64),
    ),
    "row_before_first": Mutant(
        report="SPLT-05", models="the last row is written once more before the first", reasons=CANARY, write=row_before
    ),
    "lse_written_transposed": Mutant(
        report="STRD-11", models="a transposed LSE is taken for a contiguous one", reasons=LSE, write=lse_transposed
    ),
    # Arguments written
    "q_scaled_in_place": Mutant(
        report="KVWR-02",
        models="q is multiplied by the scale in place",
        reasons=INPUTS,
        write=inputs_change("q", scale_in_place),
    ),
    "page_table_cleaned_in_place": Mutant(
        report="PTAB-02",
        models="ids out of range become 0 in the caller's table",
        reasons=INPUTS,
        write=inputs_change("page_table", clamp_ids),
    ),
    "lengths_advanced": Mutant(
        report="PLAN-02",
        models="lengths are advanced for the next step",
        reasons=INPUTS,
        write=inputs_change("seqused_k", advance),
    ),
    "key_appended": Mutant(
        report="PTAB-03",
        models="the next key is written past the allocated pages",
        reasons=INPUTS,
        write=inputs_change("k_cache", append_key),
    ),
    "padding_overwrites_page": Mutant(
        report="PLAN-07",
        models="padding rows of a replayed batch overwrite page 0",
        reasons=INPUTS,
        where=padded,
        write=inputs_change("v_cache", clear_page_zero),
    ),
}
