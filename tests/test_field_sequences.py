"""One call as dense attention over each sequence: what a library is given, and what is answered without it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oracle.contract import Answer, Call
from oracle.kernels.field.sequences import NO_LIMIT, Attend, Dense, by_sequence, gather
from oracle.references.dense import dense_fp32

LENGTHS = ((3, 0, 5, 1, 2), (19, 4, 2, 1, 0))  # more queries than keys, and no keys, among them


def case(window: tuple[int, int] = (-1, -1), *, causal: bool = True, sinks: bool = False) -> Call:
    """Sequences of LENGTHS on pages of 4 in another order, two rows past the plan, stale ids past the page table."""
    generator = torch.Generator().manual_seed(0)
    q_lens, kv_lens = LENGTHS

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    table = torch.full((len(kv_lens), 5), 10_000, dtype=torch.int32)
    free = torch.randperm(12, generator=generator).int()
    for row, kv_len in zip(table, kv_lens, strict=True):
        pages = -(-kv_len // 4)
        row[:pages], free = free[:pages], free[pages:]
    return Call(
        q=normal(sum(q_lens) + 2, 4, 8),
        k_cache=normal(12, 4, 2, 8),
        v_cache=normal(12, 4, 2, 6),
        cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).int(),
        seqused_k=torch.tensor(kv_lens).int(),
        page_table=table,
        softmax_scale=0.3,
        causal=causal,
        window_size=window,
        sinks=normal(4) if sinks else None,
    )


def plain(dense: Dense) -> tuple[Tensor, Tensor]:
    """The formula, from what a library is given."""
    group = dense.q.shape[1] // dense.k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (dense.k, dense.v))
    logits = torch.einsum("qhd,khd->hqk", dense.q, k) * dense.call.softmax_scale
    logits = logits.masked_fill(~dense.mask(), -math.inf)
    if dense.call.sinks is not None:
        logits = torch.cat([logits, dense.call.sinks[:, None, None].expand(-1, logits.shape[1], 1)], -1)
    lse = logits.logsumexp(-1)
    weights = (logits - lse[..., None]).exp()[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T


def unasked(dense: Dense) -> tuple[Tensor, None]:
    raise AssertionError("a library was asked")


def answers(call: Call, attend: Attend, *, whole: bool = False) -> tuple[Tensor, Tensor]:
    answer: Answer = by_sequence(call, attend, return_lse=True, whole=whole)
    assert isinstance(answer, tuple)
    return answer


MASKS = [
    ((-1, -1), True),
    ((-1, -1), False),
    ((0, 0), True),
    ((3, 0), True),
    ((2, 5), True),
    ((3, 2), False),
    ((3, -1), False),
    ((-1, 2), False),
]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("window", "causal"), MASKS)
def test_the_formula_on_what_is_given_is_the_reference(window: tuple[int, int], causal: bool, sinks: bool, whole: bool) -> None:
    call = case(window, causal=causal, sinks=sinks)
    live = int(call.cu_seqlens_q[-1])

    out, lse = answers(call, plain, whole=whole)

    want, want_lse = dense_fp32(call)
    torch.testing.assert_close(out[:live], want[:live], rtol=0, atol=1e-5)
    torch.testing.assert_close(lse[:live], want_lse[:live], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("window", "causal"), MASKS)
def test_causal_and_full_say_what_the_mask_says(window: tuple[int, int], causal: bool) -> None:
    seen = []

    def look(dense: Dense) -> tuple[Tensor, Tensor]:
        rows, keys = dense.q.shape[0], dense.k.shape[0]
        lower = torch.ones(rows, keys, dtype=torch.bool).tril(dense.pos)
        assert dense.full == bool(dense.mask().all())
        assert not dense.causal or torch.equal(dense.mask(), lower)
        assert bool(dense.mask().any(1).all())  # every row sees a key
        seen.append(dense.causal)
        return plain(dense)

    answers(case(window, causal=causal), look)
    assert seen and any(seen) == (causal and window in ((-1, -1), (0, 0), (3, 0), (2, 5)))


def test_only_keys_that_a_row_sees_are_given_unless_all_are_asked_for() -> None:
    given: list[int] = []

    def count(dense: Dense) -> tuple[Tensor, Tensor]:
        given.append(dense.k.shape[0])
        return plain(dense)

    answers(case((3, 0)), count)
    answers(case((3, 0)), count, whole=True)

    assert given == [3 + 3, 2, 1, 19, 2, 1]


def test_rows_without_keys_are_answered_and_not_given() -> None:
    call = case(sinks=True)
    nothing = replace(call, seqused_k=torch.zeros_like(call.seqused_k))
    assert call.sinks is not None

    out, lse = answers(nothing, unasked)
    _, without = answers(replace(nothing, sinks=None), unasked)

    live = int(call.cu_seqlens_q[-1])
    assert not bool(out[:live].any())
    assert torch.equal(lse[:live], call.sinks.expand(live, -1))
    assert bool((without[:live] == -math.inf).all())


def test_what_lies_past_the_plan_is_neither_given_nor_written() -> None:
    call = case()
    out = torch.full((call.q.shape[0], 4, 6), 7.0)
    longer = replace(
        call,
        cu_seqlens_q=torch.cat([call.cu_seqlens_q, torch.tensor([2**31 - 1], dtype=torch.int32)]),
        seqused_k=torch.cat([call.seqused_k, torch.tensor([2**31 - 1], dtype=torch.int32)]),
        num_seqs=5,
        out=out,
    )

    answer = by_sequence(longer, plain)

    assert answer is out
    assert torch.equal(out[:-2], answers(call, plain)[0][:-2])
    assert bool((out[-2:] == 7.0).all())


@pytest.mark.parametrize(("start", "stop"), [(0, 19), (4, 8), (3, 9), (18, 19)])
def test_gathered_tokens_are_those_of_the_pages_in_their_order(start: int, stop: int) -> None:
    call = case()
    pages = call.page_table[0]
    want = [call.k_cache[pages[t // 4], t % 4] for t in range(start, stop)]

    assert torch.equal(gather(call.k_cache, pages, start, stop), torch.stack(want))


def test_no_limit_is_farther_than_any_sequence_and_its_sums_fit_int32() -> None:
    assert NO_LIMIT > 2**26 and 2 * NO_LIMIT <= 2**31
