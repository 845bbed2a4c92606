"""Planted faults: every one is active where its mistake can show, silent where it cannot, and hides behind a correct record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle.contract import Call, Precision, Record
from oracle.mutants import planted
from oracle.mutants.planted import FAULTS
from oracle.mutants.table import MUTANTS
from oracle.references.arithmetic import Arithmetic, Planted
from oracle.references.emulator import emulate
from oracle.references.plan import live_rows

PAGE_FAULTS = ("k_rows_swapped", "v_page_rolled", "page_stale", "v_page_zero")


def paged(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], page_size: int = 16, kv_heads: int = 2, **options: Any) -> Call:
    """A bf16 call with 4 query heads of 32 dims and logits of deviation 4."""
    g = torch.Generator().manual_seed(5)
    pages = torch.tensor([-(-n // page_size) for n in kv_lens])
    table = (pages.cumsum(0) - pages)[:, None] + torch.arange(int(pages.max()))
    shape = (int(pages.sum()), page_size, kv_heads, 32)
    call = Call(
        q=(4 * torch.randn(sum(q_lens), 4, 32, generator=g)).bfloat16(),
        k_cache=torch.randn(*shape, generator=g).bfloat16(),
        v_cache=torch.randn(*shape, generator=g).bfloat16(),
        cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).int(),
        seqused_k=torch.tensor(kv_lens, dtype=torch.int32),
        page_table=table.int(),
        softmax_scale=32**-0.5,
    )
    return replace(call, **options)


CALLS = {
    "causal": paged((40, 3), (420, 250)),
    "window": paged((40, 3), (420, 250), window_size=(100, 0)),
    "softcap": paged((40, 3), (420, 250), softcap=5.0),
    "huge logits": paged((40, 3), (420, 250), softmax_scale=1e35),
}


def results(call: Call, name: str, rows: Tensor | None = None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What the fault gives, and what the kernel that it claims to be gives."""
    return emulate(call, FAULTS[name].arithmetic, rows), emulate(call, FAULTS[name].claims, rows)


def differs(call: Call, name: str, rows: Tensor | None = None) -> bool:
    got, claimed = results(call, name, rows)
    return not (torch.equal(got[0], claimed[0]) and torch.equal(got[1], claimed[1]))


@pytest.mark.parametrize("name", list(FAULTS))
def test_every_fault_changes_bits_somewhere(name: str) -> None:
    assert any(differs(call, name) for call in CALLS.values())


@pytest.mark.parametrize("name", list(FAULTS))
def test_every_fault_is_a_mutant_and_has_the_record_that_it_claims(name: str) -> None:
    """The default record, but for two faults of kernels that promise 8-bit P or to subtract first."""
    kernel = getattr(planted, name)
    promised = {
        "p_e4m3_saturated": Precision(p_format="e4m3", p_scale=256.0),
        "ffma_overflow": Precision(subtract_first=True),
    }

    assert kernel.__name__ == name
    assert kernel.__wrapped__.mutant == FAULTS[name] == MUTANTS[name]
    assert kernel.record == Record(precision=promised.get(name, Precision()))


def test_an_unknown_fault_is_an_attribute_error_that_lists_them() -> None:
    with pytest.raises(AttributeError, match=r"no fault 'none'; it has window_plus_1, "):
        _ = planted.none


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("name", PAGE_FAULTS)
def test_page_faults_show_at_any_page_size_under_a_window_in_decode_and_in_prefill(name: str, page_size: int) -> None:
    assert differs(paged((1, 1), (700, 900), page_size), name)
    assert differs(paged((1, 1), (700, 900), page_size, window_size=(127, 0)), name)
    assert differs(paged((600,), (600,), page_size), name, torch.tensor([310, 599]))
    assert differs(paged((3,), (20,), page_size, causal=False), name) == (page_size < 10 or name != "page_stale")


@pytest.mark.parametrize("name", ["k_rows_swapped", "v_page_rolled"])
def test_a_page_of_one_row_has_no_other_to_confuse_it_with(name: str) -> None:
    assert not differs(paged((4,), (200,), 1), name)


def test_one_page_is_wrong_and_no_other() -> None:
    """Keys of unit mass each: the output moves by one page's share of the sum."""
    call = paged((4,), (256,), 16)
    call = replace(call, q=torch.zeros_like(call.q), v_cache=torch.ones_like(call.v_cache), causal=False)

    assert torch.equal(emulate(call, FAULTS["v_page_zero"].arithmetic)[0], torch.full((4, 4, 32), 15 / 16).bfloat16())


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("window_plus_1", CALLS["causal"]),
        ("window_minus_1", CALLS["causal"]),
        ("diagonal_minus_1", replace(CALLS["causal"], causal=False)),
        ("diagonal_plus_1", replace(CALLS["causal"], causal=False)),
        ("softcap_omitted", CALLS["causal"]),
        ("head_mapped_wrong", paged((4,), (200,), kv_heads=1)),
        ("tile_1_skipped", paged((4,), (60,))),
        ("tile_3_unscaled", paged((4,), (60,))),
        ("page_stale", paged((1,), (16,))),
        ("nan_in_masked_lane", paged((1,), (128,))),
    ],
)
def test_a_fault_is_silent_where_its_mistake_cannot_show(name: str, call: Call) -> None:
    assert not differs(call, name)


def test_shifted_masks_are_the_plan_of_a_neighbour() -> None:
    """One key more or less on the side that the name says, and no key past either end of the sequence."""
    call = paged((6, 4), (6, 90), window_size=(20, 0))
    for name, shifted in (
        ("window_plus_1", replace(call, window_size=(21, 0))),
        ("window_minus_1", replace(call, window_size=(19, 0))),
        ("diagonal_plus_1", replace(call, causal=False, window_size=(20, 1))),
    ):
        got, expected = emulate(call, FAULTS[name].arithmetic), emulate(shifted, Arithmetic())
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
    own = emulate(replace(call, window_size=(0, 0)), FAULTS["diagonal_minus_1"].arithmetic)
    assert not own[0].any()
    assert bool(torch.isneginf(own[1]).all())


def test_a_row_keeps_its_only_key_when_the_last_is_dropped() -> None:
    call = paged((3,), (3,))
    out, lse = emulate(call, FAULTS["last_key_dropped"].arithmetic)
    first = emulate(call, Arithmetic(), torch.tensor([0]))

    assert torch.equal(out[0], first[0][0])
    assert torch.equal(lse[0], first[1][0])
    assert differs(call, "last_key_dropped")


def test_a_scale_fault_is_a_scale() -> None:
    call = CALLS["causal"]
    got = emulate(call, Arithmetic(planted=Planted(scale_factor=2.0)))
    expected = emulate(replace(call, softmax_scale=2 * call.softmax_scale), Arithmetic())

    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_nan_stays_in_its_column_and_reaches_rows_with_a_masked_lane_only() -> None:
    call = CALLS["causal"]
    out, lse = emulate(call, FAULTS["nan_in_masked_lane"].arithmetic)
    masked = torch.tensor([(420 - 39 + i) % 64 != 0 for i in range(40)] + [True] * 3)

    assert torch.equal(out.isnan().any(2).any(1), masked)
    assert torch.equal(out.isnan().any(0).nonzero(), torch.tensor([[0, 0], [1, 0]]))
    assert bool(torch.isfinite(lse).all())


def test_faults_of_pv_leave_the_lse_alone() -> None:
    for name in ("tile_1_skipped", "tile_3_unscaled", "v_page_zero", "v_page_rolled", "zeros", "pv_bf16", "p_e4m3_saturated"):
        got, claimed = results(CALLS["causal"], name)
        assert not torch.equal(got[0], claimed[0])
        assert torch.allclose(got[1], claimed[1], rtol=1e-6, atol=0)


def test_the_wrong_head_is_the_last_and_reads_the_first() -> None:
    call = paged((5,), (90,), kv_heads=4)
    got, claimed = results(call, "head_mapped_wrong")
    k_cache, v_cache = (cache[:, :, :1].expand(-1, -1, 4, -1) for cache in (call.k_cache, call.v_cache))
    expected = emulate(replace(call, k_cache=k_cache, v_cache=v_cache), Arithmetic())

    for mine, theirs, wanted in zip(got, claimed, expected, strict=True):
        assert torch.equal(mine[:, :3], theirs[:, :3])
        assert torch.equal(mine[:, 3], wanted[:, 3])


def test_a_plain_mean_of_splits_ignores_how_much_each_weighs() -> None:
    """Zero logits, 100 keys in a split of 64 and one of 36: the mean of the two halves, not of the keys."""
    call = paged((1,), (100,), causal=False)
    index = torch.arange(112).view(7, 16, 1, 1)
    v_cache = torch.where(index < 64, 1.0, 3.0).expand_as(call.v_cache).bfloat16()
    call = replace(call, q=torch.zeros_like(call.q), v_cache=v_cache)

    assert float(emulate(call, FAULTS["splits_averaged"].arithmetic)[0][0, 0, 0]) == 2.0
    assert len(live_rows(call)) == 1
