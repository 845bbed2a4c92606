"""The strategies draw what they say: every option, only calls that keep the contract, and simple ones first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis import strategies as st

from oracle.cases import LAYOUTS, SCALES, Case, from_toml, to_toml
from oracle.contract import OPTIONAL, Call, Precision, Record
from oracle.inputs import INPUT_CLASSES
from oracle.references.arithmetic import Arithmetic
from oracle.references.emulator import record_of
from oracle.references.exact import visible_keys
from oracle.references.second import second_opinion
from oracle.scope import Scope
from oracle.strategies import OPTIONS, Bits, batches, calls, cases, page_tables

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


# Whole cases

EVERYTHING = Scope(record=record_of(Arithmetic()), parameters=frozenset(OPTIONAL))
LITTLE = Scope(record=Record(dtypes=("fp16",), page_sizes=(64,), groups=(3,), head_dims=(96,)), parameters=frozenset())
PROMISES = Scope(
    record=Record(head_dims=(64,), page_sizes=(16,), groups=(1,), precision=Precision(subtract_first=True)),
    parameters=frozenset({"out"}),
)


def pairs(case: Case) -> list[tuple[int, int]]:
    return list(zip(case.q_lens, case.kv_lens, strict=True))


@cache
def many(scope: Scope) -> tuple[Case, ...]:
    """Cases enough to meet every feature, drawn once; ten a seed, since hypothesis goes on with variants of what it has drawn."""
    found: list[Case] = []

    @settings(drawn, derandomize=False, max_examples=10, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(cases(scope))
    def collect(case: Case) -> None:
        found.append(case)

    for number in range(40 if scope is EVERYTHING else 15):
        seed(number)(collect)()
    return tuple(found)


@pytest.mark.parametrize("scope", [EVERYTHING, LITTLE, PROMISES], ids=["everything", "little", "promises"])
def test_a_drawn_case_is_one_that_the_kernel_takes(scope: Scope) -> None:
    """And one that a trial can afford: a page of the pool and the pairs of queries and keys are bounded."""
    for case in many(scope):
        f = case.family
        assert scope.refuses(case) is None
        assert not case.give_out or "out" in scope.parameters
        products = f.q_heads * (f.head_dim + f.head_dim_v)
        assert sum(q * k for q, k in pairs(case)) * products <= 2e7 and case.total_q * products <= 6e5
        assert from_toml(to_toml(case), "here") == case


def test_the_simplest_case_is_one_token_with_every_option_off() -> None:
    quiet = settings(drawn, phases=[Phase.generate, Phase.shrink])
    case = find(cases(EVERYTHING), lambda _: True, settings=quiet)
    f = case.family

    assert pairs(case) == [(1, 1)] and (f.q_heads, f.kv_heads, f.head_dim, f.head_dim_v) == (1, 1, 40, 40)
    assert (f.causal, f.window, f.softcap, f.sinks, f.scale) == (True, (-1, -1), 0.0, False, 40**-0.5)
    assert (case.layout, case.scales, case.sinks, case.cache_dtype, case.inputs) == ("plain", "none", "none", "", "randn")
    assert (case.shared_prefix, case.padded_seqs, case.tail_rows, case.give_out, case.seed, case.page_size) == (
        0,
        0,
        0,
        False,
        0,
        16,
    )


@pytest.mark.parametrize(
    "wanted",
    [
        lambda c: any(q > k for q, k in pairs(c)),
        lambda c: any(0 < k == q for q, k in pairs(c)),
        lambda c: any(1 < q < k for q, k in pairs(c)),
        lambda c: 0 in c.kv_lens,
        lambda c: 0 in c.q_lens[1:-1] and c.q_lens[0] and c.q_lens[-1],
        lambda c: any(k and k % c.page_size == 0 for k in c.kv_lens),
        lambda c: any(k % c.page_size == 1 for k in c.kv_lens),
        lambda c: any(k in (63, 64, 65, 127, 128, 129) for k in c.kv_lens),
        lambda c: any(k == c.family.window[0] + 2 for k in c.kv_lens),
        lambda c: len(c.q_lens) > 16,
        lambda c: c.family.window[0] > 0 and c.family.softcap > 0 and c.sinks != "none",
        lambda c: c.family.window != (-1, -1) and not c.family.softcap and c.sinks == "none",
        lambda c: c.family.window == (-1, -1) and not c.family.softcap and c.sinks != "none",
        lambda c: not c.family.causal and c.family.window[1] > 0,
        lambda c: c.family.group == 12,
        lambda c: c.family.group == 5,
        lambda c: c.family.kv_heads == 1 and c.family.group > 1,
        lambda c: c.family.head_dim == 576 and c.family.head_dim_v == 512,
        lambda c: c.cache_dtype == "e4m3" and c.dtype == "fp16",
        lambda c: c.dtype == "fp32",
        lambda c: c.tail_rows > 64,
        *(lambda c, size=size: c.page_size == size for size in (1, 256)),
        *(lambda c, layout=layout: c.layout == layout for layout in LAYOUTS),
        *(lambda c, scales=scales: c.scales == scales for scales in SCALES),
        *(lambda c, inputs=inputs: c.inputs == inputs for inputs in INPUT_CLASSES),
        lambda c: c.padded_seqs > 0 and c.give_out,
        lambda c: c.shared_prefix > 0 and sum(n // c.page_size for n in c.shared) > 0,
    ],
)
def test_every_feature_of_a_case_is_drawn(wanted: Callable[[Case], bool]) -> None:
    assert any(map(wanted, many(EVERYTHING)))


def test_what_a_record_promises_is_drawn_and_nothing_else() -> None:
    assert {"tiny-v", "logits-1e36"} <= {case.inputs for case in many(PROMISES)}
    assert "logits-1e36" not in {case.inputs for case in many(EVERYTHING)}
    assert {case.give_out for case in many(PROMISES)} == {False, True}
