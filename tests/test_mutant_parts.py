"""What mutants are made of: selectors pick what they name, patches change what they name, masks and merges obey the contract."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.contract import Call
from oracle.mutants import addressing, masks, merging, patches, selectors
from oracle.mutants.mutant import Faulty, Run, Where, chosen_pairs
from oracle.mutants.selectors import never
from oracle.mutants.table import MUTANTS
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import emulate
from oracle.references.plan import live_rows, row_plan

CHUNKS = (5, 1, 20, 3), (150, 97, 300, 3)  # new tokens and keys of four sequences


def paged(
    lengths: tuple[tuple[int, ...], tuple[int, ...]] = CHUNKS,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (32, 32),
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    cache: torch.dtype = torch.bfloat16,
    hnd: bool = False,
    **options: Any,
) -> Call:
    """A call on scattered pages, with room past the plan in the page table."""
    g = torch.Generator().manual_seed(5)
    q_lens, kv_lens = lengths
    pages = [-(-n // page_size) for n in kv_lens]
    table = torch.randint(-5, 10**6, (len(kv_lens), max(pages) + 2), generator=g)
    ids = torch.randperm(sum(pages) + 3, generator=g)
    for row, count in enumerate(pages):
        table[row, :count] = ids[sum(pages[:row]) : sum(pages[: row + 1])]

    def pool(dim: int) -> Tensor:
        shape = (len(ids), heads[1], page_size, dim) if hnd else (len(ids), page_size, heads[1], dim)
        values = torch.randn(shape, generator=g).to(cache)
        return values.transpose(1, 2) if hnd else values

    call = Call(
        q=(3 * torch.randn(sum(q_lens), heads[0], dims[0], generator=g)).to(dtype),
        k_cache=pool(dims[0]),
        v_cache=pool(dims[1]),
        cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).int(),
        seqused_k=torch.tensor(kv_lens, dtype=torch.int32),
        page_table=table.int(),
        softmax_scale=32**-0.5,
    )
    return replace(call, **options)


SCALES: dict[str, Any] = {"k_scale": torch.tensor([[0.5, 3.0]] * 4), "v_scale": torch.tensor([[2.0, 0.25]] * 4)}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
CALLS: dict[str, Call] = {
    "chunks": paged(),
    "everything": paged(window_size=(20, 0), softcap=5.0, sinks=SINKS, hnd=True, **SCALES),
    "8-bit": paged(cache=torch.float8_e4m3fn, **SCALES),
    "mixed": paged(((1, 0, 33, 1, 0, 17, 1, 2), (200, 5, 50, 0, 0, 17, 64, 1)), num_seqs=8, hnd=True),
    "two-sided": paged(window_size=(30, 10), causal=False),
    "short": paged(((20, 9, 16, 1), (12, 9, 16, 3)), sinks=SINKS),
    "group-12": paged(heads=(12, 1)),
    "uneven": paged(dims=(32, 16)),
    "decode-70": paged(((1,) * 70, (9,) * 70)),
    "page-8": paged(page_size=8),
}


def run_of(kernel: Faulty, call: Call) -> Run:
    return Run(call=call, plan=row_plan(call, live_rows(call)), past=kernel.past)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# Selectors


ANY = MUTANTS["zeros"]
KERNEL = Faulty(ANY)


def where(selector: Where, name: str, kernel: Faulty | None = None) -> Tensor:
    """The pairs that the selector picks of a directed case, for a kernel with or without a past."""
    return chosen_pairs(replace(ANY, where=selector), run_of(kernel or Faulty(ANY), CALLS[name]))


def test_selectors_combine_as_the_words_say() -> None:
    one, two = where(selectors.decode, "chunks"), where(selectors.head(2), "chunks")

    assert torch.equal(where(selectors.all_of(selectors.decode, selectors.head(2)), "chunks"), one & two)
    assert torch.equal(where(selectors.unless(selectors.decode), "chunks"), ~one)
    assert not where(never, "chunks").any()


def test_selectors_of_rows_and_heads_pick_what_they_name() -> None:
    """CHUNKS: sequences of 5, 1, 20 and 3 new tokens on 150, 97, 300 and 3 keys; four heads."""
    lengths = torch.tensor(CHUNKS[0]).repeat_interleave(torch.tensor(CHUNKS[0]))
    keys = torch.tensor(CHUNKS[1]).repeat_interleave(torch.tensor(CHUNKS[0]))
    rows = {
        "decode": (selectors.decode, lengths == 1),
        "several_tokens": (selectors.several_tokens, lengths > 1),
        "with_prefix": (selectors.with_prefix, keys > lengths),
        "long_context": (selectors.long_context(150), keys > 150),
        "kv_len_is": (selectors.kv_len_is(1, 32), keys == 97),
        "not_first_sequence": (selectors.not_first_sequence, torch.arange(29) >= 5),
        "one_key": (selectors.one_key, torch.arange(29) == 26),
        "last_row": (selectors.last_row, torch.tensor([i in (4, 5, 25, 28) for i in range(29)])),
        "token_from": (selectors.token_from(16), (torch.arange(29) >= 22) & (torch.arange(29) < 26)),
        "long_row": (selectors.long_row(296), (torch.arange(29) >= 22) & (torch.arange(29) < 26)),
    }
    for name, (selector, wanted) in rows.items():
        assert torch.equal(where(selector, "chunks"), wanted[:, None].expand(29, 4)), name
    for selector, heads in ((selectors.head(2), [1]), (selectors.heads_from(3), [2, 3]), (selectors.last_head, [3])):
        assert torch.equal(where(selector, "chunks")[0].nonzero().flatten(), torch.tensor(heads))
    assert torch.equal(where(selectors.not_first_kv_head, "chunks")[0], torch.tensor([False, False, True, True]))
    assert torch.equal(where(selectors.without_keys, "mixed")[:, 0].nonzero().flatten(), torch.tensor([34, 53]))


@pytest.mark.parametrize("count", [10, 100, 1000])
def test_one_in_a_number_is_about_that_share(count: int) -> None:
    call = replace(CALLS["chunks"], q=torch.zeros(50_000, 4, 32), cu_seqlens_q=torch.tensor([0, 50_000]), num_seqs=1)
    chosen = chosen_pairs(replace(ANY, where=selectors.one_in(count)), run_of(KERNEL, call))

    assert abs(int(chosen.sum()) - 200_000 / count) < 5 * (200_000 / count) ** 0.5
    assert bool(chosen.any(0).all())


def test_selectors_of_calls_hold_for_all_of_a_call_or_none() -> None:
    for selector, yes, no in (
        (selectors.windowed, "everything", "chunks"),
        (selectors.capped, "everything", "chunks"),
        (selectors.sunk, "everything", "chunks"),
        (selectors.eight_bit, "8-bit", "chunks"),
        (selectors.not_causal, "two-sided", "chunks"),
        (selectors.padded, "mixed", "chunks"),
        (selectors.odd_group, "group-12", "chunks"),
        (selectors.strided_cache, "mixed", "chunks"),
        (selectors.uneven_dims, "uneven", "chunks"),
        (selectors.mixed, "chunks", "decode-70"),
        (selectors.batch_over(64), "decode-70", "chunks"),
        (selectors.page_size(8), "page-8", "chunks"),
    ):
        assert bool(where(selector, yes).all())
        assert not bool(where(selector, no).any())


def test_state_lives_in_the_kernel_object() -> None:
    kernel, other = Faulty(ANY), Faulty(ANY)
    call = CALLS["chunks"]
    before = [where(s, "chunks", kernel).any() for s in (selectors.second_call, selectors.shape_seen_before)]
    kernel(call, True)

    assert not any(before)
    assert bool(where(selectors.second_call, "chunks", kernel).all()) and not where(selectors.second_call, "chunks", other).any()
    assert bool(where(selectors.shape_seen_before, "chunks", kernel).all())
    assert bool(where(selectors.after_other_shapes, "page-8", kernel).all())
    assert (
        bool(where(selectors.every_call(2), "chunks", kernel).all())
        and not where(selectors.every_call(3), "chunks", kernel).any()
    )


# Patches


def test_a_patch_changes_only_what_it_names() -> None:
    call = CALLS["everything"]
    run = run_of(KERNEL, call)
    changed = {
        "window_size": patches.window_is(lambda left, right: (left + 1, right))(run),
        "softcap": patches.softcap_is(lambda c: 50.0)(run),
        "softmax_scale": patches.scale_is(lambda c: 1.0)(run),
        "sinks": patches.sinks_are(lambda s, c: 2 * s)(run),
        "k_scale": patches.scales_are(lambda t: 2 * t, "k_scale")(run),
        "page_table": addressing.pages_are(lambda t, c: t)(run),
    }
    for name, patched in changed.items():
        others = {f.name for f in fields(call) if getattr(patched, f.name) is not getattr(call, f.name)}
        assert others == {name}


def test_ids_of_a_patched_table_are_in_the_pool_and_live_ones_are_kept() -> None:
    call = CALLS["chunks"]
    table_of = addressing.pages_are(lambda t, c: t)(run_of(KERNEL, call)).page_table
    live = torch.arange(table_of.shape[1]) < addressing.page_count(call)

    assert bool((table_of >= 0).all()) and bool((table_of < call.k_cache.shape[0]).all())
    assert torch.equal(table_of[live], call.page_table[live].long())


@pytest.mark.parametrize("name", ["chunks", "everything", "8-bit", "mixed"])
def test_reading_with_its_own_strides_changes_nothing_and_with_others_stays_in_the_storage(name: str) -> None:
    call = CALLS[name]
    for x in (call.q, call.k_cache, call.v_cache):
        assert same_bits(addressing.restrided(x, x.stride()), x)
        assert addressing.restrided(x, tuple(3 * s for s in x.stride())).shape == x.shape
        assert addressing.as_packed(x).is_contiguous() or addressing.as_packed(x).shape == x.shape


def test_heads_read_by_the_rule_of_the_contract_is_the_call() -> None:
    for name in ("chunks", "8-bit"):
        run = run_of(KERNEL, CALLS[name])
        got = emulate(patches.heads_read(lambda h, group, count: h // group)(run), Arithmetic())
        wanted = emulate(run.call, Arithmetic())
        assert same_bits(got[0], wanted[0]) and same_bits(got[1], wanted[1])


def test_a_mask_by_the_rule_of_the_contract_is_the_call() -> None:
    for name in ("chunks", "everything", "two-sided", "short"):
        call = CALLS[name]
        plan = row_plan(call, live_rows(call))
        for mask in (
            masks.positions(lambda r: r.kv_len - r.q_len + r.index),
            masks.first_keys(lambda r: r.plan.lo),
            masks.last_keys(lambda r: r.plan.hi),
            masks.causal_ends(lambda r: r.plan.hi),
            masks.window_starts(lambda r, left: r.plan.pos - left),
        ):
            own = mask(call, plan)
            assert torch.equal(own.lo.minimum(own.hi), plan.lo) and torch.equal(own.hi, plan.hi)


def test_no_mask_shows_keys_past_the_sequence() -> None:
    call = CALLS["chunks"]
    plan = row_plan(call, live_rows(call))
    wide = masks.last_keys(lambda r: r.plan.hi + 1_000)(call, plan)

    assert torch.equal(wide.hi, call.seqused_k.long()[plan.seq])
    assert bool((masks.first_keys(lambda r: r.plan.lo - 1_000)(call, plan).lo == 0).all())


@pytest.mark.parametrize("name", ["chunks", "8-bit", "short", "everything"])
def test_splits_merged_by_the_correct_rule_are_as_accurate_as_one_pass(name: str) -> None:
    """The faults of a merge are its own: with the correct rule the fp32 merge is within the rounding of the output."""
    call = CALLS[name]
    got = merging.merged_by(merging.correct)(call, Arithmetic(), live_rows(call))
    wanted = emulate(call, Arithmetic(p_format="fp32"))
    largest = 2.0 ** (torch.frexp(wanted[0].float().abs().amax()).exponent)

    assert float((got[0].float() - wanted[0].float()).abs().max()) <= torch.finfo(call.q.dtype).eps * float(largest)
    finite = torch.isfinite(wanted[1])
    assert torch.equal(torch.isfinite(got[1]), finite)
    assert float((got[1] - wanted[1])[finite].abs().max()) < 1e-4
