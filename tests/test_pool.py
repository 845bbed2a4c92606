"""Laying out: what is live comes back bit for bit, and everything past the plan is hostile and guarded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.cases import LAYOUTS, Case
from oracle.contract import Call
from oracle.families import Family
from oracle.material import Material, material
from oracle.pool import CANARY, GUARD_ROWS, LAYERS, QUICK_FILLS, Fill, Laid, lay_out, without_fill
from oracle.references.dense import dense_fp32

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=80)

FAMILY = Family(name="pool", q_heads=4, kv_heads=2, head_dim=16, head_dim_v=8, scale=0.25)
PLAIN = Case(name="p", family=FAMILY, q_lens=(2, 0, 5, 1), kv_lens=(40, 3, 16, 0), page_size=16)
CACHES = {"bf16": ("bf16", ""), "fp16": ("fp16", ""), "fp32": ("fp32", ""), "e4m3": ("bf16", "e4m3")}
fills = st.sampled_from(Fill)
salts = st.integers(0, 6)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small cases over layouts, formats, page sizes, batches and everything past the plan."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), min_size=1, max_size=5))
    dtype, cache_dtype = CACHES[draw(st.sampled_from(sorted(CACHES)))]
    return Case(
        name="p", family=replace(FAMILY, head_dim_v=draw(st.sampled_from((8, 16, 24)))), dtype=dtype, cache_dtype=cache_dtype,
        q_lens=tuple(q for q, _ in lengths), kv_lens=tuple(k for _, k in lengths), layout=draw(st.sampled_from(LAYOUTS)),
        page_size=draw(st.sampled_from((16, 1, 3, 64))), padded_seqs=draw(st.integers(0, 3)), tail_rows=draw(st.integers(0, 3)),
        scales=draw(st.sampled_from(("none", "per-sequence"))), give_out=draw(st.booleans()), seed=draw(st.integers(0, 9)),
    )  # fmt: skip


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def pages_of(case: Case, table: Tensor) -> list[list[int]]:
    """The live page ids of each sequence, read here without the code under test."""
    return [table[b, : -(-n // case.page_size)].tolist() for b, n in enumerate(case.kv_lens)]


def live_slots(case: Case, call: Call) -> Tensor:
    """Which slots of the pool the plan declares live, (num_pages, page_size) bool."""
    live = torch.zeros(call.k_cache.shape[:2], dtype=torch.bool)
    for pages, n in zip(pages_of(case, call.page_table), case.kv_lens, strict=True):
        for j in range(n):
            live[pages[j // case.page_size], j % case.page_size] = True
    return live


def gathered(case: Case, call: Call, cache: Tensor) -> Tensor:
    """The live tokens of `cache` in the order of the sequences, through the page table: (total_k, kv_heads, dim)."""
    tokens = [
        cache[pages[j // case.page_size], j % case.page_size]
        for pages, n in zip(pages_of(case, call.page_table), case.kv_lens, strict=True)
        for j in range(n)
    ]
    return torch.stack(tokens) if tokens else cache.new_empty(0, *cache.shape[2:])


@drawn
@given(cases(), fills, salts)
def test_the_live_tokens_are_the_material_in_every_layout_format_and_fill(case: Case, fill: Fill, salt: int) -> None:
    """Read through the page table, bit for bit; the live rows of q too."""
    made = material(case)
    call = lay_out(case, made, fill=fill, salt=salt).call

    assert same_bits(gathered(case, call, call.k_cache), made.k)
    assert same_bits(gathered(case, call, call.v_cache), made.v)
    assert same_bits(call.q[: case.total_q], made.q)


def kind(x: Tensor, fill: Fill) -> bool:
    """Whether all of x is what `fill` says; an e4m3 has no infinity, and its largest number stands in."""
    largest = torch.finfo(x.dtype).max
    infinite = largest if x.dtype == torch.float8_e4m3fn else torch.inf
    y = x.float()
    value = {Fill.POS_INF: infinite, Fill.NEG_INF: -infinite, Fill.LARGE: largest, Fill.NEG_LARGE: -largest}
    return bool((y.isnan() if fill is Fill.NAN else y == value[fill]).all())


@drawn
@given(cases(), fills.filter(lambda f: f is not Fill.STALE), salts)
def test_nothing_live_is_hostile_and_everything_past_the_plan_is(case: Case, fill: Fill, salt: int) -> None:
    """Slots past a sequence's keys, pages of no one, rows of q, and scales of dead sequences."""
    call = lay_out(case, material(case), fill=fill, salt=salt).call
    live = live_slots(case, call)

    for cache in (call.k_cache, call.v_cache):
        values = cache.float()
        assert bool(values[live].isfinite().all())
        assert kind(cache.float()[~live].to(cache.dtype), fill)
    assert bool(call.q[: case.total_q].float().isfinite().all())
    assert kind(call.q[case.total_q :], fill)
    if case.scales == "per-sequence":
        assert isinstance(call.k_scale, Tensor)
        assert call.k_scale.shape == (len(call.seqused_k), case.family.kv_heads)
        assert bool(call.k_scale[: len(case.q_lens)].isfinite().all())
        assert kind(call.k_scale[len(case.q_lens) :], fill)


@drawn
@given(cases().filter(lambda c: c.total_k > 0), salts)
def test_stale_data_is_real_data(case: Case, salt: int) -> None:
    """Numbers of the material itself, not zeros."""
    made = material(case)
    call = lay_out(case, made, fill=Fill.STALE, salt=salt).call
    past = call.k_cache.float()[~live_slots(case, call)]

    assert set(past.flatten().tolist()) <= set(made.k.float().flatten().tolist()) | set(made.v.float().flatten().tolist())
    assert bool((past != 0).any())


def test_there_is_something_past_the_plan_of_every_kind() -> None:
    """A must: half-filled pages, spare pages, tail rows, spare entries of the page table, dead sequences."""
    call = lay_out(replace(PLAIN, padded_seqs=2), material(PLAIN), fill=Fill.NAN, salt=0).call
    live = live_slots(PLAIN, call)

    assert bool((live.any(1) & ~live.all(1)).any())
    assert bool((~live.any(1)).any())
    assert call.q.shape[0] == PLAIN.total_q + 3
    assert call.page_table.shape[1] > max(len(p) for p in pages_of(PLAIN, call.page_table))
    assert (call.num_seqs, len(call.seqused_k), len(call.cu_seqlens_q), len(call.page_table)) == (4, 6, 7, 6)


@drawn
@given(cases(), fills, salts)
def test_the_plan_says_what_is_live(case: Case, fill: Fill, salt: int) -> None:
    call = lay_out(case, material(case), fill=fill, salt=salt).call
    batch = len(case.q_lens)

    assert call.live_seqs == batch
    assert call.cu_seqlens_q[: batch + 1].diff().tolist() == list(case.q_lens)
    assert call.seqused_k[:batch].tolist() == list(case.kv_lens)
    assert {x.dtype for x in (call.cu_seqlens_q, call.seqused_k, call.page_table)} == {torch.int32}
    assert call.num_seqs == (batch if case.padded_seqs else None)
    assert (call.out is not None) == case.give_out
    pages = [page for row in pages_of(case, call.page_table) for page in row]
    assert len(set(pages)) == len(pages)
    assert all(0 <= page < call.k_cache.shape[0] for page in pages)


def test_dead_sequences_look_live_under_stale_data_and_are_out_of_range_elsewhere() -> None:
    """A kernel that ignores num_seqs takes them for sequences of a larger batch, or for 10^7 keys, or for fewer than none."""
    case = replace(PLAIN, padded_seqs=3)
    made = material(case)
    seen = {}
    for fill in Fill:
        call = lay_out(case, made, fill=fill, salt=0).call
        seen[fill] = (call.cu_seqlens_q[4:].diff().tolist(), call.seqused_k[4:].tolist())

    assert seen[Fill.STALE] == ([1, 1, 1], [17, 17, 17])
    assert min(seen[Fill.LARGE][1]) > 10**6
    assert max(seen[Fill.NEG_LARGE][1]) < 0
    assert max(seen[Fill.NAN][1]) < 0 < min(seen[Fill.POS_INF][1])


# Page ids


def test_entries_of_the_page_table_past_the_plan_may_be_anything() -> None:
    """Ids far out of range in both directions, and plausible ids of pages that belong to others or to no one."""
    case = replace(PLAIN, q_lens=(1,) * 30, kv_lens=(40,) + (1,) * 29)
    call = lay_out(case, material(case), fill=Fill.STALE, salt=0).call
    past = [e for b, n in enumerate(case.kv_lens) for e in call.page_table[b, -(-n // 16) :].tolist()]
    pool = call.k_cache.shape[0]

    assert {-1, 2**31 - 1, -(2**31)} <= set(past)
    plausible = [e for e in past if 0 <= e < pool]
    owned = {page for pages in pages_of(case, call.page_table) for page in pages}
    assert set(plausible) & owned
    assert set(plausible) - owned


@pytest.mark.parametrize("kv_lens", [(200,), (1,), (0, 3), (40, 3, 16, 0), (16,) * 20])
def test_page_ids_move_with_the_salt_and_always_include_the_last_page(kv_lens: tuple[int, ...]) -> None:
    """A single page moves too; more of them are neither in order nor side by side."""
    case = replace(PLAIN, q_lens=(1,) * len(kv_lens), kv_lens=kv_lens)
    made = material(case)
    found = []
    for salt in range(6):
        call = lay_out(case, made, fill=Fill.STALE, salt=salt).call
        pages = [page for row in pages_of(case, call.page_table) for page in row]
        assert max(pages) == call.k_cache.shape[0] - 1
        assert len(call.k_cache) > 2 * len(pages)
        if len(pages) > 3:
            assert pages != sorted(pages)
            assert max(pages) - min(pages) >= len(pages)
        found.append(tuple(pages))

    assert len(set(found)) == 6


def test_the_same_arguments_lay_out_the_same_bytes() -> None:
    one, two = (lay_out(PLAIN, material(PLAIN), fill=Fill.NAN, salt=3).call for _ in range(2))

    assert all(same_bits(getattr(one, n), getattr(two, n)) for n in ("q", "k_cache", "v_cache", "page_table", "cu_seqlens_q"))


@drawn
@given(cases(), fills, salts)
def test_the_exact_answer_does_not_depend_on_fill_or_page_ids(case: Case, fill: Fill, salt: int) -> None:
    """What the reference reads is the same call."""
    made = material(case)
    one = dense_fp32(without_fill(lay_out(case, made, fill=Fill.STALE, salt=0)))
    two = dense_fp32(without_fill(lay_out(case, made, fill=fill, salt=salt)))

    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


# Strides


def strides(layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of k and v at page size 16, 2 kv heads, head dims 16 and 8."""
    call = lay_out(replace(PLAIN, layout=layout), material(PLAIN), fill=Fill.NAN, salt=0).call
    assert call.k_cache.shape[1:] == (16, 2, 16)
    assert call.v_cache.shape[1:] == (16, 2, 8)
    return call.k_cache.stride(), call.v_cache.stride()


@pytest.mark.parametrize(
    ("layout", "k", "v"),
    [
        ("plain", (512, 32, 16, 1), (256, 16, 8, 1)),
        ("hnd", (512, 16, 256, 1), (256, 8, 128, 1)),
        ("kv-in-page", (2 * 512, 32, 16, 1), (2 * 512, 32, 16, 1)),
        ("layers-in-page", (LAYERS * 2 * 512, 32, 16, 1), (LAYERS * 2 * 512, 32, 16, 1)),
        ("strided", (16 * 2 * 24, 48, 24, 1), (256, 8, 128, 1)),
    ],
)
def test_strides_are_what_the_layout_says(layout: str, k: tuple[int, ...], v: tuple[int, ...]) -> None:
    assert strides(layout) == (k, v)


def test_every_layout_is_tested_and_no_two_are_alike() -> None:
    assert len({strides(layout) for layout in LAYOUTS}) == len(LAYOUTS)


def test_k_and_v_of_a_page_and_the_layers_of_a_page_share_memory() -> None:
    for layout, pieces in (("kv-in-page", 2), ("layers-in-page", 2 * LAYERS)):
        call = lay_out(replace(PLAIN, layout=layout), material(PLAIN), fill=Fill.NAN, salt=0).call
        k, v = call.k_cache, call.v_cache
        assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert k.untyped_storage().nbytes() == len(k) * pieces * 512 * 2
        assert v.storage_offset() - k.storage_offset() == 512


def test_the_other_layers_of_a_page_are_hostile() -> None:
    """A kernel that reads the layer beside its own meets the fill."""
    call = lay_out(replace(PLAIN, layout="layers-in-page"), material(PLAIN), fill=Fill.NAN, salt=0).call
    whole = torch.as_strided(call.k_cache, (len(call.k_cache), LAYERS, 2, 512), (LAYERS * 1024, 1024, 512, 1), 0)

    assert bool(whole[:, [0, 2]].isnan().all())
    assert bool(whole[:, 1].isfinite().any())


def test_q_and_out_are_slices_where_the_layout_is_strided() -> None:
    call = lay_out(replace(PLAIN, layout="strided"), material(PLAIN), fill=Fill.NAN, salt=0).call
    assert call.out is not None

    assert call.q.stride() == (6 * 16, 16, 1)
    assert call.out.stride() == (4 * 16, 16, 1)
    assert call.out.shape == (PLAIN.total_q + 3, 4, 8)


# Formats


@pytest.mark.parametrize("fill", Fill)
def test_e4m3_has_no_infinity(fill: Fill) -> None:
    """Infinite fills are its largest number, 448; NaN is NaN."""
    case = replace(PLAIN, cache_dtype="e4m3")
    call = lay_out(case, material(case), fill=fill, salt=0).call
    past = call.k_cache.float()[~live_slots(case, call)]

    assert not bool(past.isinf().any())
    if fill not in (Fill.STALE, Fill.NAN):
        assert set(past.abs().flatten().tolist()) == {448.0}


def test_a_fill_is_finite_or_not_in_the_format_of_16_bits() -> None:
    """`finite` tells which fills a kernel that needs finite tails can be given."""
    for fill in Fill:
        call = lay_out(PLAIN, material(PLAIN), fill=fill, salt=0).call
        assert bool(call.k_cache.isfinite().all()) == bool(call.q.isfinite().all()) == fill.finite


def test_the_quick_fills_hold_a_finite_one_and_another() -> None:
    """Only NaN sees 0 x NaN; only large numbers see a missing mask where NaN is promised away."""
    assert {fill.finite for fill in QUICK_FILLS} == {True, False}


# Canaries


def storage_of(laid: Laid) -> Tensor:
    """All bytes of the memory that `out` is a part of: shared, so that what is written to them is written to `out`."""
    assert laid.call.out is not None
    return torch.empty(0, dtype=torch.uint8).set_(laid.call.out.untyped_storage())


def laid_out(case: Case, made: Material | None = None, **options: bool) -> Laid:
    return lay_out(case, made or material(case), fill=Fill.STALE, salt=0, **options)


with_out = cases().map(lambda c: replace(c, give_out=True))


@drawn
@given(with_out)
def test_an_untouched_output_breaks_no_canary_and_nor_does_one_whose_live_rows_are_written(case: Case) -> None:
    laid = laid_out(case)
    assert laid.canaries_broken(storage_of(laid)) == 0

    assert laid.call.out is not None
    laid.call.out[: case.total_q] = -1.0
    assert laid.canaries_broken(storage_of(laid)) == 0


@drawn
@given(with_out, st.data())
def test_one_byte_written_anywhere_past_the_plan_is_counted(case: Case, data: st.DataObject) -> None:
    """Tail rows, guard rows before and after, gaps between heads: whichever byte hypothesis picks."""
    laid = laid_out(case)
    storage = storage_of(laid)
    assert laid.call.out is not None
    laid.call.out[: case.total_q] = 0.0
    allowed = storage != CANARY
    forbidden = (~allowed).nonzero().flatten()
    at = int(forbidden[data.draw(st.integers(0, len(forbidden) - 1))])
    storage[at] = data.draw(st.integers(0, 255).filter(lambda b: b != CANARY))

    assert laid.canaries_broken(storage) == 1


@drawn
@given(with_out)
def test_there_are_canaries_on_every_side_of_the_output(case: Case) -> None:
    """Two guard rows before and after, and the tail rows."""
    laid = laid_out(case)
    out = laid.call.out
    assert out is not None
    row = out.stride(0)

    assert out.storage_offset() == GUARD_ROWS * row
    after = out.untyped_storage().nbytes() // out.itemsize - out.storage_offset() - len(out) * row
    assert after == GUARD_ROWS * row
    assert bool((bits(out[case.total_q :]) == CANARY).all())


def test_the_canary_is_finite_and_nothing_that_a_kernel_writes_by_chance() -> None:
    """Far from what attention gives: also where live rows are never written, or added to."""
    for dtype in ("bf16", "fp16", "fp32"):
        case = replace(PLAIN, dtype=dtype)
        out = laid_out(case).call.out
        assert out is not None
        assert bool(out.isfinite().all())
        assert float(out.abs().min()) > 100


def test_declared_padding_may_be_written_but_not_the_guards() -> None:
    laid = laid_out(PLAIN, writes_padding=True)
    assert laid.call.out is not None
    laid.call.out[:] = 1.0
    assert laid.canaries_broken(storage_of(laid)) == 0

    storage_of(laid)[0] = 0
    storage_of(laid)[-1] = 0
    assert laid.canaries_broken(storage_of(laid)) == 2


def test_without_an_output_there_is_no_canary_to_break() -> None:
    laid = laid_out(replace(PLAIN, give_out=False))

    assert laid.call.out is None
    assert laid.canaries_broken(torch.zeros(9, dtype=torch.uint8)) == 0
