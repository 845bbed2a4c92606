"""Laying out: what is live comes back bit for bit, and everything past the plan is hostile and guarded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.cases import LAYOUTS, Case
from oracle.contract import Call
from oracle.families import Family
from oracle.isolation.sparse import extents
from oracle.material import Material, material
from oracle.pool import FAR, GUARD_ROWS, LAYERS, MANY, QUICK_FILLS, SPARSE, Fill, Laid, canary, is_canary, lay_out, without_fill
from oracle.references.dense import dense_fp32

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=80)

FAMILY = Family(name="pool", q_heads=4, kv_heads=2, head_dim=16, head_dim_v=8, scale=0.25)
PLAIN = Case(name="p", family=FAMILY, q_lens=(2, 0, 5, 1), kv_lens=(40, 3, 16, 0), page_size=16)
DENSE = [layout for layout in LAYOUTS if layout not in SPARSE]
CACHES = {"bf16": ("bf16", ""), "fp16": ("fp16", ""), "fp32": ("fp32", ""), "e4m3": ("bf16", "e4m3")}
fills = st.sampled_from(Fill)
salts = st.integers(0, 6)


@st.composite
def cases(draw: st.DrawFn, layouts: Sequence[str] = LAYOUTS) -> Case:
    """Small cases over layouts, formats, page sizes, batches, shared keys and everything past the plan."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), min_size=1, max_size=5))
    dtype, cache_dtype = CACHES[draw(st.sampled_from(sorted(CACHES)))]
    return Case(
        name="p", family=replace(FAMILY, head_dim_v=draw(st.sampled_from((8, 16, 24)))), dtype=dtype, cache_dtype=cache_dtype,
        q_lens=tuple(q for q, _ in lengths), kv_lens=tuple(k for _, k in lengths), layout=draw(st.sampled_from(layouts)),
        page_size=draw(st.sampled_from((16, 1, 3, 64))), shared_prefix=draw(st.sampled_from((0, 7, 33))),
        padded_seqs=draw(st.integers(0, 3)), tail_rows=draw(st.integers(0, 3)),
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
@given(cases(DENSE), fills.filter(lambda f: f is not Fill.STALE), salts)
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
@given(cases(DENSE).filter(lambda c: c.total_k > 0), salts)
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
    assert call.page_table.shape[1] >= max(len(p) for p in pages_of(PLAIN, call.page_table)) + 2
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
    rows = pages_of(case, call.page_table)
    common = [n // case.page_size for n in case.shared]
    assert all(row[:n] == rows[0][:n] for row, n in zip(rows, common, strict=True))
    pages = [page for row, n in zip(rows, common, strict=True) for page in row[n:]]
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
        ("many-pages", (2 * 512, 32, 16, 1), (2 * 512, 32, 16, 1)),
        ("far-pages", (32 * 2 * 512, 32, 16, 1), (32 * 2 * 512, 32, 16, 1)),
    ],
)
def test_strides_are_what_the_layout_says(layout: str, k: tuple[int, ...], v: tuple[int, ...]) -> None:
    assert strides(layout) == (k, v)


def test_every_layout_is_tested_and_no_two_are_alike() -> None:
    """But for "many-pages", which is "kv-in-page" in a larger pool."""
    assert len({strides(layout) for layout in LAYOUTS}) == len(LAYOUTS) - 1


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


@pytest.mark.parametrize(
    ("layout", "q", "out"),
    [
        ("plain", (4 * 16, 16, 1), (4 * 8, 8, 1)),
        ("strided", (6 * 16, 16, 1), (4 * 16, 16, 1)),
        ("hnd", (16, 11 * 16, 1), (8, 15 * 8, 1)),
    ],
)
def test_q_and_out_are_slices_where_the_layout_is_strided_and_have_heads_outermost_where_it_is_hnd(
    layout: str, q: tuple[int, ...], out: tuple[int, ...]
) -> None:
    """Eight live rows and three of the tail; `out` has two guard rows on either side."""
    call = lay_out(replace(PLAIN, layout=layout), material(PLAIN), fill=Fill.NAN, salt=0).call
    assert call.out is not None

    assert (call.q.stride(), call.out.stride()) == (q, out)
    assert call.out.shape == (PLAIN.total_q + 3, 4, 8)


def ends_at_its_storage(x: Tensor) -> bool:
    return (x.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.itemsize == (
        x.untyped_storage().nbytes()
    )


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 7])
def test_where_the_layout_is_strided_the_plan_is_cut_from_longer_arrays_which_end_with_it(batch: int) -> None:
    """At a multiple of 16 bytes: there a guard page begins.  What lies before is hostile."""
    case = replace(PLAIN, layout="strided", q_lens=(2,) * batch, kv_lens=(20,) * batch, scales="per-sequence", sinks="small")
    call = lay_out(case, material(case), fill=Fill.STALE, salt=0).call
    assert isinstance(call.k_scale, Tensor) and isinstance(call.v_scale, Tensor) and isinstance(call.q_scale, Tensor)
    assert call.sinks is not None
    vectors = (call.cu_seqlens_q, call.seqused_k, call.sinks, call.q_scale, call.k_scale, call.v_scale)

    assert call.page_table.stride() == (call.page_table.shape[1] + 4, 1)
    for x in (*vectors, call.page_table):
        assert x.storage_offset() > 0 and ends_at_its_storage(x)
        assert x.untyped_storage().nbytes() % 16 == 0
    for x in vectors:
        assert x.is_contiguous()
        before = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())[: x.storage_offset()]
        assert bool((before.isnan() if x.is_floating_point() else before == 2**31 - 1).all())
    plain = lay_out(replace(case, layout="plain"), material(case), fill=Fill.STALE, salt=0).call
    assert torch.equal(plain.cu_seqlens_q, call.cu_seqlens_q) and torch.equal(plain.sinks, call.sinks)  # type: ignore[arg-type]
    assert torch.equal(plain.k_scale, call.k_scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_page_table_ends_where_a_guard_page_can_begin(layout: str) -> None:
    for batch in (1, 3):
        case = replace(PLAIN, layout=layout, q_lens=(1,) * batch, kv_lens=(40,) * batch)
        table = lay_out(case, material(case), fill=Fill.STALE, salt=0).call.page_table

        assert ends_at_its_storage(table) and table.untyped_storage().nbytes() % 16 == 0


# Pools of which most is never touched


sparse_cases = cases(SPARSE).filter(lambda c: c.total_k > 0)


@drawn
@given(sparse_cases, fills.filter(lambda f: f is not Fill.STALE), salts)
def test_in_a_sparse_pool_the_live_pages_and_those_beside_them_are_hostile_but_for_live_slots(
    case: Case, fill: Fill, salt: int
) -> None:
    """In the judged layer; in the layers beside it, the pages that are live."""
    call = lay_out(case, material(case), fill=fill, salt=salt).call
    live = sorted({page for row in pages_of(case, call.page_table) for page in row})
    slots = live_slots(case, call)
    around = sorted({page + step for page in live for step in (-1, 0, 1)} & set(range(len(call.k_cache))))

    for cache in (call.k_cache, call.v_cache):
        near = cache.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.itemsize])[around].view(cache.dtype)
        assert kind(near.float()[~slots[around]].to(cache.dtype), fill)
        assert bool(near.float()[slots[around]].isfinite().all())
    if case.layout == "far-pages":
        k, page = call.k_cache, 2 * case.page_size * case.family.kv_heads * max(16, case.family.head_dim_v)
        assert k.storage_offset() == k.stride(0) // page // 2 * page
        for offset in (k.storage_offset() - page, k.storage_offset() + page):
            beside = k.as_strided((len(k), page), (k.stride(0), 1), offset)
            ids = torch.tensor(live)
            assert kind(torch.stack([beside[i] for i in ids.tolist()]), fill)


@pytest.mark.parametrize("dtype", sorted(CACHES))
def test_far_pages_lie_beyond_what_32_bits_hold_and_their_ids_beyond_16(dtype: str) -> None:
    """About half of the live pages; never in layer 0, and in the pool's last page too."""
    dtype, cache_dtype = CACHES[dtype]
    case = replace(PLAIN, layout="far-pages", dtype=dtype, cache_dtype=cache_dtype, kv_lens=(900, 3, 16, 0))
    for salt in (0, 1):
        call = lay_out(case, material(case), fill=Fill.STALE, salt=salt).call
        pages = torch.tensor([page for row in pages_of(case, call.page_table) for page in row])
        far = pages * call.k_cache.stride(0) >= FAR

        elements = call.k_cache.untyped_storage().nbytes() // call.k_cache.itemsize
        assert len(call.k_cache) > MANY and elements > FAR
        assert 0.4 < far.double().mean() < 0.6
        assert bool((pages[far] >= 2**16).all()) and bool(((pages >= 2**15) & (pages < 2**16)).any())
        assert call.k_cache.storage_offset() >= call.k_cache.stride(0) // 2
        assert int(pages.max()) == len(call.k_cache) - 1


def test_many_pages_have_ids_beyond_16_bits_and_offsets_within_32() -> None:
    case = replace(PLAIN, layout="many-pages", kv_lens=(900, 3, 16, 0))
    call = lay_out(case, material(case), fill=Fill.STALE, salt=0).call
    pages = torch.tensor([page for row in pages_of(case, call.page_table) for page in row])

    assert len(call.k_cache) >= MANY and len(call.k_cache) * call.k_cache.stride(0) < FAR
    assert 0.3 < (pages >= 2**16).double().mean() < 0.6 and bool(((pages >= 2**15) & (pages < 2**16)).any())


@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("page_size", [1, 256])
def test_a_sparse_pool_takes_memory_for_what_is_live_and_little_more(layout: str, page_size: int) -> None:
    """Whatever the size of a page: at most the judged layer of three pages and two more layers, by pages of memory."""
    wide = replace(FAMILY, kv_heads=4, q_heads=4, head_dim=256, head_dim_v=256)
    case = replace(PLAIN, family=wide, layout=layout, page_size=page_size, q_lens=(1, 1), kv_lens=(70, 600))
    call = lay_out(case, material(case), fill=Fill.STALE, salt=0).call
    page = 2 * page_size * 4 * 256 * 2
    taken = sum(stop - start for start, stop in extents(torch.empty(0, dtype=torch.uint8).set_(call.k_cache.untyped_storage())))

    pages = len({page for row in pages_of(case, call.page_table) for page in row})
    whole = call.k_cache.untyped_storage().nbytes()  # an assertion that fails with the storage in it would print all of it
    assert taken <= pages * 5 * (page + 2 * 4096)
    assert whole > 10 * taken


def test_garbage_page_ids_of_a_sparse_pool_are_of_pages_that_hold_something() -> None:
    """A page that nobody touched is 0 under every fill, and whoever reads it would not be seen."""
    case = replace(PLAIN, layout="far-pages", q_lens=(1,) * 30, kv_lens=(40,) + (1,) * 29)
    call = lay_out(case, material(case), fill=Fill.NAN, salt=0).call
    past = [e for b, n in enumerate(case.kv_lens) for e in call.page_table[b, -(-n // 16) :].tolist()]
    plausible = [e for e in past if 0 <= e < len(call.k_cache)]

    assert len(set(plausible)) > 10
    assert all(bool(call.k_cache[page].isnan().any()) for page in plausible)


# Shared pages


def test_sequences_share_whole_pages_of_the_first_one_as_far_as_both_reach() -> None:
    case = replace(PLAIN, q_lens=(1, 1, 1, 1), kv_lens=(60, 50, 40, 10), page_size=16, shared_prefix=37)
    made = material(case)
    call = lay_out(case, made, fill=Fill.NAN, salt=0).call
    first, second, third, fourth = pages_of(case, call.page_table)

    assert case.shared == (0, 37, 37, 10)
    assert first[:2] == second[:2] == third[:2]
    assert len({*first, *second, *third, *fourth}) == 4 + 2 + 1 + 1
    assert same_bits(gathered(case, call, call.k_cache), made.k)


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
    before = storage.clone()
    assert laid.call.out is not None
    laid.call.out[: case.total_q] = 0.0
    forbidden = (storage == before).nonzero().flatten()
    at = int(forbidden[data.draw(st.integers(0, len(forbidden) - 1))])
    storage[at] ^= data.draw(st.integers(1, 255))

    assert laid.canaries_broken(storage) == 1


@drawn
@given(with_out)
def test_there_are_canaries_on_every_side_of_the_output(case: Case) -> None:
    """Two guard rows before and after, and the tail rows; of every head, where heads are outermost."""
    laid = laid_out(case)
    out = laid.call.out
    assert out is not None
    row, width = out.stride(0), out.shape[2]

    for head in range(out.shape[1]):
        column = storage_of(laid).view(out.dtype)[out.storage_offset() + head * out.stride(1) :]
        before = storage_of(laid).view(out.dtype)[: out.storage_offset() + head * out.stride(1)]
        after = column[len(out) * row :]
        assert len(before) >= GUARD_ROWS * row and len(after) >= (GUARD_ROWS - 1) * row + width
    assert bool(is_canary(out).all())


@drawn
@given(with_out)
def test_what_was_written_is_no_canary_any_more(case: Case) -> None:
    """Of the elements of `out`, exactly those."""
    out = laid_out(case).call.out
    assert out is not None
    out[: case.total_q] = 0.5

    assert is_canary(out).flatten(1).sum(1).tolist() == [0] * case.total_q + [4 * case.family.head_dim_v] * case.tail_rows


def test_the_canary_is_finite_and_nothing_that_a_kernel_writes_by_chance() -> None:
    """Far from what attention gives: also where live rows are never written, or added to."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        values = canary(1 << 17).view(dtype)

        assert bool(values.isfinite().all())
        assert float(values.abs().min()) > 100


def test_no_single_number_is_invisible_on_canaries() -> None:
    """Wherever it is written, most of the places differ from it, whatever it is; so do most places from those a row on."""
    for dtype in (torch.int16, torch.int32):
        values = canary(1 << 17).view(dtype)

        assert int(torch.unique(values, return_counts=True)[1].max()) < len(values) // 100
        assert all(float((values[n:] == values[:-n]).double().mean()) < 0.01 for n in (1, 2, 64, 128, 512, 4096))


def test_declared_padding_may_be_written_but_not_the_guards() -> None:
    laid = laid_out(PLAIN, writes_padding=True)
    assert laid.call.out is not None
    laid.call.out[:] = 1.0
    assert laid.canaries_broken(storage_of(laid)) == 0

    storage_of(laid)[0] ^= 1
    storage_of(laid)[-1] ^= 1
    assert laid.canaries_broken(storage_of(laid)) == 2


def test_without_an_output_there_is_no_canary_to_break() -> None:
    laid = laid_out(replace(PLAIN, give_out=False))

    assert laid.call.out is None
    assert laid.canaries_broken(torch.zeros(9, dtype=torch.uint8)) == 0
