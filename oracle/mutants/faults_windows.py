"""Mutants of windows, and of masks that the contract lacks."""

from __future__ import annotations

import math

import torch

from oracle.mutants.addressing import kv_lens_are
from oracle.mutants.masks import (
    down_to,
    last_keys,
    window_starts,
)
from oracle.mutants.mutant import Mutant
from oracle.mutants.patches import having, window_is
from oracle.mutants.results import constants
from oracle.mutants.selectors import (
    all_of,
    batch_over,
    capped,
    decode,
    eight_bit,
    heads_from,
    long_context,
    not_causal,
    one_in,
    several_tokens,
    sunk,
    token_from,
    two_sided,
    windowed,
    with_prefix,
)
from oracle.mutants.tails import masked_keys_weigh
from oracle.mutants.understood import ATTENDED, EMPTY, NAN, WRONG

FAULTS: dict[str, Mutant] = {
    # Windows
    "window_ignored": Mutant(report="WIND-14", models="no window", before=having(window_size=(-1, -1))),
    "window_ignored_in_decode": Mutant(
        report="WIND-11", models="no window in decode", before=having(window_size=(-1, -1)), where=decode
    ),
    "window_ignored_with_prefix": Mutant(
        report="WIND-13",
        models="the window of a chunk's continuation is dropped",
        before=having(window_size=(-1, -1)),
        where=all_of(with_prefix, several_tokens),
    ),
    "window_tile_granular": Mutant(
        report="WIND-02", models="the window only skips whole tiles of 64", mask=window_starts(lambda r, left: down_to(64)(r))
    ),
    "window_page_granular": Mutant(
        report="WIND-15",
        models="the window only drops whole pages",
        mask=window_starts(lambda r, left: r.plan.lo // r.page_size * r.page_size),
    ),
    "window_tile_of_eight": Mutant(
        report="WIND-02",
        models="the window only skips whole tiles of 8, in 16-row tiles after the first",
        mask=window_starts(lambda r, left: down_to(8)(r)),
        where=token_from(16),
    ),
    "window_plus_one_in_decode": Mutant(
        report="WIND-05",
        models="a window of one key too many in decode",
        mask=window_starts(lambda r, left: r.plan.pos - left - 1),
        where=decode,
    ),
    "window_minus_one_long": Mutant(
        report="WIND-09",
        models="a window of one key too few beyond 4,096 keys",
        mask=window_starts(lambda r, left: r.plan.pos - left + 1),
        where=long_context(4096),
    ),
    "window_plus_one_with_prefix": Mutant(
        report="WIND-05",
        models="a window of one key too many where a prefill has a prefix",
        mask=window_starts(lambda r, left: r.plan.pos - left - 1),
        where=all_of(with_prefix, several_tokens),
    ),
    "window_plus_one_with_sinks": Mutant(
        report="WIND-05",
        models="a window of one key too many with sinks",
        mask=window_starts(lambda r, left: r.plan.pos - left - 1),
        where=sunk,
    ),
    "window_plus_one_capped": Mutant(
        report="WIND-05",
        models="a window of one key too many with a softcap",
        mask=window_starts(lambda r, left: r.plan.pos - left - 1),
        where=capped,
    ),
    "window_minus_one_large_batch": Mutant(
        report="WIND-09",
        models="a window of one key too few in batches above 64",
        mask=window_starts(lambda r, left: r.plan.pos - left + 1),
        where=batch_over(64),
    ),
    "window_minus_one_8_bit": Mutant(
        report="WIND-09",
        models="a window of one key too few on an 8-bit cache",
        mask=window_starts(lambda r, left: r.plan.pos - left + 1),
        where=eight_bit,
    ),
    "window_plus_one_one_in_100": Mutant(
        report="WIND-05",
        models="a window of one key too many, one (row, head) in a hundred",
        mask=window_starts(lambda r, left: r.plan.pos - left - 1),
        where=one_in(100),
    ),
    "window_at_tile_edge": Mutant(
        report="WIND-02",
        models="a window that starts one key into a tile of 64 starts with the tile",
        mask=window_starts(lambda r, left: torch.where(r.plan.lo % 64 == 1, r.plan.lo - 1, r.plan.lo)),
    ),
    "window_right_as_left": Mutant(
        report="WIND-07", models="the right side of a window is its left side", before=window_is(lambda left, right: (left, left))
    ),
    "window_right_ignored": Mutant(
        report="WIND-07", models="the right side of a window is ignored", before=window_is(lambda left, right: (left, -1))
    ),
    "window_left_ignored_two_sided": Mutant(
        report="WIND-07",
        models="the left side of a two-sided window is ignored",
        before=window_is(lambda left, right: (-1, right)),
        where=all_of(two_sided, not_causal),
    ),
    "window_no_left_is_zero": Mutant(
        report="WIND-05",
        models="no limit on the left, -1, is taken for 0",
        before=window_is(lambda left, right: (max(left, 0), right)),
    ),
    "window_no_right_is_zero": Mutant(
        report="WIND-05",
        models="no limit on the right, -1, is taken for 0",
        before=window_is(lambda left, right: (left, max(right, 0))),
    ),
    "window_right_off_by_one": Mutant(
        report="WIND-05",
        models="the right side of a window has one key too few",
        before=window_is(lambda left, right: (left, right - 1 if right > 0 else right)),
    ),
    "window_from_last_key": Mutant(
        report="WIND-03",
        models="the window of every draft token starts where that of the first does",
        mask=window_starts(lambda r, left: r.kv_len - r.q_len - left),
        where=several_tokens,
    ),
    "window_from_end": Mutant(
        report="WIND-17",
        models="the window of every row is counted from the last key",
        reasons=(*WRONG, *EMPTY),
        mask=window_starts(lambda r, left: r.kv_len - 1 - left),
        where=several_tokens,
    ),
    "window_is_chunks": Mutant(
        report="WIND-18",
        models="chunked attention in place of a window",
        mask=window_starts(lambda r, left: r.plan.pos // (left + 1) * (left + 1)),
    ),
    "window_shorter_sequences": Mutant(
        report="WIND-19",
        models="the window of sequences shorter than the longest starts a key late",
        mask=window_starts(lambda r, left: torch.where(r.kv_len < r.longest, r.plan.pos - left + 1, r.plan.lo)),
    ),
    "window_two_sided_long_nan": Mutant(
        report="WIND-20",
        models="NaN with a finite LSE: not causal, a window, several tokens, a long context",
        reasons=NAN,
        after=lambda run, plan, out, lse: (out * math.nan, lse),
        where=all_of(windowed, not_causal, several_tokens, long_context(1000)),
    ),
    "window_ring_wraps": Mutant(
        report="WIND-21",
        models="a ring buffer of window keys is read in logical order once it has wrapped",
        mask=window_starts(
            lambda r, left: torch.where(r.plan.pos > left, r.plan.lo + (r.plan.pos + 1) % (left + 1) // 2, r.plan.lo)
        ),
        where=decode,
    ),
    "window_partial_write": Mutant(
        report="WIND-22",
        models="a chunk that does not fill the window's ring loses the ring's oldest keys",
        mask=window_starts(lambda r, left: torch.where(r.kv_len > left, r.plan.lo + 1, r.plan.lo)),
        where=all_of(with_prefix, several_tokens, lambda run: (run.q_len < run.call.window_size[0])[:, None]),
    ),
    "window_of_last_heads": Mutant(
        report="WIND-11", models="no window from the ninth head on", before=having(window_size=(-1, -1)), where=heads_from(9)
    ),
    "window_over_1000_ignored": Mutant(
        report="WIND-11",
        models="a window of 1,000 keys or more is ignored",
        before=having(window_size=(-1, -1)),
        where=lambda run: torch.tensor([[run.call.window_size[0] >= 999]]),
    ),
    # Masks that the contract lacks, faults that it can have
    "zeros_in_some_rows": Mutant(
        report="MASK-04",
        models="every 37th row is 0",
        after=constants(0.0, 0.0),
        where=lambda run: (run.plan.row % 37 == 36)[:, None],
    ),
    "loop_ends_at_causal_tile": Mutant(
        report="MASK-05",
        models="without a causal mask the key loop still ends at the causal tile of 64",
        mask=last_keys(lambda r: -(-(r.plan.pos + 1) // 64) * 64),
        where=not_causal,
    ),
    "longer_than_said": Mutant(
        report="MASK-08",
        models="a length of one key is ignored: the whole page is read",
        reasons=ATTENDED,
        before=kv_lens_are(lambda n, call: torch.where(n == 1, call.k_cache.shape[1], n)),
        where=lambda run: (run.kv_len == 1)[:, None],
    ),
    "masked_keys_at_minus_20": Mutant(
        report="MASK-10",
        reasons=(*WRONG, *EMPTY),
        models="the mask adds -20 where it should be -inf",
        after=masked_keys_weigh(lambda call: -20.0),
        where=several_tokens,
    ),
}
