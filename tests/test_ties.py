"""Keys of equal weight round alike, so they add before they are squared; keys of different weight do not."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracle.references.ties import STRUCTURAL, grouped_norms

laws = settings(derandomize=True, deadline=None, database=None, max_examples=60)
FORMATS = [2.0**-8, 2.0**-11, 2.0**-4, 2.0**-24]  # unit roundoffs of bf16, fp16, e4m3 and fp32


def norms(logits: Tensor, v: Tensor, u_p: float, *, every_tie: bool = True) -> dict[str, Tensor]:
    """P2g and V2g of softmax rows over `logits` (heads, M, keys) with v (heads, keys, dim_v), and what they are made of."""
    p = torch.softmax(logits, -1)
    p2 = p.square().sum(-1).sqrt()
    v2 = torch.bmm(p.square(), v.square()).sqrt()
    out = torch.bmm(p, v)
    p2g, v2g = grouped_norms(p, logits.clone(), u_p, p2, v2, out, lambda head: v[head], every_tie=every_tie)
    return {"p": p, "p2": p2, "v2": v2, "out": out, "p2g": p2g, "v2g": v2g}


def by_definition(logits: Tensor, v: Tensor, u_p: float) -> tuple[float, Tensor]:
    """P2g and V2g of one row (keys,): bins of width u_p/8 in log2(p), counted from the heaviest key, which lies mid-bin."""
    p, groups = torch.softmax(logits, -1), defaultdict(list)
    for j, x in enumerate(((logits.max() - logits) * 8 / (u_p * math.log(2))).tolist()):
        groups[min(round(x), 32 * 8 / u_p - 1)].append(j)
    sums = torch.stack([p[g, None].mul(v[g]).sum(0) for g in groups.values()])
    return math.sqrt(sum(float(p[g].sum()) ** 2 for g in groups.values())), sums.square().sum(0).sqrt()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@laws
@given(
    u_p=st.sampled_from(FORMATS),
    keys=st.integers(1, 40),
    distinct=st.integers(1, 12),
    spread=st.floats(0.0, 20.0),
    seed=st.integers(0, 999),
)
def test_groups_are_those_of_the_definition(u_p: float, keys: int, distinct: int, spread: float, seed: int) -> None:
    """With the values summed everywhere; P2g takes a bin's weight at its middle, at most u_p/16 away."""
    levels = spread * random(distinct, seed=seed)
    logits = levels[torch.arange(keys).remainder(distinct)].expand(2, 3, keys).clone()
    v = random(2, keys, 5, seed=seed + 1)
    got = norms(logits, v, u_p)

    for head in range(2):
        p2g, v2g = by_definition(logits[head, 0], v[head], u_p)
        assert torch.allclose(got["v2g"][head], v2g.expand(3, -1), rtol=1e-9, atol=1e-12)
        assert torch.allclose(got["p2g"][head], torch.tensor(p2g, dtype=torch.float64), rtol=u_p / 16, atol=1e-9)


@pytest.mark.parametrize("u_p", FORMATS)
def test_keys_of_one_weight_are_one_key(u_p: float) -> None:
    """P2g = 1 and V2g = |out|, however many they are, and however few of their values differ in sign."""
    v = random(1, 50, 4)
    got = norms(torch.full((1, 1, 50), 3.0, dtype=torch.float64), v, u_p)

    assert torch.allclose(got["p2g"], torch.ones(1, 1, dtype=torch.float64))
    assert torch.allclose(got["v2g"], got["out"].abs())
    assert torch.allclose(got["p2"] * math.sqrt(50), torch.ones(1, 1, dtype=torch.float64))


@pytest.mark.parametrize("every_tie", [True, False])
@pytest.mark.parametrize("u_p", FORMATS)
def test_keys_of_different_weights_stay_apart(u_p: float, every_tie: bool) -> None:
    """A whole bin apart is enough."""
    logits = -torch.arange(20, dtype=torch.float64) * 1.01 * u_p / 8 * math.log(2) - 1.0
    got = norms(logits.expand(1, 1, 20).clone(), random(1, 20, 4), u_p, every_tie=every_tie)

    assert torch.allclose(got["v2g"], got["v2"], rtol=1e-9 if every_tie else u_p)
    assert torch.allclose(got["p2g"], got["p2"], rtol=u_p / 16)


@pytest.mark.parametrize("u_p", FORMATS)
def test_keys_whose_weights_round_alike_count_as_equal(u_p: float) -> None:
    logits = torch.full((1, 1, 8), 2.0, dtype=torch.float64) - torch.arange(8) * u_p / 400
    got = norms(logits, random(1, 8, 4), u_p)

    assert torch.allclose(got["v2g"], got["out"].abs(), rtol=1e-9)


@laws
@given(u_p=st.sampled_from(FORMATS), keys=st.integers(1, 60), seed=st.integers(0, 999), every_tie=st.booleans())
def test_grouping_never_takes_from_p2_and_never_exceeds_the_whole(u_p: float, keys: int, seed: int, every_tie: bool) -> None:
    """P2 <= P2g <= 1, and V2g <= V1."""
    logits = random(1, 2, keys, seed=seed).mul(4).round() / 4
    v = random(1, keys, 3, seed=seed + 1)
    got = norms(logits, v, u_p, every_tie=every_tie)

    assert bool((got["p2g"] >= got["p2"]).all()) and bool((got["p2g"] <= 1 + u_p / 8).all())
    assert bool((got["v2g"] <= torch.bmm(got["p"], v.abs()) * (1 + 1e-9)).all()) or not every_tie


@laws
@given(u_p=st.sampled_from(FORMATS), keys=st.integers(2, 60), seed=st.integers(0, 999), every_tie=st.booleans())
def test_neither_the_order_of_keys_nor_the_company_of_rows_matters(u_p: float, keys: int, seed: int, every_tie: bool) -> None:
    logits = random(2, 4, keys, seed=seed).mul(2).round() / 2
    v = random(2, keys, 3, seed=seed + 1)
    order = torch.randperm(keys, generator=torch.Generator().manual_seed(seed))

    whole = norms(logits, v, u_p, every_tie=every_tie)
    moved = norms(logits[:, :, order], v[:, order], u_p, every_tie=every_tie)
    alone = norms(logits[1:, 2:3], v[1:], u_p, every_tie=every_tie)
    for name in ("p2g", "v2g"):
        assert torch.allclose(whole[name], moved[name], rtol=1e-9, atol=1e-12)
        assert torch.allclose(whole[name][1:, 2:3], alone[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("u_p", FORMATS)
def test_a_shift_of_all_logits_changes_nothing(u_p: float) -> None:
    logits, v = random(1, 3, 30).mul(2).round() / 2, random(1, 30, 4, seed=1)
    one, two = norms(logits, v, u_p), norms(logits - 300.0, v, u_p)

    assert torch.allclose(one["v2g"], two["v2g"], rtol=1e-9) and torch.allclose(one["p2g"], two["p2g"], rtol=1e-9)


def test_ties_of_chance_are_not_summed_with_their_values() -> None:
    """Of a thousand random logits many share a bin of bf16; as independent numbers, which costs no look at v."""
    logits, v = random(1, 4, 1000), random(1, 1000, 8, seed=1)
    p = torch.softmax(logits, -1)
    p2, v2, out = p.square().sum(-1).sqrt(), torch.bmm(p.square(), v.square()).sqrt(), torch.bmm(p, v)

    def no_values(head: int) -> Tensor:
        raise AssertionError(f"the values of head {head} were asked for")

    p2g, v2g = grouped_norms(p, logits.clone(), 2.0**-8, p2, v2, out, no_values, every_tie=False)
    exact = norms(logits, v, 2.0**-8)["v2g"]
    assert bool((p2g > p2).all()) and bool((p2g < STRUCTURAL * p2).all())
    assert bool((v2g >= v2).all())
    assert float((v2g / exact - 1).abs().max()) < 0.25 and float((v2g / exact - 1).mean().abs()) < 0.05


def test_ties_by_design_are_found_without_being_asked_for() -> None:
    """Eight keys, each many times over."""
    logits = random(8)[torch.arange(400) % 8].expand(1, 3, 400).clone()
    v = 2 + random(1, 400, 4, seed=1)
    quick, exact = norms(logits, v, 2.0**-8, every_tie=False), norms(logits, v, 2.0**-8)

    assert torch.equal(quick["v2g"], exact["v2g"])
    assert bool((exact["v2g"] > 5 * exact["v2"]).all())


def test_where_no_key_is_there_is_nothing_to_group() -> None:
    empty = torch.zeros(2, 3, 0, dtype=torch.float64)
    p2, v2 = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, 4, dtype=torch.float64)
    p2g, v2g = grouped_norms(empty, empty.clone(), 2.0**-8, p2, v2, v2, lambda head: v2[0], every_tie=True)

    assert torch.equal(p2g, p2) and torch.equal(v2g, v2)
