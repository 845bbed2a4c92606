"""Mutants of companies and back ends: batch-mates, tile settings, one dtype or head dim only."""

from __future__ import annotations

import math

import torch

from oracle.contract import Record
from oracle.mutants.masks import first_keys, last_keys
from oracle.mutants.merging import (
    Splits,
    chunks_of_longest,
    correct,
    merged_by,
    rounded_parts,
)
from oracle.mutants.mutant import Mutant
from oracle.mutants.patches import scale_is
from oracle.mutants.results import constants, out_is
from oracle.mutants.selectors import (
    after_other_shapes,
    all_of,
    batch_is,
    batch_over,
    decode,
    dim,
    dtype,
    grouped,
    mixed,
    rows_over,
    shares_first_page,
    unless,
    when,
)
from oracle.mutants.understood import BATCH, NAN, OUT, SUBTLE
from oracle.references.arithmetic import Arithmetic, Planted

LN2 = math.log(2.0)

# Legal but for a kernel that declares that batch-mates change no bit
_INVARIANT = Record(batch_invariant=True)
_INVARIANT_AROUND_32 = Record(batch_invariant=True, thresholds=(32,))

FAULTS: dict[str, Mutant] = {
    # Batch-mates
    "batch_of_one": Mutant(
        report="BVAR-02",
        models="a row alone is scaled differently",
        before=scale_is(lambda call: call.softmax_scale * 1.002),
        where=batch_is(1),
    ),
    "one_long_among_short": Mutant(
        report="BVAR-04",
        models="the long request beside many short ones loses a key",
        mask=last_keys(lambda r: torch.where((r.q_len > 16) & (r.plan.hi - r.plan.lo > 1), r.plan.hi - 1, r.plan.hi)),
        where=mixed,
    ),
    "one_pass_above_32": Mutant(
        report="BVAR-05",
        models="batches above 32 take a path with P in 8 bits",
        reasons=SUBTLE,
        arithmetic=Arithmetic(p_format="e4m3", p_scale=256.0),
        where=batch_over(32),
    ),
    "chunk_of_longest": Mutant(
        report="BVAR-05",
        models="the chunk size is that of the longest sequence, and shorter ones lose keys",
        body=merged_by(correct, Splits(parts=2), chunks_of_longest(16)),
    ),
    "splits_by_batch": Mutant(
        report="BVAR-06",
        models="from 5 sequences on partial results are kept in bf16",
        reasons=SUBTLE,
        body=merged_by(rounded_parts(torch.bfloat16)),
        where=batch_over(4),
    ),
    "batched_answers_differ": Mutant(
        report="BVAR-07",
        models="from the fifth sequence on the first key is lost",
        mask=first_keys(lambda r: torch.where(r.plan.hi - r.plan.lo > 1, r.plan.lo + 1, r.plan.lo)),
        where=lambda run: (run.plan.seq >= 4)[:, None],
    ),
    "cascade_of_shared_prefix": Mutant(
        report="BVAR-08",
        models="sequences that share their first page lose its first key",
        mask=first_keys(lambda r: torch.where(r.plan.hi - r.plan.lo > 1, r.plan.lo.clamp(min=1), r.plan.lo)),
        where=shares_first_page,
    ),
    "alone_by_other_tiles": Mutant(
        report="BVAR-02",
        models="a sequence alone is computed by tiles of 16",
        reasons=BATCH,
        record=_INVARIANT,
        arithmetic=Arithmetic(tile=16),
        where=batch_is(1),
    ),
    "tiles_by_query_rows": Mutant(
        report="BVAR-04",
        models="from 33 query rows on tiles of 128",
        reasons=BATCH,
        record=_INVARIANT_AROUND_32,
        arithmetic=Arithmetic(tile=128),
        where=rows_over(32),
    ),
    "splits_by_batch_size": Mutant(
        report="BVAR-06",
        models="fewer than four sequences are split",
        reasons=BATCH,
        record=_INVARIANT,
        arithmetic=Arithmetic(tile=16, splits=4),
        where=unless(batch_over(3)),
    ),
    # Back ends
    "columns_permuted": Mutant(
        report="ARCH-01",
        models="pairs of columns change places",
        reasons=OUT,
        after=out_is(lambda out: out.view(*out.shape[:-1], -1, 2).flip(-1).flatten(-2)),
    ),
    "columns_permuted_fp16_256": Mutant(
        report="ARCH-02",
        models="in fp16 at head dim 256 columns are off by one",
        reasons=OUT,
        after=out_is(lambda out: out.roll(1, -1)),
        where=all_of(dtype(torch.float16), dim(256)),
    ),
    "four_heads_of_64": Mutant(
        report="ARCH-03",
        models="four heads of 64 dims: halves of the output change places",
        reasons=OUT,
        after=out_is(lambda out: out.roll(out.shape[-1] // 2, -1)),
        where=when(lambda call: call.q.shape[1] == 4 and call.q.shape[2] == 64),
    ),
    "small_batches_less_accurate": Mutant(
        report="ARCH-05",
        models="two to eight rows: P in e4m3",
        reasons=SUBTLE,
        arithmetic=Arithmetic(p_format="e4m3", p_scale=256.0),
        where=all_of(dim(64), lambda run: ((run.q_len > 1) & (run.q_len <= 8))[:, None]),
    ),
    "tile_16_setting": Mutant(
        report="ARCH-07",
        models="tiles of 16: the second is not rescaled",
        arithmetic=Arithmetic(tile=16, planted=Planted(unscaled_tile=1)),
    ),
    "tile_128_last_skipped": Mutant(
        report="ARCH-08",
        models="tiles of 128: the second is left out of P.V",
        reasons=OUT,
        arithmetic=Arithmetic(tile=128, planted=Planted(skipped_tile=1)),
    ),
    "grouped_decode_gemm": Mutant(
        report="ARCH-10",
        models="in grouped decode the second tile of keys is left out of P.V",
        reasons=OUT,
        arithmetic=Arithmetic(planted=Planted(skipped_tile=1)),
        where=all_of(grouped, decode),
    ),
    "another_shape_nan": Mutant(
        report="ARCH-13",
        models="a second shape gives NaN",
        reasons=NAN,
        after=constants(math.nan, math.nan),
        where=after_other_shapes,
    ),
}
