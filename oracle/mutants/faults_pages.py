"""Mutants of pages: their order, their edges, the page table and its ids."""

from __future__ import annotations

import torch

from oracle.mutants.addressing import (
    consecutive,
    kv_lens_are,
    live_pages_are,
    packed_table,
    pages_are,
    sorted_ids,
    table_of_other_rows,
)
from oracle.mutants.masks import first_keys, last_keys
from oracle.mutants.mutant import Mutant
from oracle.mutants.patches import then
from oracle.mutants.selectors import (
    all_of,
    batch_over,
    decode,
    dim,
    long_context,
    mixed,
    not_first_sequence,
    page_size,
    several_tokens,
    uneven_dims,
    whole_pages,
    windowed,
    with_prefix,
)
from oracle.mutants.understood import ATTENDED, PAGES, WRONG
from oracle.references.arithmetic import Arithmetic, Planted
from oracle.references.emulator import record_of

WIDE = record_of(Arithmetic())  # page sizes 1 to 256, float32, uneven head dims


def _page(fault: str) -> Arithmetic:
    return Arithmetic(planted=Planted(page_fault=fault))  # type: ignore[arg-type]


FAULTS: dict[str, Mutant] = {
    # Pages
    "page_256_middle_lost": Mutant(
        report="PAGE-01",
        models="with pages of 256, keys between the 4,096th and the last page are lost",
        reasons=WRONG,
        record=WIDE,
        before=live_pages_are(lambda place, count, call: torch.where((place >= 16) & (place < count - 1), place * 0, place)),
        where=all_of(page_size(256), long_context(4096)),
    ),
    "page_128_last_page_only": Mutant(
        report="PAGE-01",
        models="with pages above 64, keys past the first page but for the last page are the first page's",
        record=WIDE,
        before=live_pages_are(lambda place, count, call: torch.where((place >= 1) & (place < count - 1), place * 0, place)),
        where=page_size(128, 256),
    ),
    "page_of_192_128": Mutant(
        report="PAGE-02",
        models="at head dims 192/128 a page that is no tile is read from its neighbour",
        record=WIDE,
        arithmetic=_page("stale"),
        where=all_of(uneven_dims, page_size(1, 8, 16, 32, 64)),
    ),
    "v_page_index_runs_on": Mutant(
        report="PAGE-03",
        models="at head dim 256 V's page index advances a page too far, in large batches",
        before=then(
            live_pages_are(lambda place, count, call: torch.where(place % 4 == 3, (place + 1) % count.clamp(min=1), place)),
        ),
        where=all_of(dim(256), batch_over(16)),
    ),
    "page_run_of_two": Mutant(
        report="PAGE-09",
        models="two logical pages are loaded as one run of the pool",
        reasons=PAGES,
        before=pages_are(lambda t, call: torch.where(torch.arange(t.shape[1]) % 2 == 1, t.roll(1, 1) + 1, t)),
    ),
    "pages_consecutive": Mutant(
        report="PAGE-11", models="pages are one run from the first on", reasons=PAGES, before=pages_are(consecutive)
    ),
    "pages_sorted": Mutant(
        report="PAGE-11", models="page ids are taken for ascending", reasons=PAGES, before=pages_are(sorted_ids)
    ),
    "pages_of_first_sequence": Mutant(
        report="PLAN-03", models="all sequences read the first one's pages", before=pages_are(lambda t, call: t[:1].expand_as(t))
    ),
    "window_boundary_page_lost": Mutant(
        report="PAGE-12",
        models="the page that a window covers in part is dropped",
        mask=first_keys(lambda r: torch.where(r.plan.lo > 0, -(-r.plan.lo // r.page_size) * r.page_size, r.plan.lo)),
        where=all_of(windowed, decode),
    ),
    "last_partial_page_lost": Mutant(
        report="PAGE-08",
        models="the partly filled last page is lost in decode",
        mask=last_keys(lambda r: torch.where(r.kv_len >= r.page_size, r.plan.hi // r.page_size * r.page_size, r.plan.hi)),
        where=decode,
    ),
    "whole_page_edge": Mutant(
        report="PAGE-13",
        models="the last page is lost where the length fills it",
        mask=last_keys(lambda r: torch.where(r.plan.hi > r.page_size, r.plan.hi - r.page_size, r.plan.hi)),
        where=whole_pages,
    ),
    "one_key_in_last_page": Mutant(
        report="PAGE-05",
        models="a last page of one key is lost",
        mask=last_keys(lambda r: torch.where((r.kv_len > 1), r.plan.hi.minimum(r.kv_len - 1), r.plan.hi)),
        where=lambda run: (run.kv_len % run.call.k_cache.shape[1] == 1)[:, None],
    ),
    "page_64_of_table": Mutant(
        report="PAGE-05",
        models="table entries from the 64th on are those of the first",
        before=live_pages_are(lambda place, count, call: place % 64),
        where=with_prefix,
    ),
    "page_256_of_table": Mutant(
        report="PAGE-01",
        models="table entries from the 256th on are those of the first",
        before=live_pages_are(lambda place, count, call: place % 256),
    ),
    "page_1_last_key": Mutant(
        report="PAGE-13",
        models="with pages of one key the first key is read twice and the second never",
        record=WIDE,
        before=live_pages_are(lambda place, count, call: torch.where(place == 1, place * 0, place)),
        where=page_size(1),
    ),
    "page_8_last_slot": Mutant(
        report="PAGE-02",
        models="with pages of 8 the last page is the one before",
        record=WIDE,
        before=live_pages_are(lambda place, count, call: torch.where((place == count - 1) & (count > 1), place - 1, place)),
        where=page_size(8),
    ),
    # The page table
    "table_row_stride_in_use": Mutant(
        report="STRD-12",
        models="table rows are looked up with a stride of the pages in use",
        reasons=PAGES,
        before=pages_are(packed_table),
    ),
    "bad_id_is_page_zero": Mutant(
        report="PTAB-02",
        models="a page past the last is attended as page 0 where the length fills its pages",
        reasons=ATTENDED,
        before=then(
            pages_are(lambda t, call: torch.where((t < 0) | (t >= call.k_cache.shape[0]), 0, t)),
            kv_lens_are(lambda n, call: torch.where((n > 0) & (n % call.k_cache.shape[1] == 0), n + 1, n)),
        ),
    ),
    "next_table_row": Mutant(
        report="KVWR-04",
        models="prefill rows of a mixed batch use the table row of the sequence before",
        reasons=PAGES,
        before=pages_are(table_of_other_rows),
        where=all_of(mixed, several_tokens, not_first_sequence),
    ),
    "last_pool_page": Mutant(
        report="PTAB-02",
        models="the pool's last page is taken for out of range and read as page 0",
        reasons=PAGES,
        before=pages_are(lambda t, call: torch.where(t == call.k_cache.shape[0] - 1, 0, t)),
    ),
    "page_ids_to_127": Mutant(
        report="IOVF-07", models="page ids above 127 wrap", reasons=PAGES, before=pages_are(lambda t, call: (t + 128) % 256 - 128)
    ),
    "page_ids_15_bit": Mutant(
        report="IOVF-07",
        models="page ids are 16-bit and signed",
        reasons=PAGES,
        before=pages_are(lambda t, call: (t + 2**15) % 2**16 - 2**15),
    ),
    "page_ids_16_bit": Mutant(
        report="IOVF-07", models="page ids are cut to 16 bits", reasons=PAGES, before=pages_are(lambda t, call: t % 2**16)
    ),
    "page_ids_window_of_16_bit": Mutant(
        report="IOVF-07",
        models="pages loaded together must share the high 16 bits of their ids",
        reasons=PAGES,
        before=pages_are(lambda t, call: t[:, :1] // 2**16 * 2**16 + t % 2**16),
    ),
}
