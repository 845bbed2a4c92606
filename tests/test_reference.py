"""The reference is right: mpmath at 50 digits and a second fp64 formulation agree with it over all options.

Tolerances are what fp64 may be wrong by (`oracle.references.exact.slack`), and a part of the error bound B.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from oracle.contract import Call, Precision
from oracle.references import attention
from oracle.references.attention import Exact, attend
from oracle.references.bound import Bound, bound
from oracle.references.exact import disagreement, exact_row, sample_pairs, slack, visible_keys
from oracle.references.plan import live_rows
from oracle.references.roundoff import roundoff
from oracle.references.second import second_opinion
from oracle.strategies import DTYPES, calls

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=60)
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PAIRS = 6  # (row, head) of a call that mpmath looks at

# field of the checkers -> field of Exact
FIELDS = {name: name for name in ("out", "lse", "v1", "v2", "v2g", "w1", "a2", "b1", "s1", "s2", "g1", "g2", "p2", "p2g")}
FIELDS |= {"d": "spread", "t": "slope", "kmax": "a_max", "smax": "s_max", "span": "s_range"}

# Taken from a difference of squares, as sqrt(sum p v^2 - o^2): where it should be 0, the root of the rounding error is left.
ROOTS = ("d", "s2")

# Made of the edges of its bins, u_p / 8 wide: it screens rows and is a small part of B_lse.
P2G = 1e-3

# B counts about ten roundings of fp32 beside everything else, and a double that holds the exact answer is already wrong by one
# of 2^-29 of those (1.9e-9): measured over 2500 calls, 6e-11 B of the output and 2e-10 B of the LSE.
OF_B = 1e-9


def unit_roundoff(call: Call) -> float:
    """u_p where P has the format of q."""
    return torch.finfo(call.q.dtype).eps / 2


def bounds(call: Call, exact: Exact) -> Bound:
    """B for the default promises of a kernel that takes and gives the format of q."""
    name = NAMES[call.q.dtype]
    scaled = any(s is not None for s in (call.q_scale, call.k_scale, call.v_scale))
    constants = roundoff(Precision(), dtype=name, out_dtype=name, scaled=scaled)
    return bound(exact, constants, softcap=call.softcap > 0, head_dim=call.q.shape[2])


def errors(call: Call, exact: Exact, rows: Tensor) -> dict[str, float]:
    """Largest error of `exact` (at `rows`) against mpmath, by field; 1 is the most that fp64 allows."""
    u_p, head_dim = unit_roundoff(call), call.q.shape[2]
    worst: dict[str, float] = {}
    for i, head in sample_pairs(exact.lse.shape[0], exact.lse.shape[1], count=PAIRS):
        truth = exact_row(call, int(rows[i]), head, u_p=u_p)
        if truth.keys == 0:
            continue  # the bound has no use for them: test_rows_without_keys
        found = disagreement(truth, {n: getattr(exact, f)[i, head] for n, f in FIELDS.items()}, head_dim=head_dim, u_p=u_p)
        limit = slack(torch.finfo(torch.float64).eps / 2, truth.keys, head_dim, truth.kmax, truth.smax)
        for name in ROOTS:
            found[name] *= limit**0.5
        found["p2g"] = found.get("p2g", 0.0) * limit / P2G
        if float(exact.a_max[i, head]) >= truth.kmax:
            found["kmax"] = 0.0  # it may count hidden keys too
        if truth.ties_by_chance or (call.sinks is not None and truth.p2 < 2.0**-16):  # the second: a test of its own below
            found = {name: error for name, error in found.items() if name not in ("v2g", "p2g")}
        worst |= {name: max(error, worst.get(name, 0.0)) for name, error in found.items()}
    return worst


@pytest.mark.parametrize("key_block", [attention.KEY_BLOCK, 7, 1])
def test_every_ingredient_agrees_with_fifty_digits(key_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the block of keys; no field is left uncompared."""
    monkeypatch.setattr(attention, "KEY_BLOCK", key_block)
    monkeypatch.setattr(attention, "PREFIX_BLOCK", min(key_block, attention.PREFIX_BLOCK))
    seen: Counter[str] = Counter()

    @drawn
    @given(calls())
    def check(call: Call) -> None:
        rows = live_rows(call)
        worst = errors(call, attend(call, rows, unit_roundoff(call), every_tie=True), rows)
        assert all(error <= 1 for error in worst.values()), worst
        seen.update(worst.keys())

    check()
    assert set(seen) == set(FIELDS)
    assert min(seen.values()) >= 20, seen


@drawn
@given(calls())
def test_output_and_lse_are_exact_in_units_of_the_bound(call: Call) -> None:
    """|out - out_mpmath| <= 1e-9 B and |lse - lse_mpmath| <= 1e-9 B_lse."""
    rows = live_rows(call)
    exact = attend(call, rows, unit_roundoff(call))
    limits = bounds(call, exact)
    for i, head in sample_pairs(exact.lse.shape[0], exact.lse.shape[1], count=PAIRS):
        truth = exact_row(call, int(rows[i]), head, u_p=unit_roundoff(call))
        if truth.keys:
            error = (exact.out[i, head] - torch.tensor(truth.out, dtype=torch.float64)).abs()
            assert bool((error <= OF_B * limits.b[i, head]).all())
            assert abs(float(exact.lse[i, head]) - truth.lse) <= OF_B * float(limits.b_lse[i, head])


@drawn
@given(calls())
def test_every_row_of_every_head_agrees_with_the_second_formulation(call: Call) -> None:
    """Within what fp64 may be wrong by twice over, rows asked for in any order, in chunks of any size."""
    order = live_rows(call).flip(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SCORES", 64)
        exact = attend(call, order, unit_roundoff(call))
    second = second_opinion(call, u_p=unit_roundoff(call))

    alive = second.lse[order] > -torch.inf
    unit = slack(torch.finfo(torch.float64).eps / 2, call.k_cache.shape[0] * call.k_cache.shape[1], call.q.shape[2], 0.0, 0.0)
    limit = 2 * unit * (1 + second.kmax + second.smax)[order]
    assert torch.equal(exact.lse > -torch.inf, alive)
    assert bool(((exact.lse - second.lse[order]).abs()[alive] <= limit[alive]).all())
    error = (exact.out - second.out[order]).abs()
    assert bool((error <= limit[..., None] * (second.v1 + second.out.abs())[order] + 1e-300).all())


@drawn
@given(calls())
def test_rows_without_keys(call: Call) -> None:
    """Output exactly 0, LSE exactly the sink, or -inf without one, and B = 0."""
    rows = live_rows(call)
    exact = attend(call, rows, unit_roundoff(call))
    limits = bounds(call, exact)

    assert exact.empty.tolist() == [not visible_keys(call, row) for row in rows.tolist()]
    assert bool((exact.out[exact.empty] == 0).all())
    lse = torch.full_like(exact.lse, -torch.inf) if call.sinks is None else call.sinks.double().expand_as(exact.lse)
    assert torch.equal(exact.lse[exact.empty], lse[exact.empty])
    assert bool((limits.b[exact.empty] == 0).all())


@drawn
@given(calls())
def test_the_largest_partial_sum_lies_between_the_output_and_v1(call: Call) -> None:
    exact = attend(call, live_rows(call), unit_roundoff(call))
    rounding = 1e-13 * exact.v1

    assert bool((exact.prefix >= exact.out.abs() - rounding).all())
    assert bool((exact.prefix <= exact.v1 + rounding).all())


def under_a_sink(above: float) -> tuple[Call, Tensor]:
    """A call whose sinks lie `above` the LSE of the keys (about), and what a correct kernel with P in bf16 gives for it."""
    generator = torch.Generator().manual_seed(0)
    rows, heads, keys, dim = 16, 2, 256, 32
    q, k, v = (torch.randn(n, heads, dim, generator=generator).bfloat16() for n in (rows, keys, keys))
    call = Call(
        q=q, k_cache=k[None], v_cache=v[None], cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32),
        seqused_k=torch.tensor([keys], dtype=torch.int32), page_table=torch.zeros(1, 1, dtype=torch.int32),
        softmax_scale=dim**-0.5, causal=False, sinks=torch.full((heads,), 6.0 + above),
    )  # fmt: skip
    s = torch.einsum("rhd,jhd->rhj", q.double(), k.double()) * dim**-0.5
    m = s.amax(2, keepdim=True)
    p = (s - m).exp()
    row_sum = p.sum(2) + torch.exp(call.sinks.double() - m[..., 0]) if call.sinks is not None else p.sum(2)
    return call, torch.einsum("rhj,jhc->rhc", p.bfloat16().double(), v.double()) / row_sum[..., None]


@pytest.mark.parametrize(
    "above",
    [
        0.0,
        10.0,
        25.0,
    ],
)
def test_the_bound_keeps_its_size_under_a_dominant_sink(above: float) -> None:
    """The error of a correct bf16 kernel is e = 0.1 RMS or more, and at most 1, however small a part of the row its keys are."""
    call, given_out = under_a_sink(above)
    exact = attend(call, live_rows(call), 2**-8, every_tie=True)
    error = (given_out.bfloat16().double() - exact.out).abs() / bounds(call, exact).b

    assert float(error.max()) <= 1
    assert float(error.square().mean().sqrt()) >= 0.09


@pytest.mark.parametrize("above", [0.0, 10.0, 25.0])
def test_ties_are_told_apart_under_a_dominant_sink(above: float) -> None:
    """V2g of random keys, no two of equal weight, is V2 but for ties of chance."""
    call, _ = under_a_sink(above)
    exact = attend(call, live_rows(call), 2**-8, every_tie=True)

    assert bool((exact.p2g <= 1.2 * exact.p2).all())
    assert bool((exact.v2g >= 0.5 * exact.v2).all())
