"""Mutants in rare company: only at one value, or where two or three options meet."""

from __future__ import annotations

import math

import torch

from oracle.mutants.addressing import kv_lens_are, live_pages_are, pages_are, table_of_other_rows
from oracle.mutants.masks import causal_ends, first_keys, last_keys, window_starts
from oracle.mutants.mutant import Mutant
from oracle.mutants.patches import having, scales_are, softcap_is, tf32, values_are, window_is
from oracle.mutants.results import constants, lse_is, out_is
from oracle.mutants.selectors import (
    after_sequence_without_queries,
    all_of,
    batch_is,
    batch_over,
    capped,
    decode,
    dim,
    dtype,
    eight_bit,
    head,
    kv_len_is,
    last_tokens,
    long_context,
    one_in,
    out_given,
    padded,
    page_size,
    q_len_is,
    scaled,
    several_tokens,
    sunk,
    unless,
    window_starts_after,
    windowed,
    with_prefix,
    without_lse,
    without_prefix,
)
from oracle.mutants.tails import tail_times_zero
from oracle.mutants.understood import EMPTY, LSE, NAN, OUT, PAGES, SUBTLE, TAIL, WRONG
from oracle.references.arithmetic import Arithmetic, Planted
from oracle.references.emulator import record_of

WIDE = record_of(Arithmetic())
_PLUS_ONE = window_starts(lambda r, left: r.plan.pos - left - 1)
_LAST_KEY_LOST = last_keys(lambda r: torch.where(r.plan.hi - r.plan.lo > 1, r.plan.hi - 1, r.plan.hi))

FAULTS: dict[str, Mutant] = {
    # One value
    "softcap_truncated": Mutant(
        report="SCAP-01", models="the softcap is an integer", before=softcap_is(lambda call: float(int(call.softcap)) or 1.0)
    ),
    "softcap_below_one_off": Mutant(
        report="SCAP-02",
        models="a softcap below 1 is taken for none",
        before=having(softcap=0.0),
        where=lambda run: torch.tensor([[0 < run.call.softcap < 1]]),
    ),
    "window_int16": Mutant(
        report="IOVF-11",
        models="a window of 2^15 keys or more wraps below 0",
        reasons=(*WRONG, *EMPTY),
        before=window_is(lambda left, right: (left if left < 2**15 else 0, right)),
    ),
    "page_zero_is_null": Mutant(
        report="PTAB-02",
        models="page 0 is taken for the null page and read as page 1",
        reasons=PAGES,
        before=pages_are(lambda t, call: torch.where(t == 0, 1, t)),
    ),
    "batch_over_128": Mutant(
        report="BVAR-05", models="batches above 128 lose each row's last key", mask=_LAST_KEY_LOST, where=batch_over(128)
    ),
    "batch_of_16_32_64": Mutant(
        report="BVAR-05",
        models="a batch that fills its bucket loses each row's last key",
        mask=_LAST_KEY_LOST,
        where=batch_is(16, 32, 64),
    ),
    "query_tile_full": Mutant(
        report="GRID-04",
        models="the last 16 rows are not computed where new tokens fill tiles of 64",
        reasons=OUT,
        after=out_is(torch.zeros_like),
        where=all_of(q_len_is(0, 64), last_tokens(16)),
    ),
    "query_tile_of_16_full": Mutant(
        report="GRID-04",
        models="the last row is not computed where new tokens fill tiles of 16",
        reasons=OUT,
        after=out_is(torch.zeros_like),
        where=all_of(q_len_is(0, 16), last_tokens(1)),
    ),
    "key_tile_full": Mutant(
        report="PAGE-13",
        models="the last 64 keys are lost in decode where the keys fill tiles of 128",
        mask=last_keys(lambda r: torch.where(r.plan.hi - r.plan.lo > 64, r.plan.hi - 64, r.plan.hi)),
        where=all_of(decode, kv_len_is(0, 128)),
    ),
    "keys_fill_one_page": Mutant(
        report="TAIL-12",
        models="a sequence of exactly one page loses its last key",
        mask=_LAST_KEY_LOST,
        where=lambda run: (run.kv_len == run.call.k_cache.shape[1])[:, None],
    ),
    "two_keys": Mutant(
        report="XLOG-02",
        models="rows of two keys take the first only",
        mask=_LAST_KEY_LOST,
        where=lambda run: (run.plan.hi - run.plan.lo == 2)[:, None],
    ),
    "fp32_in_tf32": Mutant(
        report="XLOG-09",
        models="float32 operands are cut to 10 bits",
        reasons=SUBTLE,
        record=WIDE,
        before=values_are(tf32, "q", "k_cache", "v_cache"),
        where=dtype(torch.float32),
    ),
    "lse_one_in_1000": Mutant(
        report="LSEB-05",
        models="the LSE of one (row, head) in a thousand is a log2",
        reasons=LSE,
        after=lse_is(lambda lse: lse / math.log(2)),
        where=one_in(1000),
    ),
    "last_sequence_of_padded_batch": Mutant(
        report="PLAN-04",
        models="the last live sequence of a padded batch is left out",
        reasons=WRONG,
        after=constants(0.0, 0.0),
        where=all_of(padded, lambda run: (run.plan.seq == run.call.live_seqs - 1)[:, None]),
    ),
    "table_row_after_no_queries": Mutant(
        report="KVWR-04",
        models="after a sequence without new tokens the table row is the one before",
        reasons=PAGES,
        before=pages_are(table_of_other_rows),
        where=after_sequence_without_queries,
    ),
    "window_starts_late_beyond_4096": Mutant(
        report="WIND-09",
        models="a window that starts beyond key 4,096 starts a key late",
        mask=first_keys(lambda r: r.plan.lo + 1),
        where=window_starts_after(4097),
    ),
    # What the caller asks for
    "without_lse_sinks_lost": Mutant(
        report="SINK-03", models="the path without an LSE has no sinks", reasons=OUT, before=having(sinks=None), where=without_lse
    ),
    "without_lse_tail": Mutant(
        report="TAIL-08",
        models="the path without an LSE multiplies 0 x V past the last key",
        reasons=TAIL,
        after=tail_times_zero("v_cache"),
        where=without_lse,
    ),
    "without_lse_future_key": Mutant(
        report="CAUS-09",
        models="the path without an LSE sees the next key in pairs of rows",
        reasons=OUT,
        mask=causal_ends(lambda r: r.plan.hi + 1 - r.index % 2),
        where=without_lse,
    ),
    "without_out_window_ignored": Mutant(
        report="WIND-13",
        models="the path that allocates its output has no window",
        before=having(window_size=(-1, -1)),
        where=unless(out_given),
    ),
    # Two or three options together
    "window_sinks_softcap": Mutant(
        report="WIND-05",
        models="a window of one key too many with sinks and a softcap",
        mask=_PLUS_ONE,
        where=all_of(windowed, sunk, capped),
    ),
    "window_8_bit_decode_head_2": Mutant(
        report="WIND-11",
        models="the second head of decode on an 8-bit cache has no window",
        before=having(window_size=(-1, -1)),
        where=all_of(eight_bit, decode, head(2)),
    ),
    "softcap_8_bit_prefix": Mutant(
        report="SCAP-01",
        models="an 8-bit cache's prefix prefill drops the softcap",
        before=having(softcap=0.0),
        where=all_of(eight_bit, with_prefix, several_tokens),
    ),
    "sinks_fp16_page_64_decode": Mutant(
        report="SINK-03",
        models="in fp16 with pages of 64 decode has no sinks",
        before=having(sinks=None),
        where=all_of(dtype(torch.float16), page_size(64), decode),
    ),
    "sinks_whole_prompt": Mutant(
        report="SINK-02",
        models="a prompt without a prefix has no sinks",
        before=having(sinks=None),
        where=all_of(without_prefix, several_tokens),
    ),
    "scales_80_dims_fp16": Mutant(
        report="QUAN-03",
        models="v_scale is lost at head dim 80 in fp16",
        before=having(v_scale=None),
        where=all_of(dim(80), dtype(torch.float16), scaled),
    ),
    "scales_padded_batch": Mutant(
        report="QUAN-11",
        models="in a padded batch each sequence has the next one's v_scale",
        before=scales_are(lambda t: t.roll(-1, 0), "v_scale"),
        where=padded,
    ),
    "window_long_8_bit": Mutant(
        report="WIND-11",
        models="beyond 4,096 keys an 8-bit cache has no window",
        before=having(window_size=(-1, -1)),
        where=all_of(eight_bit, long_context(4096)),
    ),
    "window_sinks_long": Mutant(
        report="SINK-02",
        models="beyond 4,096 keys a window drops the sinks",
        before=having(sinks=None),
        where=all_of(windowed, long_context(4096)),
    ),
    "page_64_long_stale": Mutant(
        report="PAGE-01",
        models="beyond 4,096 keys with pages of 64 the 64th page is the 63rd",
        before=live_pages_are(lambda place, count, call: torch.where(place == 63, 62, place)),
        where=all_of(page_size(64), long_context(4096)),
    ),
    "wide_heads_long": Mutant(
        report="QUAN-18",
        models="at head dim 512 beyond 4,096 keys the second tile is left out of P.V",
        reasons=OUT,
        arithmetic=Arithmetic(planted=Planted(skipped_tile=1)),
        where=all_of(dim(512), long_context(4096)),
    ),
    "tail_windowed_8_bit": Mutant(
        report="TAIL-05",
        models="an 8-bit cache under a window: 0 x V past the last key",
        reasons=TAIL,
        after=tail_times_zero("v_cache"),
        where=all_of(windowed, eight_bit),
    ),
    "not_causal_capped_sunk": Mutant(
        report="MASK-05",
        models="not causal with softcap and sinks: causal after all",
        before=having(causal=True),
        where=all_of(capped, sunk),
    ),
    "draft_token_after_full_page": Mutant(
        report="TAIL-12",
        models="draft tokens past a full page lose the page's last key",
        mask=last_keys(lambda r: torch.where(r.plan.hi - r.plan.lo > 1, r.plan.hi - 1, r.plan.hi)),
        where=lambda run: ((run.q_len > 1) & (run.q_len <= 8) & ((run.kv_len - run.q_len) % run.call.k_cache.shape[1] == 0))[
            :, None
        ],
    ),
    "one_token_chunk_of_short": Mutant(
        report="PAGE-13",
        models="a new token on five keys sees one",
        mask=first_keys(lambda r: r.plan.hi - 1),
        where=all_of(decode, lambda run: (run.kv_len == 5)[:, None]),
    ),
    "length_one_tail": Mutant(
        report="MASK-08",
        models="fp16: a length of one key in decode is read as two",
        reasons=(*WRONG, *TAIL),
        before=kv_lens_are(lambda n, call: torch.where(n == 1, 2, n)),
        where=all_of(dtype(torch.float16), decode, lambda run: (run.kv_len == 1)[:, None]),
    ),
    "odd_dims_nan": Mutant(
        report="HDIM-03",
        models="head dim 80 or 96 with sinks gives NaN",
        reasons=NAN,
        after=constants(math.nan, math.nan),
        where=all_of(dim(80, 96), sunk),
    ),
}
