"""Mutants of addressing: integers too narrow, strides, keys and values from the wrong place."""

from __future__ import annotations

import torch

from oracle.mutants.addressing import (
    as_hnd,
    as_packed,
    first_layout_again,
    live_pages_are,
    page_offset_wraps,
    pages_are,
    pages_as_packed,
    q_as_packed,
    q_lens,
    strides_swapped,
    v_inside_k,
)
from oracle.mutants.masks import last_keys
from oracle.mutants.mutant import Mutant
from oracle.mutants.patches import heads_read, values_are, views_are, with_call
from oracle.mutants.selectors import (
    all_of,
    decode,
    dim,
    eight_bit,
    kv_len_is,
    last_head,
    one_in,
    page_size,
    several_kv_heads,
    several_tokens,
    strided_cache,
    with_prefix,
)
from oracle.mutants.understood import ATTENDED, LATER, PAGES, WRONG
from oracle.references.arithmetic import Arithmetic, Planted
from oracle.references.emulator import record_of

WIDE = record_of(Arithmetic())  # page sizes 1 to 256, float32, uneven head dims


def _page(fault: str) -> Arithmetic:
    return Arithmetic(planted=Planted(page_fault=fault))  # type: ignore[arg-type]


FAULTS: dict[str, Mutant] = {
    # Integers too narrow
    "page_offset_int32": Mutant(
        report="IOVF-02", models="page id times page stride in int32", reasons=PAGES, before=pages_are(page_offset_wraps(32))
    ),
    "page_offset_24_bit": Mutant(
        report="IOVF-07", models="page id times page stride in 24 bits", reasons=PAGES, before=pages_are(page_offset_wraps(24))
    ),
    "pool_size_int32": Mutant(
        report="IOVF-04",
        models="a pool of more than 2^31 bytes is read as 0",
        reasons=WRONG,
        before=views_are(lambda cache: torch.zeros_like(cache[:1]).expand_as(cache), "v_cache"),
        where=lambda run: torch.tensor(
            [[run.call.v_cache.shape[0] * run.call.v_cache.stride(0) * run.call.v_cache.dtype.itemsize > 2**31]]
        ),
    ),
    "mask_column_int16": Mutant(
        report="IOVF-11",
        models="a key's position is a 16-bit number: keys past 32,767 are masked",
        mask=last_keys(lambda r: r.plan.hi.minimum(r.plan.hi.new_tensor(32_768))),
    ),
    "keys_past_65536_lost": Mutant(
        report="IOVF-19",
        models="keys past 65,535 are lost",
        mask=last_keys(lambda r: r.plan.hi.minimum(r.plan.hi.new_tensor(65_536))),
    ),
    "kv_bound_wraps": Mutant(
        report="IOVF-12",
        models="the bound of the key loop wraps at 2^12 tiles of 8 keys",
        mask=last_keys(lambda r: torch.where(r.plan.hi > 2**15, r.plan.hi - 2**15, r.plan.hi)),
    ),
    # Strides
    "q_stride_ignored": Mutant(
        report="STRD-01", models="q is read as if packed", before=with_call(q_as_packed), reasons=ATTENDED
    ),
    "k_and_v_strides_swapped": Mutant(
        report="STRD-02", models="K is read with V's strides and V with K's", reasons=ATTENDED, before=strides_swapped
    ),
    "page_stride_rebuilt": Mutant(
        report="STRD-04",
        models="the page stride is rebuilt from the slot stride",
        reasons=ATTENDED,
        before=views_are(pages_as_packed, "k_cache", "v_cache"),
    ),
    "cache_taken_for_packed": Mutant(
        report="STRD-05",
        models="caches are read as if packed",
        reasons=ATTENDED,
        before=views_are(as_packed, "k_cache", "v_cache"),
    ),
    "v_taken_for_packed": Mutant(
        report="STRD-09",
        models="V is read as if packed, with more than one kv head",
        reasons=ATTENDED,
        before=views_are(as_packed, "v_cache"),
        where=several_kv_heads,
    ),
    "strides_of_first_call": Mutant(
        report="STRD-08",
        models="a cache of plans leaves the strides out of its key",
        reasons=LATER,
        before=first_layout_again,
    ),
    "nhd_read_as_hnd": Mutant(
        report="STRD-14",
        models="heads are taken to come before slots",
        reasons=ATTENDED,
        before=views_are(as_hnd, "k_cache", "v_cache"),
        where=page_size(64),
    ),
    "hnd_read_as_nhd_in_8_bit": Mutant(
        report="QUAN-12",
        models="an 8-bit cache with heads before slots is read the other way",
        reasons=ATTENDED,
        before=views_are(as_packed, "k_cache", "v_cache"),
        where=all_of(eight_bit, strided_cache),
    ),
    "v_inside_k": Mutant(
        report="STRD-15",
        models="V is taken for the first columns of K where they share pages",
        before=v_inside_k,
        where=strided_cache,
        reasons=ATTENDED,
    ),
    "length_residue_33": Mutant(
        report="STRD-10",
        models="a last key alone in a block of 32 is lost at head dim 512",
        mask=last_keys(lambda r: r.plan.hi.minimum(r.kv_len - 1)),
        where=all_of(dim(512), kv_len_is(1, 32), lambda run: (run.kv_len > 1)[:, None]),
    ),
    # Keys and values from elsewhere
    "heads_all_read_first": Mutant(
        report="KVWR-01", models="all kv heads were gathered into the first", before=heads_read(lambda h, group, count: h * 0)
    ),
    "last_head_zeroed_at_some_lengths": Mutant(
        report="KVWR-02",
        models="V of a page was never written, for the last head where three pages or more do not divide by four",
        arithmetic=_page("v-zero"),
        where=all_of(last_head, lambda run: (-(-run.kv_len // run.call.k_cache.shape[1]) % 4 == 3)[:, None]),
    ),
    "prefix_page_of_another": Mutant(
        report="KVWR-06",
        models="a page of a reused prefix holds its neighbour",
        arithmetic=_page("stale"),
        where=all_of(with_prefix, several_tokens),
    ),
    "decode_differs_from_prefill": Mutant(
        report="KVWR-07",
        models="a decode step does not see its own key",
        mask=last_keys(lambda r: r.plan.hi - 1),
        where=all_of(decode, lambda run: (run.kv_len > 1)[:, None]),
    ),
    "prefix_border_lost": Mutant(
        report="KVWR-08",
        models="the last page of a prefix that fills its pages is the first page again",
        before=live_pages_are(
            lambda place, count, call: torch.where(
                place == (call.seqused_k[: call.live_seqs].long() - q_lens(call))[:, None] // call.k_cache.shape[1] - 1,
                place * 0,
                place,
            )
        ),
        where=lambda run: ((run.kv_len > run.q_len) & ((run.kv_len - run.q_len) % run.call.k_cache.shape[1] == 0))[:, None],
    ),
    "k_and_v_head_apart": Mutant(
        report="KVWR-02",
        models="V of the last kv head is that of the one before",
        before=values_are(
            lambda v: v[:, :, torch.arange(v.shape[2]).clamp(max=max(0, v.shape[2] - 2))] if v.dtype.itemsize > 1 else v,
            "v_cache",
        ),
        where=several_kv_heads,
    ),
    "value_of_one_in_1000": Mutant(
        report="PTAB-05",
        models="one (row, head) in a thousand loses its last key",
        mask=last_keys(lambda r: torch.where(r.plan.hi - r.plan.lo > 1, r.plan.hi - 1, r.plan.hi)),
        where=one_in(1000),
    ),
}
