"""Who checks the reference: three readings of the contract, written apart, agree on calls over all of its options.

mpmath at 50 digits (exact), a dense fp64 formulation (second) and a textbook fp32 one (dense).  Tolerances are derived:
`oracle.references.exact.slack`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from oracle.contract import Call
from oracle.references.dense import dense_fp32
from oracle.references.exact import disagreement, exact_row, sample_pairs
from oracle.references.second import Second, second_opinion
from oracle.strategies import calls

U32, TINY32 = 2.0**-24, 2.0**-126
PAIRS = 6  # (row, head) of a call that mpmath looks at
drawn = settings(derandomize=True, deadline=None, database=None, max_examples=60)


def disagreements(call: Call, exact_call: Call) -> dict[str, float]:
    """Largest error of the second formulation (of `call`) against mpmath (of `exact_call`), by field, in units of its bound."""
    u_p = torch.finfo(call.q.dtype).eps / 2
    second = second_opinion(call, u_p=u_p)
    worst: dict[str, float] = {}
    for row, head in sample_pairs(second.lse.shape[0], second.lse.shape[1], count=PAIRS):
        got = {f.name: getattr(second, f.name)[row, head] for f in fields(Second)}
        errors = disagreement(exact_row(exact_call, row, head, u_p=u_p), got, head_dim=call.q.shape[2], u_p=u_p)
        worst |= {name: max(error, worst.get(name, 0.0)) for name, error in errors.items()}
    return worst


def test_the_second_formulation_agrees_with_fifty_digits_in_every_ingredient() -> None:
    """Difference at most the derived fp64 bound, for all 19 fields, over all options; no field is left uncompared."""
    seen: Counter[str] = Counter()

    @drawn
    @given(calls())
    def check(call: Call) -> None:
        worst = disagreements(call, call)
        assert all(error <= 1 for error in worst.values()), worst
        seen.update(worst.keys())

    check()
    assert set(seen) == {f.name for f in fields(Second)}
    assert min(seen.values()) >= 20, seen


@pytest.mark.parametrize(
    "change",
    [
        {"softmax_scale": 0.5 * (1 + 1e-6)},
        {"causal": True},
        {"window_size": (1, 1)},
        {"window_size": (2, 0)},
        {"window_size": (2, -1)},
        {"window_size": (-1, 1)},
        {"softcap": 1e3},
        {"sinks": torch.full((1,), -10.0)},
        {"q_scale": 1 + 1e-6},
        {"k_scale": torch.tensor([1.001])},
        {"v_scale": torch.tensor([[1.001]])},
        {"seqused_k": torch.tensor([4], dtype=torch.int32)},
        {"page_table": torch.tensor([[0, 1]], dtype=torch.int32)},
    ],
    ids=lambda change: "-".join(change),
)
def test_a_call_read_otherwise_is_seen(change: dict[str, Any]) -> None:
    """The comparison can fail: any option changed on one side breaks the agreement."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 1, 4, generator=generator) for n in (3, 8, 8))
    call = Call(
        q=q, k_cache=k.view(2, 4, 1, 4), v_cache=v.view(2, 4, 1, 4), cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32),
        seqused_k=torch.tensor([6], dtype=torch.int32), page_table=torch.tensor([[1, 0]], dtype=torch.int32),
        softmax_scale=0.5, window_size=(2, 1), causal=False,
    )  # fmt: skip

    assert max(disagreements(call, call).values()) <= 1
    assert max(disagreements(call, replace(call, **change)).values()) > 1


@drawn
@given(calls())
def test_the_textbook_in_fp32_agrees_within_the_error_of_fp32(call: Call) -> None:
    """|out - o| <= (e^slack - 1)(V1 + |o|) + the underflow of fp32; LSE likewise; what is -inf in one is -inf in the other."""
    out, lse = dense_fp32(call)
    second = second_opinion(call, u_p=2**-8)
    keys, scale = second.p2.new_tensor(call.k_cache.shape[0] * call.k_cache.shape[1]), 1 + second.kmax + second.smax
    bound = 4 * U32 * (keys + (call.q.shape[2] + 8) * scale)
    empty = second.lse == -torch.inf

    assert out.dtype == lse.dtype == torch.float32
    assert out.shape == second.out.shape
    assert torch.equal(lse == -torch.inf, empty)
    assert bool((out[empty] == 0).all())
    error = (out.double() - second.out).abs()
    limit = torch.expm1(bound)[..., None] * (second.v1 + second.out.abs()) + TINY32 * (1 + second.w1 * keys)
    assert bool((error <= limit).all())
    assert bool(((lse.double() - second.lse).abs()[~empty] <= bound[~empty]).all())


def changed(call: Call, order: Tensor) -> Call:
    """The same call with page p of the pool kept at order[p]; ids past the plan stay as they are."""
    moved = torch.argsort(order)
    table = call.page_table.clone()
    pages = -(-call.seqused_k[: call.live_seqs] // call.k_cache.shape[1])
    for b, n in enumerate(pages.tolist()):
        table[b, :n] = order[table[b, :n].long()].int()
    return replace(call, k_cache=call.k_cache[moved], v_cache=call.v_cache[moved], page_table=table)


@drawn
@given(calls())
def test_other_page_ids_for_the_same_data_change_no_bit(call: Call) -> None:
    other = changed(call, torch.arange(call.k_cache.shape[0]).flip(0))

    for one, two in zip(dense_fp32(call), dense_fp32(other), strict=True):
        assert torch.equal(one, two)
    first, second = second_opinion(call, u_p=2**-8), second_opinion(other, u_p=2**-8)
    assert all(torch.equal(getattr(first, f.name), getattr(second, f.name)) for f in fields(Second))


def with_keys_reversed(call: Call) -> Call:
    """The same call with the live keys of every sequence in reverse order."""
    k, v, page_size = call.k_cache.double(), call.v_cache.double(), call.k_cache.shape[1]  # torch cannot index-put e4m3
    for b in range(call.live_seqs):
        j = torch.arange(int(call.seqused_k[b]))
        page, slot = call.page_table[b].long()[j // page_size], j % page_size
        k[page, slot], v[page, slot] = k[page, slot].flip(0), v[page, slot].flip(0)
    return replace(call, k_cache=k, v_cache=v)


@drawn
@given(calls(options=("softcap", "sinks", "q_scale", "k_scale", "v_scale", "num_seqs"), max_q=1, spreads=(1.0, 0.1, 5.0, 30.0)))
def test_the_order_of_keys_does_not_matter_where_all_are_seen(call: Call) -> None:
    """One query at the last position sees every key: only the order of the sums may show, 1e-13 of V1 at logits of 100."""
    one, two = second_opinion(call, u_p=2**-8), second_opinion(with_keys_reversed(call), u_p=2**-8)

    unit = 1e-13 * (1 + (one.kmax + one.smax) / 100)
    assert bool(((one.out - two.out).abs() <= unit[..., None] * one.v1).all())
    alive = one.lse > -torch.inf
    assert bool(((one.lse - two.lse).abs()[alive] <= unit[alive]).all())


@drawn
@given(calls(options=("causal", "window_size", "softcap", "sinks", "q_scale", "k_scale", "num_seqs")))
def test_values_times_two_are_outputs_times_two(call: Call) -> None:
    """Exactly, and nothing else but the ingredients made of v changes."""
    one, two = second_opinion(call, u_p=2**-8), second_opinion(replace(call, v_scale=2.0), u_p=2**-8)

    for f in fields(Second):
        factor = 2 if f.name in ("out", "v1", "v2", "v2g", "d", "t", "w1") else 1
        assert torch.equal(getattr(two, f.name), factor * getattr(one, f.name)), f.name


def test_a_row_that_is_not_live_is_refused() -> None:
    """exact_row names the live rows."""
    call = Call(
        q=torch.zeros(3, 1, 1), k_cache=torch.zeros(1, 1, 1, 1), v_cache=torch.zeros(1, 1, 1, 1),
        cu_seqlens_q=torch.tensor([0, 2], dtype=torch.int32), seqused_k=torch.tensor([1], dtype=torch.int32),
        page_table=torch.zeros(1, 1, dtype=torch.int32), softmax_scale=1.0,
    )  # fmt: skip

    with pytest.raises(ValueError, match="row 2 is not live"):
        exact_row(call, 2, 0, u_p=2**-8)
