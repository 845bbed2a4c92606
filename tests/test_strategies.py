"""The strategies draw what they say: every option, only calls that keep the contract, and simple ones first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

from oracle.contract import Call
from oracle.references.exact import visible_keys
from oracle.references.second import second_opinion
from oracle.strategies import OPTIONS, Bits, batches, calls, page_tables

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=100)


def differs(name: str) -> Callable[[Call], bool]:
    """Whether a call sets the option away from its default."""
    default = getattr(Call, "__dataclass_fields__")[name].default  # noqa: B009 - mypy knows no such attribute
    return lambda call: bool(getattr(call, name) is not None and getattr(call, name) != default)


def test_the_simplest_call_is_one_token_with_every_option_off() -> None:
    """What every failure shrinks towards."""
    call = find(calls(), lambda _: True, settings=drawn)

    assert call.q.shape == (1, 1, 4)
    assert call.cu_seqlens_q.tolist() == [0, 1]
    assert call.seqused_k.tolist() == [1]
    assert call.causal
    assert not any(differs(name)(call) for name in OPTIONS if name != "sinks")
    assert call.sinks is None


@pytest.mark.parametrize(
    "wanted",
    [
        *(differs(name) for name in ("causal", "window_size", "softcap", "num_seqs")),
        lambda c: c.sinks is not None,
        *(lambda c, n=n: isinstance(c.q_scale, torch.Tensor) and c.q_scale.dim() == n for n in (1, 2)),
        *(lambda c, n=n: isinstance(c.v_scale, torch.Tensor) and c.v_scale.dim() == n for n in (1, 2)),
        lambda c: isinstance(c.k_scale, float),
        lambda c: not c.causal and min(c.window_size) > 0,
        lambda c: 0 in c.seqused_k[: c.live_seqs].tolist(),
        lambda c: 0 in c.cu_seqlens_q[: c.live_seqs + 1].diff().tolist(),
        lambda c: bool((c.cu_seqlens_q[1 : c.live_seqs + 1] - c.cu_seqlens_q[: c.live_seqs] > c.seqused_k[: c.live_seqs]).any()),
        lambda c: c.k_cache.shape[3] != c.v_cache.shape[3],
        lambda c: c.q.shape[1] == 5 * c.k_cache.shape[2],
        lambda c: c.k_cache.dtype == torch.float8_e4m3fn,
        lambda c: c.q.dtype == torch.float32,
        lambda c: c.k_cache.shape[1] == 16,
        lambda c: not c.k_cache.is_contiguous(),
        lambda c: bool(c.k_cache.float().isnan().any()),
        lambda c: bool(((c.page_table < 0) | (c.page_table >= c.k_cache.shape[0])).any()),
        lambda c: bool((c.seqused_k[c.live_seqs :] < 0).any()),
        lambda c: any(len(visible_keys(c, row)) == 0 for row in range(int(c.cu_seqlens_q[c.live_seqs]))),
        lambda c: bool((second_opinion(c, u_p=2**-8).p2g > 1.2 * second_opinion(c, u_p=2**-8).p2).any()),
        lambda c: bool((second_opinion(c, u_p=2**-8).smax > 1e4).any()),
    ],
)
def test_every_feature_is_drawn(wanted: Callable[[Call], bool]) -> None:
    """Within a thousand examples; `find` raises where nothing is found."""
    settled = settings(drawn, max_examples=1000, phases=[p for p in drawn.phases if p.name == "generate"])

    assert wanted(find(calls(), wanted, settings=settled))


@drawn
@given(calls())
def test_a_call_keeps_the_contract(call: Call) -> None:
    """Shapes and dtypes fit, ids of live pages are distinct, what is live is finite, and logits stay below 2^20."""
    group = call.q.shape[1] / call.k_cache.shape[2]
    assert group == int(group)
    assert call.k_cache.shape[:3] == call.v_cache.shape[:3]
    assert call.q.shape[2] == call.k_cache.shape[3]
    assert call.k_cache.dtype == call.v_cache.dtype
    assert {call.cu_seqlens_q.dtype, call.seqused_k.dtype, call.page_table.dtype} == {torch.int32}
    assert len(call.cu_seqlens_q) == len(call.seqused_k) + 1 == len(call.page_table) + 1
    pages = [-(-n // call.k_cache.shape[1]) for n in call.seqused_k[: call.live_seqs].tolist()]
    owned = [page for b, n in enumerate(pages) for page in call.page_table[b, :n].tolist()]
    assert len(set(owned)) == len(owned)
    assert all(0 <= page < call.k_cache.shape[0] for page in owned)
    everything = second_opinion(replace(call, softcap=0.0, causal=False, window_size=(-1, -1), sinks=None), u_p=2**-8)
    assert bool(everything.out.isfinite().all())
    assert bool((everything.kmax < 2**20).all())


@drawn
@given(calls(options=(), tails=("zero",)))
def test_options_that_are_not_named_stay_at_their_default(call: Call) -> None:
    assert call.causal
    assert call.sinks is None
    assert not any(differs(name)(call) for name in OPTIONS if name != "sinks")


def test_an_unknown_option_is_refused() -> None:
    """The message names it."""
    with pytest.raises(ValueError, match=r"got \['alibi'\]"):
        find(calls(options=("alibi",)), lambda _: True)


@drawn
@given(batches(max_seqs=3, max_q=2, max_kv=9))
def test_batches_stay_within_their_limits(lengths: tuple[tuple[int, int], ...]) -> None:
    assert 1 <= len(lengths) <= 3
    assert all(0 <= q <= 2 and 0 <= kv <= 9 for q, kv in lengths)


@drawn
@given(st.data(), st.lists(st.integers(0, 5), max_size=4))
def test_page_tables_own_distinct_pages_and_leave_some_to_nobody(data: st.DataObject, pages: list[int]) -> None:
    table, num_pages = data.draw(page_tables(pages, tail="stale"))

    owned = [page for b, n in enumerate(pages) for page in table[b, :n].tolist()]
    assert sorted(set(owned)) == sorted(owned)
    assert len(owned) < num_pages
    assert table.shape[1] >= 1
    assert bool(((table >= 0) & (table < num_pages)).all())


def test_the_same_seed_gives_the_same_bits() -> None:
    """On any machine: the digest was taken once."""
    bits = Bits(np.random.Philox(7))
    numbers = bits.normal(1000).numpy().tobytes() + bits.integers(1000, 50).tobytes() + bits.permutation(50).tobytes()

    assert hashlib.sha256(numbers).hexdigest()[:16] == "5078afd044db6530"


def test_normal_numbers_have_mean_0_and_variance_1() -> None:
    """Within five standard errors of 10^5 numbers, and none beyond 6."""
    x = Bits(np.random.Philox(0)).normal(100_000)

    assert abs(float(x.mean())) < 5 * 100_000**-0.5
    assert abs(float(x.var()) - 1) < 5 * (2 / 100_000) ** 0.5
    assert float(x.abs().max()) < 6
