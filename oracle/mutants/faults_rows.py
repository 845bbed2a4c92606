"""Mutants of rows: without keys, of ragged batches, and never launched."""

from __future__ import annotations

import math

from oracle.mutants.addressing import even_split, q_lens_are
from oracle.mutants.masks import last_keys, positions
from oracle.mutants.merging import Splits, empty_is_plus_inf, merged_by, nan_from_empty, without_guard
from oracle.mutants.mutant import Mutant
from oracle.mutants.results import constants
from oracle.mutants.selectors import (
    all_of,
    batch_over,
    first_row,
    heads_from,
    more_queries_than_keys,
    no_keys_in_sequence,
    not_causal,
    not_first_sequence,
    q_len_from,
    several_tokens,
    sunk,
    token_from,
    two_sided,
    window_starts_after,
    windowed,
    with_prefix,
    without_keys,
)
from oracle.mutants.tails import mean_value
from oracle.mutants.understood import EMPTY, LSE, NAN, OUT, WRONG, WRONG_OR_NAN
from oracle.mutants.writing import left_out

_NAN = constants(math.nan, math.nan)

FAULTS: dict[str, Mutant] = {
    # Rows and splits without keys
    "empty_rows_nan": Mutant(report="EMPT-17", models="softmax of an empty row", reasons=EMPTY, after=_NAN, where=without_keys),
    "empty_rows_mean": Mutant(
        report="EMPT-09",
        models="an empty row gets the mean of all values",
        reasons=EMPTY,
        after=mean_value,
        where=all_of(without_keys),
    ),
    "empty_lse_plus_inf": Mutant(
        report="EMPT-04",
        models="the LSE of an empty row is +inf",
        reasons=EMPTY,
        after=constants(0.0, math.inf),
        where=without_keys,
    ),
    "empty_lse_sentinel": Mutant(
        report="EMPT-06",
        models="a finite sentinel is the LSE of rows before the first key",
        reasons=EMPTY,
        after=constants(0.0, -5e4),
        where=all_of(without_keys, more_queries_than_keys),
    ),
    "empty_lse_zero": Mutant(
        report="EMPT-19",
        models="the LSE of a sequence without keys is 0",
        reasons=EMPTY,
        after=constants(0.0, 0.0),
        where=no_keys_in_sequence,
    ),
    "empty_lse_without_sink": Mutant(
        report="EMPT-19",
        models="the sink of an empty row is lost",
        reasons=(*EMPTY, *LSE),
        after=constants(0.0, -math.inf),
        where=all_of(sunk, without_keys),
    ),
    "empty_row_spoils_tile": Mutant(
        report="EMPT-13",
        models="an empty row's NaN reaches the next row",
        reasons=NAN,
        after=_NAN,
        where=lambda run: ((run.plan.hi > run.plan.lo) & (run.plan.hi <= run.plan.lo).roll(1))[:, None],
    ),
    "splits_all_empty": Mutant(
        report="EMPT-03", models="-inf minus -inf where all splits are empty", reasons=EMPTY, body=merged_by(without_guard)
    ),
    "prefix_and_suffix_empty": Mutant(
        report="EMPT-02",
        models="a merge of an empty prefix and an empty suffix",
        reasons=EMPTY,
        body=merged_by(without_guard, Splits(parts=2)),
        where=several_tokens,
    ),
    "first_tile_masked": Mutant(
        report="EMPT-07",
        models="a row whose first tile is masked is NaN for good",
        reasons=NAN,
        after=_NAN,
        where=all_of(windowed, window_starts_after(64)),
    ),
    "first_split_empty": Mutant(
        report="EMPT-08", models="a merge that starts with an empty split", reasons=NAN, body=merged_by(nan_from_empty)
    ),
    "empty_split_takes_all": Mutant(
        report="EMPT-04", models="an empty split's LSE is +inf", reasons=WRONG_OR_NAN, body=merged_by(empty_is_plus_inf)
    ),
    "mask_tile_nan": Mutant(
        report="EMPT-15",
        models="-inf in a mask tile is loaded as NaN, where keys to the right are masked",
        reasons=NAN,
        after=_NAN,
        where=all_of(two_sided, not_causal, lambda run: (run.plan.hi % 8 != 0)[:, None], with_prefix),
    ),
    "empty_before_keys_top_left": Mutant(
        report="EMPT-18",
        models="rows before the first key see key 0",
        reasons=(*EMPTY, *WRONG),
        mask=last_keys(lambda r: r.plan.hi.clamp(min=1)),
        where=without_keys,
    ),
    # Ragged batches
    "lengths_taken_for_equal": Mutant(
        report="RAGG-01",
        models="offsets of q are recomputed from an even length",
        reasons=WRONG_OR_NAN,
        before=q_lens_are(even_split),
    ),
    "sequences_without_queries_counted": Mutant(
        report="RAGG-02",
        models="the row at a sequence's border belongs to the one before",
        reasons=WRONG_OR_NAN,
        mask=positions(lambda r: r.plan.pos - 1),
        where=all_of(not_first_sequence, first_row),
    ),
    "batch_taken_for_one": Mutant(
        report="RAGG-05",
        models="only the first sequence of a prefill batch is computed",
        reasons=WRONG,
        after=constants(0.0, 0.0),
        where=all_of(not_first_sequence, q_len_from(8)),
    ),
    # Launches that do not run
    "grid_over_65535": Mutant(
        report="GRID-01",
        models="above 65,535 sequences nothing is launched",
        reasons=OUT,
        where=batch_over(65_535),
        write=left_out,
    ),
    "grid_over_64": Mutant(
        report="GRID-05",
        models="sequences past the 64th are not launched",
        reasons=OUT,
        where=lambda run: (run.plan.seq >= 64)[:, None],
        write=left_out,
    ),
    "grid_of_rows": Mutant(
        report="GRID-04",
        models="query tiles past the first 256 rows are not launched",
        reasons=OUT,
        where=token_from(256),
        write=left_out,
    ),
    "grid_of_heads": Mutant(
        report="GRID-04",
        models="heads past the 64th are not launched",
        reasons=OUT,
        where=heads_from(65),
        write=left_out,
    ),
}
