"""Mutants of the mask: causal alignment and positions."""

from __future__ import annotations

import torch

from oracle.mutants.masks import (
    causal_ends,
    positions,
)
from oracle.mutants.mutant import Mutant
from oracle.mutants.patches import having
from oracle.mutants.selectors import (
    all_of,
    decode,
    dtype,
    grouped,
    head,
    last_row,
    more_queries_than_keys,
    not_first_sequence,
    several_tokens,
    token_from,
    unless,
    windowed,
    with_prefix,
)
from oracle.mutants.understood import EMPTY, WRONG

FAULTS: dict[str, Mutant] = {
    # Causal alignment
    "top_left": Mutant(
        report="CAUS-04",
        models="query i sees key i, whatever lies before",
        reasons=(*WRONG, *EMPTY),
        mask=positions(lambda r: r.index),
    ),
    "top_left_decode": Mutant(
        report="CAUS-03", models="a decode step sees key 0 only", mask=causal_ends(lambda r: r.index + 1), where=decode
    ),
    "top_left_more_queries": Mutant(
        report="CAUS-07",
        models="top-left alignment where new tokens outnumber keys",
        reasons=(*WRONG, *EMPTY),
        mask=positions(lambda r: r.index),
        where=more_queries_than_keys,
    ),
    "newest_keys_masked": Mutant(
        report="CAUS-05",
        models="the key loop of a chunk ends without the prefix's length",
        mask=causal_ends(lambda r: r.plan.hi - (r.kv_len - r.q_len)),
        where=all_of(with_prefix, several_tokens, unless(last_row)),
    ),
    "causal_ignored": Mutant(report="CAUS-11", models="no causal mask", before=having(causal=False), where=several_tokens),
    "causal_always": Mutant(report="CAUS-11", models="always causal", before=having(causal=True)),
    "rows_divided_by_group": Mutant(
        report="CAUS-08",
        models="row ids are divided by the group size though rows are not packed",
        mask=positions(lambda r: r.plan.pos - r.index + r.index // r.group),
        where=grouped,
    ),
    "mask_once_in_four_rows": Mutant(
        report="CAUS-09",
        models="the causal mask is made for every fourth row",
        mask=causal_ends(lambda r: r.plan.hi + 3 - r.index % 4),
        where=dtype(torch.bfloat16, torch.float16),
    ),
    "mask_once_in_tile_of_fp16": Mutant(
        report="CAUS-09",
        models="in fp16 pairs of rows share the mask of the second",
        mask=causal_ends(lambda r: r.plan.hi + 1 - r.index % 2),
        where=dtype(torch.float16),
    ),
    "uniform_past": Mutant(
        report="CAUS-12",
        models="all sequences have the longest one's past",
        reasons=(*WRONG, *EMPTY),
        mask=positions(lambda r: r.longest - r.q_len + r.index),
        where=windowed,
    ),
    "future_key_third_head": Mutant(
        report="CAUS-09", models="the third head sees the next key", mask=causal_ends(lambda r: r.plan.hi + 1), where=head(3)
    ),
    "future_key_thirteenth_head": Mutant(
        report="CAUS-09", models="the 13th head sees the next key", mask=causal_ends(lambda r: r.plan.hi + 1), where=head(13)
    ),
    "own_key_missed_in_speculation": Mutant(
        report="WIND-17",
        models="a draft token misses its own key under a window",
        mask=causal_ends(lambda r: torch.where(r.plan.hi - r.plan.lo > 1, r.plan.hi - 1, r.plan.hi)),
        where=all_of(windowed, lambda run: ((run.q_len > 1) & (run.q_len <= 8))[:, None]),
    ),
    "key_tile_edge_off_by_one": Mutant(
        report="CAUS-08",
        models="a diagonal on the edge of a key tile of 128 loses its key",
        mask=causal_ends(lambda r: torch.where((r.plan.hi % 128 == 1) & (r.plan.hi - r.plan.lo > 1), r.plan.hi - 1, r.plan.hi)),
    ),
    "query_tile_second_half": Mutant(
        report="CAUS-08",
        models="from the 129th new token on the diagonal is one key late",
        mask=causal_ends(lambda r: r.plan.hi + 1),
        where=token_from(128),
    ),
    "current_key_omitted": Mutant(
        report="ROPE-03",
        models="logical positions on a padded cache: the current key is omitted past a prefix",
        mask=causal_ends(lambda r: torch.where(r.plan.hi - r.plan.lo > 1, r.plan.hi - 1, r.plan.hi)),
        where=all_of(with_prefix, not_first_sequence),
    ),
    "offset_ignored": Mutant(
        report="ROPE-01",
        models="the caller's query offset is ignored under a window",
        reasons=(*WRONG, *EMPTY),
        mask=positions(lambda r: r.index),
        where=all_of(windowed, decode),
    ),
}
